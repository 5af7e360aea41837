"""Budget: the slots and the tape that fit in a number of bytes, and the optimum."""

from collections.abc import Iterator
from functools import cache

from recoup.core.units import print_bytes
from recoup.errors import UsageError
from recoup.schedules.revolve import Chunked
from recoup.schedules.schedule import require_at_least


def fit_budget(
    steps: int, budget_bytes: int, *, state_bytes: int, tape_bytes: int
) -> Chunked:
    """Return a chunked schedule that fits in a budget, with the fewest evaluations.

    Slots and chunk are chosen together. Memory is `(slots - 1) * state_bytes + chunk *
    tape_bytes`; the initial state is alive anyway and does not count.

    Every chunk up to 1000 steps is tried; beyond, the shortest and the longest for each
    number of chunks: about `4 * sqrt(steps)` evaluations of the closed formula.

    Args:
        steps: The number of steps of the loop.
        budget_bytes: Bytes that may be held for backward.
        state_bytes: Bytes of one state.
        tape_bytes: Bytes that autograd keeps for one step.

    Raises:
        UsageError: The tape of a single step does not fit.

    Examples:
        >>> fit_budget(1000, 60, state_bytes=1, tape_bytes=3)
        Chunked(steps=1000, slots=31, chunk=10)
        >>> fit_budget(1000, 3000, state_bytes=1, tape_bytes=3).chunk  # all of it
        1000
    """
    require_at_least(0, steps=steps, budget_bytes=budget_bytes)
    require_at_least(0, state_bytes=state_bytes, tape_bytes=tape_bytes)
    require_tape(budget_bytes, tape_bytes)
    found = [
        Chunked(steps, slots=1 + left // max(state_bytes, 1), chunk=chunk)
        for chunk in _chunks(steps)
        if (left := budget_bytes - chunk * tape_bytes) >= 0
    ]
    # On ties the shorter tape: it uses less of the budget.
    return min(found, key=lambda schedule: (schedule.counts().advances, schedule.chunk))


def require_tape(budget_bytes: int, tape_bytes: int) -> None:
    """Raise `UsageError` if the tape of one step does not fit in a budget."""
    if budget_bytes < tape_bytes:
        raise UsageError(
            f"a budget of {print_bytes(budget_bytes)} does not hold the tape of one "
            f"step, which takes {print_bytes(tape_bytes)}; raise the budget."
        )


def _chunks(steps: int) -> Iterator[int]:
    """Return the chunk sizes to try: all, or the extremes for each number of chunks.

    The first chunk is the shorter one and runs most often, so among sizes with the same
    number of chunks either extreme may be the best.
    """
    if steps <= _FEW:
        yield from range(1, max(steps, 1) + 1)
        return
    shortest = 1
    while shortest < steps:
        pieces = -(-steps // shortest)
        longest = (steps - 1) // (pieces - 1)
        yield shortest
        yield longest
        shortest = longest + 1
    yield steps


_FEW = 1000


def least_evaluations(steps: int, budget: int, *, tape: int) -> int | None:
    """Return the fewest evaluations that can reverse a loop within a budget.

    The exact dynamic program that chooses for every step whether its state or its tape
    is kept (the mixed strategy of A. Gruslys, R. Munos, I. Danihelka, M. Lanctot and A.
    Graves, Memory-Efficient Backpropagation Through Time, 2016, for tapes that may
    differ in size from states). It is the reference for `fit_budget`.

    Costs `steps ** 2 * budget` operations: meant for a hundred steps.

    Args:
        steps: The number of steps of the loop.
        budget: The budget without the initial state, in units of one state.
        tape: The tape of one step in the same units.

    Returns:
        The evaluations, or None if the tape of one step does not fit.

    Examples:
        >>> least_evaluations(100, 24, tape=3)
        206
    """
    require_at_least(0, steps=steps, budget=budget)
    require_at_least(1, tape=tape)
    if steps and budget < tape:
        return None

    @cache
    def least(count: int, free: int) -> int:
        if count * tape <= free:
            return count
        if free < tape:
            return _TOO_MANY
        last = free // tape
        found = count + least(count - last, free)
        for place in range(1, count):
            if free >= 1:
                kept_state = place + least(count - place, free - 1) + least(place, free)
                found = min(found, kept_state)
            if free >= 2 * tape:
                kept_tape = (
                    place + least(count - place, free - tape) + least(place - 1, free)
                )
                found = min(found, kept_tape)
        return found

    for count in range(steps):  # bottom-up, so that the recursion stays shallow
        for free in range(budget + 1):
            least(count, free)
    return least(steps, budget)


_TOO_MANY = 10**18
