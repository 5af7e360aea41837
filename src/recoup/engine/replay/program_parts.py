"""Parts of a program: the operations that each of its ends needs."""

from collections import defaultdict
from collections.abc import Sequence

from recoup.engine.lifetime.operations import TapeOperation
from recoup.engine.lifetime.values import TapeValue

Part = tuple[list[int], list[TapeValue]]
"""The positions of operations, in order, and the wanted values that they make."""

WANTED = 1
"""The mark of an operation that makes a wanted value. The other bits of a mark are the
ends that need the operation: an end is wanted, and no other operation reads its
result."""

MOST_ENDS = 512
"""The most ends with a bit each; the last bit is shared by all further ends. A mark
takes as many bits, a twentieth of the memory of a recorded operation."""

_MOST_JOINED = 8
"""The most ends that share operations and are handled without a search. Each of them
iterates over all shared operations, so more would take quadratic time."""


def _empty_part() -> Part:
    return [], []


class ProgramParts:
    """The operations that each end of a program needs.

    Args:
        operations: The operations of the program.
        wanted: The values that it computes.
        marks: The marks of operations, in order; 0 for operations outside the program.
        ends: The positions of the ends, counted from the last operation.

    Attributes:
        alone: The parts that share nothing with others, by the position of their end.
        bits: The bits of the other ends, by position, if there are few.
        marks: By position, the bits of the ends that need the operation.
        by_mark: The operations, and their wanted values, by the ends that need them.
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
        """Return values with the marks of their readers that other ends need.

        Such a value's readers may still be outstanding after the operations that one
        end needs have run.
        """
        found = self._crossing
        if found is None:
            found = self._crossing = {}
            marks, joined = self.marks, self._joined
            for place, mark in enumerate(marks):
                # Operations that all ends need, or only one independent end, read
                # values with the same mark only.
                if mark == joined or not mark & joined:
                    continue
                for value in self._operations[place].reads():
                    if value.hold is None and marks[value.producer] != mark:
                        if value in found:
                            found[value].append(mark)
                        else:
                            found[value] = [mark]
        return found
