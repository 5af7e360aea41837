"""Which pass of a step a call of the model belongs to."""

from collections.abc import Hashable

from recoup.core.plan import Plan


class PassOrder:
    """Follows the calls of a step with several passes, and says which pass each is in.

    Calls are expected in the order of the measured step. One that does not come as
    expected is looked for among the others: by what is called, and by what it is called
    with. A wrong answer costs memory, never a gradient.

    Attributes:
        expected: The module that the measured step called there; None: the same.

    Examples:
        >>> first, second = Plan(roots=("g", "d")), Plan(roots=("d",))
        >>> order = PassOrder(Plan(passes=(first, second), order=(0, 1)))
        >>> [order.pass_of(root) for root in ("g", "d", "d", "g", "d", "g")]
        [0, 0, 1, 0, 0, 0]
    """

    def __init__(self, plan: Plan) -> None:
        order = plan.order or (0,)
        self._calls = [
            (number, root, not place)
            for number in order
            for place, root in enumerate(plan.parts[number].roots)
        ]
        self._keys: list[Hashable] = [None] * len(self._calls)
        self._next = 0
        self.expected: str | None = None

    def pass_of(self, root: str, key: Hashable = None) -> int:
        """Return the pass of the next call.

        Args:
            root: The path of the module that is called.
            key: Distinguishes its calls, as the shapes of its arguments.
        """
        count = len(self._calls)
        ahead = [(self._next + shift) % count for shift in range(count)]
        same = [n for n in ahead if self._calls[n][1] == root]
        wanted = self._calls[ahead[0]][1]
        self.expected = None if wanted == root else wanted
        unknown = [n for n in same if self._keys[n] is None]
        alike = [n for n in same if self._keys[n] == key]
        if ahead[0] in alike or (unknown and ahead[0] == unknown[0]):
            place = ahead[0]
        else:
            candidates = alike or same or ahead
            firsts = [n for n in candidates if self._calls[n][2]]
            place = (firsts or candidates)[0]
        if self._keys[place] is None:
            self._keys[place] = key
        self._next = (place + 1) % count
        return self._calls[place][0]
