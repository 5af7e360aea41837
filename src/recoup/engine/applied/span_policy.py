"""The policy of a region that runs by a plan: it holds what the plan names."""

from collections.abc import Iterable, Mapping

from recoup.core.plan import Held
from recoup.core.segments import Action
from recoup.engine.applied.offloaded_saves import HOST
from recoup.engine.tiers.protocol import Tier


class HeldBySpan:
    """The policy of one region that runs by a plan.

    A value is identified by its operator and by how many of that operator's values came
    before it in the region, which other sizes of the batch do not change. Where a
    region makes more of them than when it was measured, as when its graph depends on
    the data, the others go by their kind: they are held if most of the known are.

    Args:
        held: For each operator, which of its values are held, and how.
        made: For each of these operators, how many values are known.

    Examples:
        >>> policy = HeldBySpan({"aten.mm.default": {1: Action.KEEP}}, {})
        >>> [policy.keeps("aten.mm.default", 64) for _ in range(3)]
        [False, True, False]
        >>> held = {"aten.mm.default": {0: Action.KEEP, 1: Action.KEEP}}
        >>> policy = HeldBySpan(held, {"aten.mm.default": 3})
        >>> [policy.keeps("aten.mm.default", 64) for _ in range(5)]
        [True, True, False, True, True]
    """

    def __init__(
        self, held: Mapping[str, Mapping[int, Action]], made: Mapping[str, int]
    ) -> None:
        self._held = held
        self._made = made
        self._seen: dict[str, int] = {}

    def keeps(self, operator: str, nbytes: int) -> bool | Tier:
        """Return whether the plan holds this value, or the tier that does."""
        del nbytes
        held = self._held.get(operator)
        if held is None:
            return False
        nth = self._seen.get(operator, 0)
        self._seen[operator] = nth + 1
        known = self._made.get(operator)
        if known is not None and nth >= known and 2 * len(held) > known:
            return True
        action = held.get(nth)
        return HOST if action is Action.OFFLOAD else action is Action.KEEP


def table_of(held: Iterable[Held]) -> dict[str, dict[int, Action]]:
    """Return held values by operator and number."""
    table: dict[str, dict[int, Action]] = {}
    for value in held:
        table.setdefault(value.operator, {})[value.nth] = value.action
    return table
