"""What recording costs the host, per operator."""

import time

import torch

from recoup.core.segments import recorded_operators
from recoup.engine.active import region
from recoup.engine.options import Options

_OPERATORS = 128
_REPEATS = 5


def recording_seconds() -> float:
    """Return the host time that a region adds to each operator of forward in it.

    Runs a row of small operators on the processor with and without a region, some
    times each. Costs a few milliseconds.

    Examples:
        >>> 0 <= recording_seconds() < 0.01
        True
    """
    x = torch.ones(8, requires_grad=True)

    def row() -> float:
        start = time.perf_counter()
        y = x
        for _ in range(_OPERATORS):
            y = y * x
        return time.perf_counter() - start

    def recorded() -> float:
        with region("a row", Options(verify="off"), "row"):
            return row()

    recorded()
    plain = min(row() for _ in range(_REPEATS))
    inside = min(recorded() for _ in range(_REPEATS))
    return max(0.0, inside - plain) / recorded_operators(_OPERATORS)
