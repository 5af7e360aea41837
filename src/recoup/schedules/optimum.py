"""Optimum: the fewest evaluations of any schedule in a budget, for small loops."""

from functools import cache

from recoup.schedules.schedule import require_at_least


def least_evaluations(steps: int, budget: int, *, tape: int) -> int | None:
    """Return the fewest evaluations that can reverse a loop within a budget.

    The exact dynamic programme that chooses for every step whether its state or its
    tape is kept (the mixed strategy of A. Gruslys, R. Munos, I. Danihelka, M. Lanctot
    and A. Graves, Memory-Efficient Backpropagation Through Time, 2016, with a tape
    that need not be as large as a state). `fit_budget` is measured against it.

    Costs `steps ** 2 * budget` operations: meant for a hundred steps.

    Args:
        steps: How many steps the loop has.
        budget: What may be held besides the beginning, in units of one state.
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

    for count in range(steps):  # from below, so that the recursion stays shallow
        for free in range(budget + 1):
            least(count, free)
    return least(steps, budget)


_TOO_MANY = 10**18
