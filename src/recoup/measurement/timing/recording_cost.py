"""What recording costs the host, per operator."""

import time

import torch

from recoup.core.segments import recorded_operators
from recoup.engine.recording.region import Region
from recoup.engine.recording.region_options import Options

RECORDING_BY_LEAST = 4.0
"""How much longer it takes to record an operator of a model, in forward and where
backward asks for it, than the simplest one in forward: 2.5 to 5 times for eight models
of small tensors on the CPU."""

_OPERATORS = 128
_REPEATS = 5


def recording_seconds() -> float:
    """Return what a region adds to each operator of a model in it, as it usually is.

    Costs a few milliseconds.
    """
    return RECORDING_BY_LEAST * least_recording_seconds()


def least_recording_seconds() -> float:
    """Return the host time that a region adds to the simplest operator of forward.

    Runs a row of small operators on the processor with and without a region, some
    times each. Costs a few milliseconds.

    Examples:
        >>> 0 <= least_recording_seconds() < 0.01
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
        # Without `begin`: nobody who watches regions is to count this one.
        region = Region("a row", Options(verify="off"), "row")
        region.open()
        seconds = row()
        region.close()
        return seconds

    recorded()
    plain = min(row() for _ in range(_REPEATS))
    inside = min(recorded() for _ in range(_REPEATS))
    return max(0.0, inside - plain) / recorded_operators(_OPERATORS)
