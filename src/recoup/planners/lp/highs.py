"""The two calls of HiGHS that planners make, with their types."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
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
        whole: 1 for columns that must be whole, 0 for the others.
    """

    objective: Floats
    upper: Floats
    limits: Floats
    ones: Floats
    whole: Floats

    def restricted(self, columns: NDArray[np.bool_]) -> "System":
        """Return the system with some of its columns."""
        return System(
            self.objective[columns],
            self.upper[:, columns],
            self.limits,
            self.ones[:, columns],
            self.whole[columns],
        )


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


def whole(system: System, *, nodes: int) -> Floats | None:
    """Return the best x found in that time whose marked columns are whole, or None."""
    columns = len(system.objective)
    found = cast(
        "Any",
        milp(
            system.objective,
            integrality=system.whole.astype(np.int64),
            bounds=Bounds(np.zeros(columns), np.full(columns, np.inf)),
            constraints=[
                LinearConstraint(csr_array(system.upper), -np.inf, system.limits),
                LinearConstraint(csr_array(system.ones), 1, 1),
            ],
            # A number of nodes, so that the answer does not depend on the machine;
            # the time is for emergencies.
            options={
                "time_limit": 5.0,
                "node_limit": nodes,
                "mip_rel_gap": 1e-3,
            },
        ),
    )
    return found.x
