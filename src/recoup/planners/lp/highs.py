"""Linear programmes as arrays, and the call of HiGHS that solves them."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from recoup.core.graph import Floats


@dataclass(frozen=True)
class System:
    """Minimise objective . x where upper . x <= limits, ones . x = 1 and x >= 0.

    Attributes:
        objective: What a column costs.
        upper: Rows of inequalities.
        limits: Their right sides.
        ones: Rows of equalities.
    """

    objective: Floats
    upper: Floats
    limits: Floats
    ones: Floats


def mixture(system: System) -> tuple[Floats, float, Floats] | None:
    """Return the best x, what it costs, and the price of each upper row, or None."""
    found = cast(
        "Any",
        linprog(
            system.objective,
            A_ub=cast("Any", csr_array(system.upper)),
            b_ub=system.limits,
            A_eq=cast("Any", csr_array(system.ones)),
            b_eq=np.ones(len(system.ones)),
            method="highs",
        ),
    )
    if found.x is None:
        return None
    return found.x, float(found.fun), -found.ineqlin.marginals
