"""Picture: a schedule drawn in text, one line for every sweep."""

from collections.abc import Iterable

from recoup.schedules.actions import (
    Action,
    Advance,
    Free,
    Restore,
    Reverse,
    Snapshot,
)


def draw(actions: Iterable[Action], steps: int) -> str:
    """Return a picture of a schedule: steps from left to right, time downwards.

    `o` is a step before which a state is kept, `>` one that is run without a tape, `#`
    one that is run with a tape and reversed, `|` a state that is held meanwhile.

    Examples:
        >>> from recoup.schedules.revolve import Revolve
        >>> print(draw(Revolve(6, slots=2).actions(), 6))
        o>>o>#
        |  o#
        |  #
        oo#
        |#
        #
    """
    held: dict[int, int] = {}
    lines: list[str] = []
    line = [" "] * steps
    for action in actions:
        match action:
            case Advance(start, stop):
                for step in range(start, stop):
                    line[step] = "o" if line[step] == "o" else ">"
            case Snapshot(step, slot):
                held[slot] = step
                line[step] = "o"
            case Restore(step):
                line = [" "] * steps
                for other in held.values():
                    line[other] = "|"
                line[step] = "o"
            case Reverse(start, stop):
                line[start:stop] = "#" * (stop - start)
                lines.append("".join(line).rstrip())
            case Free(slot):
                del held[slot]
    return "\n".join(lines)
