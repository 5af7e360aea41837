"""JAX table: a schedule as rows of integers, for a program that runs through them."""

from collections.abc import Iterable

import numpy as np

from recoup.schedules.actions import (
    Action,
    Advance,
    Restore,
    Reverse,
    Snapshot,
)

# The columns of the table; -1 in a slot stands for nothing to do.
RESTORE, START, STOP, KEEP, REVERSE_START, REVERSE_STOP = range(6)


def table(actions: Iterable[Action]) -> tuple[np.ndarray, int, dict[int, int]]:
    """Return rows of restore, advance, snapshot, reverse; where the first reverse is.

    A row does its four parts in this order, so that most need one row for two actions.
    """
    rows: list[list[int]] = []
    positions: dict[int, int] = {}
    reached = 0  # the part of the last row that is taken
    first_reverse = -1

    def part(number: int) -> list[int]:
        nonlocal reached
        if not rows or number <= reached:
            rows.append([-1, 0, 0, -1, 0, 0])
        reached = number
        return rows[-1]

    for action in actions:
        match action:
            case Restore(_, slot):
                part(1)[RESTORE] = slot
            case Advance(start, stop):
                part(2)[START : STOP + 1] = start, stop
            case Snapshot(step, slot):
                part(3)[KEEP] = slot
                if first_reverse < 0:
                    positions[slot] = step
            case Reverse(start, stop):
                if first_reverse < 0:
                    first_reverse, reached = len(rows), 5
                part(4)[REVERSE_START:] = start, stop
            case _:
                pass
    return np.array(rows, np.int32).reshape(-1, 6), first_reverse, positions
