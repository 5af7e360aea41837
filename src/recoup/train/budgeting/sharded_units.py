"""A budget for a model that is sharded in several units, each gathered by itself."""

from collections.abc import Callable, Sequence

from torch import nn

from recoup.core.units import print_bytes
from recoup.engine.scopes.module import checkpoint_module, uncheckpoint_module
from recoup.engine.scopes.policies import KeepCostly
from recoup.engine.verification.replay_check import Verify
from recoup.errors import InfeasibleError, UnsupportedError
from recoup.train.processes import is_sharded

Measure = Callable[[], int]
"""Runs a step in all processes, twice, and returns the largest peak of the second."""


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that `fully_shard` gathers one at a time.

    Raises:
        UnsupportedError: One lies inside another. A region around the outer one would
            be replayed while the parameters of the inner one are not there.
    """
    units = [part for part in model.modules() if is_sharded(part) and part is not model]
    for unit in units:
        if any(is_sharded(part) for part in unit.modules() if part is not unit):
            raise UnsupportedError(
                "budget= was set for a model with a sharded part inside a sharded part "
                f"({type(unit).__name__}): regions must lie inside one that is "
                "gathered as a whole. Shard the blocks and the model around them, or "
                "set use_gradient_checkpointing=True instead."
            )
    return units


class UnitPlan:
    """Which units of a sharded model are recomputed, and how much of each.

    A region that reaches over several units would need the parameters of all at once
    when it is replayed, and gathering them would need all processes at the same
    moment. So regions lie inside units here, and what there is to choose is a level:
    in a number of units, from the first on, all but the costly results is recomputed,
    and in further ones everything.

    Args:
        units: The units, in the order in which the model has them.

    Attributes:
        level: How much is recomputed, from 0 to `levels`.
        budget_bytes: The budget that the level was chosen for.
        measured_peak_bytes: The largest peak of a step at this level, in any process.
        trials: How many levels were tried on real steps.
    """

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._units = tuple(units)
        self.level = 0
        self.budget_bytes = 0
        self.measured_peak_bytes = 0
        self.trials = 0

    @property
    def levels(self) -> int:
        """The level at which every unit is recomputed as a whole."""
        return 2 * len(self._units)

    @property
    def plan(self) -> tuple[str, ...]:
        """What is done with each unit: `keep`, `keep costly` or `recompute`."""
        return tuple(self._ways(self.level))

    def settle(self, budget_bytes: int, measure: Measure, reserved_bytes: int) -> None:
        """Choose the lowest level whose step stays within the budget.

        Costs two steps for each level that is tried, about twice the logarithm of
        their number, beginning with the one that needs least memory.

        Raises:
            InfeasibleError: The step takes more with every unit recomputed.
        """
        self.budget_bytes = budget_bytes

        def peak_at(level: int) -> int:
            self._put(level, verify="off")
            self.trials += 1
            return measure() + reserved_bytes

        try:
            self.level, self.measured_peak_bytes = lowest_level(
                peak_at, self.levels, budget_bytes
            )
            self._put(self.level, verify="first")
            measure()
        except BaseException:
            self.remove()
            raise

    def tighten(self) -> bool:
        """Recompute in a tenth of the units more; say whether that was possible."""
        if self.level == self.levels:
            return False
        self.level = min(self.levels, self.level + max(1, self.levels // 10))
        self._put(self.level, verify="first")
        return True

    def remove(self) -> None:
        """Take all regions off the units."""
        self.level = 0
        for unit in self._units:
            uncheckpoint_module(unit)

    def __str__(self) -> str:
        ways = self.plan
        return (
            f"budget {print_bytes(self.budget_bytes)}: measured peak "
            f"{print_bytes(self.measured_peak_bytes)}; of {len(ways)} units "
            f"{ways.count('recompute')} are recomputed, {ways.count('keep costly')} "
            f"but for costly results ({self.trials} levels tried)"
        )

    def _ways(self, level: int) -> list[str]:
        count = len(self._units)
        costly, whole = min(level, count), max(0, level - count)
        return (
            ["recompute"] * whole
            + ["keep costly"] * (costly - whole)
            + ["keep"] * (count - costly)
        )

    def _put(self, level: int, *, verify: Verify) -> None:
        for number, (unit, way) in enumerate(
            zip(self._units, self._ways(level), strict=True)
        ):
            uncheckpoint_module(unit)
            if way != "keep":
                checkpoint_module(
                    unit,
                    name=f"unit {number}",
                    policy=KeepCostly() if way == "keep costly" else None,
                    verify=verify,
                )


def lowest_level(
    peak_at: Callable[[int], int], levels: int, budget_bytes: int
) -> tuple[int, int]:
    """Return the lowest level whose peak is within a budget, and that peak.

    Starts at the highest level, which needs least, and goes down in strides that
    double as long as the peak, by its last growth, is going to fit.

    Args:
        peak_at: Returns the peak at a level; not larger at higher levels.
        levels: The highest level.
        budget_bytes: The budget.

    Raises:
        InfeasibleError: The highest level does not fit.

    Examples:
        >>> lowest_level(lambda level: 100 - 10 * level, 8, 55)
        (5, 50)
    """
    level, peak = levels, peak_at(levels)
    if peak > budget_bytes:
        raise InfeasibleError(
            f"a budget of {print_bytes(budget_bytes)} cannot be met: with every "
            f"unit recomputed a step takes {print_bytes(peak)}.",
            budget_bytes=budget_bytes,
            floor_bytes=peak,
        )
    failed, stride = -1, 1
    while level > failed + 1:
        lower = max(failed + 1, level - stride)
        found = peak_at(lower)
        if found > budget_bytes:
            failed = lower
            stride = max(1, (level - lower) // 2)
            continue
        growth = max(1, (found - peak) // (level - lower))
        level, peak = lower, found
        stride = max(1, min(2 * stride, (budget_bytes - peak) // growth))
    return level, peak
