"""Parts of a program: what each of its ends needs, found without a search."""

from collections import defaultdict
from collections.abc import Sequence

from recoup.engine.lifetime.operations import TapeOperation
from recoup.engine.lifetime.values import TapeValue

Part = tuple[list[int], list[TapeValue]]
"""The places of operations, in order, and the wanted values that they make."""

WANTED = 1
"""The mark of an operation that makes a wanted value. The other bits of a mark stand
for the ends that need the operation: an end is wanted, and no other operation reads
what it makes."""

MOST_ENDS = 512
"""So many ends have a bit of their own, the last of them with all that follow. A mark
takes as many bits; what is recorded of an operation takes twenty times as much."""

_MOST_JOINED = 8
"""So many ends that share operations are handled without a search. For each of them all
that they share is gone through, so that more would take quadratic time."""


def _empty_part() -> Part:
    return [], []


class ProgramParts:
    """Which operations each end of a program needs.

    Args:
        operations: What the program runs.
        wanted: The values that it computes.
        marks: The marks of operations, in order; 0 for others, which it does not run.
        ends: The places of the ends, counted from the last operation.

    Attributes:
        alone: The parts that have nothing in common with others, by the place of their
            end.
        bits: The bits of the other ends, by their places, if these are few.
        marks: By place, the bits of the ends that need the operation.
        by_mark: The operations that the same ends need, and what is wanted of them.
    """

    def __init__(
        self,
        operations: Sequence[TapeOperation],
        wanted: Sequence[TapeValue],
        marks: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        self._operations = operations
        self._crossing: dict[TapeValue, list[int]] | None = None
        own = [mark & ~WANTED for mark in marks if mark]
        parts: defaultdict[int, Part] = defaultdict(_empty_part)
        for place, needing in enumerate(own):
            parts[needing][0].append(place)
        for value in wanted:
            parts[own[value.producer]][1].append(value)
        joined = 0
        for needing in parts:
            if needing & (needing - 1):  # several
                joined |= needing
        if len(ends) >= MOST_ENDS:
            joined |= WANTED << MOST_ENDS
            ends = ends[: MOST_ENDS - 1]
        self.marks = own
        self.by_mark = parts
        self._joined = joined
        self.alone = {p[0][-1]: p for bits, p in parts.items() if not bits & joined}
        self.bits: dict[int, int] = {}
        if joined:
            last, bit = len(own) - 1, WANTED
            for end in ends:
                bit <<= 1
                if joined & bit:
                    self.bits[last - end] = bit
            if len(self.bits) > _MOST_JOINED:
                self.bits = {}

    def crossing(self) -> dict[TapeValue, list[int]]:
        """Return values with the marks of operations that read them, for other ends.

        Not all ends that need such a value need all of the operations that read it. So
        what an end needs may be run, and an operation that reads the value may not.
        """
        found = self._crossing
        if found is None:
            found = self._crossing = {}
            marks, joined = self.marks, self._joined
            for place, mark in enumerate(marks):
                # What all ends need reads nothing that others do not, and what is
                # alone reads nothing that others do.
                if mark == joined or not mark & joined:
                    continue
                for value in self._operations[place].reads():
                    if value.hold is None and marks[value.producer] != mark:
                        if value in found:
                            found[value].append(mark)
                        else:
                            found[value] = [mark]
        return found
