"""The binomial formulas of Griewank and Walther: how many steps, where to cut.

Slots count the state at the beginning, as in the paper: A. Griewank and A. Walther,
Algorithm 799: Revolve, ACM Transactions on Mathematical Software 26 (2000).
"""


def repetitions(steps: int, slots: int) -> tuple[int, int]:
    """Return the least `t` with C(slots + t, t) >= steps, and that binomial.

    `t` is how often a step is advanced at most by an optimal schedule.

    Costs about `t` multiplications.

    Examples:
        >>> repetitions(1000, 10)  # C(14, 4) = 1001
        (4, 1001)
    """
    times, reach = 0, 1
    while reach < steps:
        times += 1
        reach = reach * (slots + times) // times
    return times, reach


def fewest_advances(steps: int, slots: int) -> int:
    """Return the least number of untaped step evaluations that can reverse a loop.

    The first sweep is among them, but for its last step, which is taped at once.

    Examples:
        >>> fewest_advances(10, 3), fewest_advances(1000, 10)
        (15, 3636)
    """
    if steps <= 1:
        return 0
    slots = min(slots, steps - 1)
    if slots == 1:
        return steps * (steps - 1) // 2
    times, reach = repetitions(steps, slots)
    # C(slots + times, times - 1) = C(slots + times, times) * times / (slots + 1)
    return times * steps - reach * times // (slots + 1)


def first_cut(steps: int, slots: int) -> int:
    """Return how far to advance before the next snapshot: the farthest optimal choice.

    Examples:
        >>> first_cut(1000, 10)
        286
    """
    if slots == 1:
        return steps - 1
    if slots >= steps - 1:
        return 1
    times, reach = repetitions(steps, slots)
    one_less = reach * times // (slots + times)  # C(slots + times - 1, times - 1)
    two_less = one_less * (times - 1) // (slots + times - 1)
    return min(one_less, steps - (one_less - two_less))


def first_step_advances(steps: int, slots: int) -> int:
    """Return how often a schedule that cuts at `first_cut` advances its first step.

    Examples:
        >>> first_step_advances(1000, 10)
        4
    """
    count = 0
    while steps > 1:
        if slots == 1:
            return count + steps - 1
        steps = first_cut(steps, slots)
        count += 1
    return count
