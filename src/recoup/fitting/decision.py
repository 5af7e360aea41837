"""Decisions of a closed loop: pure functions from measurements to the next plan.

`recoup.fit` and the manager both plan for a target, run a step, compare the measured
peak with the budget, and plan for another target or accept. They differ in who runs the
step, and share these decisions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from recoup.measurement.timing.pace import Pace

Attempted = TypeVar("Attempted")

_ROUNDS = 4
"""The number of plans that may exceed the budget before the smallest is tried."""

_ROOM = 0.02
"""A plan that leaves more than this share of the budget unused is improved once."""

_PATIENCE_SECONDS, _PATIENCE_STEPS = 3.0, 6.0
"""The latest start of thorough planning: seconds, plus plain steps."""

_LIMIT_SECONDS, _LIMIT_STEPS = 4.0, 12.0
"""The time limit for optional work, so that a fit takes at most 5 s and 15 plain steps,
even if a step takes longer than earlier ones."""

_ANOTHER_SECONDS, _ANOTHER_STEPS = 0.7, 2.0
_TIMING_STEPS = 6.0
"""The cost of another plan and attempt, and of timing it: seconds, plus steps with the
current plan."""

_LOOKING_STEPS = 3.0
_REPEATING_SECONDS, _REPEATING_STEPS = 20.0, 40.0
"""The cost of looking for repeatable blocks, in steps; and the time limit of a fit that
does so, which is higher because every later step gains."""

_SLOWER = 1.05
"""A plan whose host time exceeds the prediction by this factor is planned again."""

_NEAR_HOST = 0.8
"""A step whose host time is this share of its time may be faster without recording. The
device's time alone is unknown: operators were timed as the host launched them."""

_SURPRISE = 0.05
LAPS, _HOST_LAPS = 3, 7
_LOOK_SECONDS = 1.0
"""A pace that differs from the prediction by more than `_SURPRISE` is measured again,
in `LAPS` laps. The pace of a CPU-bound step varies: it is measured again in up to
`_HOST_LAPS` laps, for about `_LOOK_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one attempt.

    Attributes:
        budget_bytes: The budget of the attempt.
        target_bytes: The peak that was planned for; None: the smallest plan.
        predicted_bytes: The predicted peak; None: there is no plan for the target.
        measured_bytes: The peak of a real step; None if no step ran, because there is
            no plan for the target or it equals the previous one.
    """

    budget_bytes: int
    target_bytes: int | None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether a step ran within the budget."""
        return (
            self.measured_bytes is not None and self.measured_bytes <= self.budget_bytes
        )

    @property
    def error_bytes(self) -> int:
        """Measured minus predicted bytes."""
        if self.measured_bytes is None or self.predicted_bytes is None:
            return 0
        return self.measured_bytes - self.predicted_bytes


@dataclass(frozen=True, slots=True)
class Try:
    """Plan for a target (None: the smallest plan) and run a step."""

    target_bytes: int | None


@dataclass(frozen=True, slots=True)
class Accept:
    """Use the plan of this attempt, by index in the history."""

    number: int


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No plan fits; the smallest needs this many bytes."""

    needed_bytes: int


Decision = Try | Accept | Infeasible


def decide(
    history: Sequence[Outcome],
    budget_bytes: int,
    *,
    margin_bytes: int = 0,
    has_time: bool = False,
) -> Decision:
    """Return what to do after the attempts so far.

    After a plan that exceeds the budget, the target is reduced by the largest
    prediction error so far. After a plan that needs less than predicted and leaves room
    follows, once and if there is time, one that uses the room.

    Args:
        history: All attempts, in order. Attempts for other budgets only contribute
            their prediction errors.
        budget_bytes: The most bytes that a step may take.
        margin_bytes: Bytes to leave free, if there is a plan for that.
        has_time: Whether there is time for an optional attempt.

    Examples:
        >>> decide([], 100, margin_bytes=1)
        Try(target_bytes=99)
        >>> missed = Outcome(
        ...     100, target_bytes=99, predicted_bytes=98, measured_bytes=105
        ... )
        >>> decide([missed], 100, margin_bytes=1)
        Try(target_bytes=92)
        >>> fitted = Outcome(
        ...     100, target_bytes=92, predicted_bytes=92, measured_bytes=99
        ... )
        >>> decide([missed, fitted], 100, margin_bytes=1)
        Accept(number=1)
    """
    mine = [n for n, each in enumerate(history) if each.budget_bytes == budget_bytes]
    error_bytes = max((each.error_bytes for each in history), default=0)
    if any(history[n].predicted_bytes is None for n in mine):
        margin_bytes = 0
    target_bytes = budget_bytes - margin_bytes - max(0, error_bytes)
    if not mine:
        return Try(target_bytes)
    last = history[mine[-1]]
    fitting = [n for n in mine if history[n].fits]
    if last.target_bytes is None and not last.fits:
        known = (last.measured_bytes, last.predicted_bytes)
        return Infeasible(max(n for n in known if n is not None))
    if fitting:
        room_bytes = budget_bytes - (last.measured_bytes or 0)
        may_improve = has_time and last.target_bytes is not None
        is_first = len(fitting) == 1 and last.fits and last.error_bytes < 0
        if is_first and may_improve and room_bytes >= _ROOM * budget_bytes:
            return Try(budget_bytes - margin_bytes - last.error_bytes)
        return Accept(fitting[-1])
    is_known = last.measured_bytes is None and last.target_bytes == target_bytes
    runs = sum(history[n].measured_bytes is not None for n in mine)
    return Try(None if is_known or runs >= _ROUNDS else target_bytes)


def settle(
    attempt: Callable[[int | None], tuple[int | None, int | None, Attempted]],
    budget_bytes: int,
    *,
    margin_bytes: int = 0,
    has_time: Callable[[], bool] = lambda: False,
) -> Attempted | Infeasible:
    """Attempt plans as `decide` returns; return the accepted attempt or `Infeasible`.

    Args:
        attempt: Function that plans for a target (None: the smallest plan) and runs a
            step. Returns the predicted and measured bytes of `Outcome`, and the
            attempt.
        budget_bytes: The most bytes that a step may take.
        margin_bytes: As for `decide`.
        has_time: Function that returns whether there is time for an optional attempt.

    Examples:
        >>> settle(lambda target: (target or 5, (target or 5) + 2, target), 10)
        8
        >>> settle(lambda target: (target or 5, 11, target), 10)
        Infeasible(needed_bytes=11)
    """
    history: list[Outcome] = []
    attempts: list[Attempted] = []
    while True:
        decision = decide(
            history, budget_bytes, margin_bytes=margin_bytes, has_time=has_time()
        )
        if isinstance(decision, Infeasible):
            return decision
        if isinstance(decision, Accept):
            return attempts[decision.number]
        target = decision.target_bytes
        predicted_bytes, measured_bytes, attempted = attempt(target)
        history.append(Outcome(budget_bytes, target, predicted_bytes, measured_bytes))
        attempts.append(attempted)


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """The time that a fit has left for optional work.

    Attributes:
        elapsed_seconds: The time since it began.
        plain_seconds: The time of a plain step.
    """

    elapsed_seconds: float
    plain_seconds: float

    @property
    def patience_seconds(self) -> float:
        """The time left in which thorough planning may begin."""
        allowed = _PATIENCE_SECONDS + _PATIENCE_STEPS * self.plain_seconds
        return allowed - self.elapsed_seconds

    def allows(self, seconds: float) -> bool:
        """Return whether optional work of this length ends within the limit.

        Examples:
            >>> TimeLeft(10.0, 1.0).allows(5.0), TimeLeft(10.0, 1.0).allows(7.0)
            (True, False)
        """
        limit = _LIMIT_SECONDS + _LIMIT_STEPS * self.plain_seconds
        return self.elapsed_seconds + seconds < limit

    def allows_attempt(self, step_seconds: float, *, timed: bool = False) -> bool:
        """Return whether there is time for another plan and attempt, and its timing."""
        steps = _ANOTHER_STEPS + (_TIMING_STEPS if timed else 0.0)
        return self.allows(_ANOTHER_SECONDS + steps * step_seconds)


def more_laps(pace: Pace, predicted_seconds: float, left: TimeLeft) -> int:
    """Return the number of laps to measure a pace again, or 0 to accept it.

    Examples:
        >>> more_laps(Pace(1.0, 0.1), 1.0, TimeLeft(0.0, 1.0))
        0
        >>> more_laps(Pace(2.0, 0.1), 1.0, TimeLeft(0.0, 1.0))
        3
    """
    is_surprising = (
        abs(pace.seconds - predicted_seconds) > _SURPRISE * predicted_seconds
    )
    if not (pace.is_bound_by_host or is_surprising):
        return 0
    laps = round(_LOOK_SECONDS / pace.seconds) if pace.is_bound_by_host else LAPS
    wanted = (min(max(laps, LAPS), _HOST_LAPS), LAPS)
    return next((n for n in wanted if left.allows((n + 1) * pace.seconds)), 0)


def settled_pace(first: Pace, again: Pace | None, alone_seconds: float) -> Pace:
    """Return the pace to report for a plan.

    Args:
        first: The first measurement.
        again: The second one, if any. If CPU-bound, its many laps are preferred to
            `alone_seconds`.
        alone_seconds: The time of a single step, an upper bound for steps in a row.
    """
    if again is not None and again.is_bound_by_host:
        return again
    pace = again or first
    seconds = min(pace.seconds, alone_seconds)
    return Pace(seconds, min(pace.host_seconds, seconds))


def plan_for_slower_host(pace: Pace, predicted_seconds: float, left: TimeLeft) -> bool:
    """Return whether to plan again because the host is slower than predicted."""
    is_late = pace.is_bound_by_host and pace.host_seconds > _SLOWER * predicted_seconds
    return is_late and left.allows_attempt(pace.seconds, timed=True)


def is_near_host(pace: Pace) -> bool:
    """Return whether a step may be faster if the host has less to do.

    Examples:
        >>> is_near_host(Pace(1.0, 0.9)), is_near_host(Pace(1.0, 0.5))
        (True, False)
    """
    return pace.host_seconds >= _NEAR_HOST * pace.seconds


def may_repeat_calls(pace: Pace, left: TimeLeft) -> bool:
    """Return whether there is time to look for repeatable blocks.

    Examples:
        >>> may_repeat_calls(Pace(1.0, 1.0), TimeLeft(12.0, 1.0))
        True
        >>> may_repeat_calls(Pace(1.0, 1.0), TimeLeft(60.0, 1.0))
        False
    """
    steps = _LOOKING_STEPS + _ANOTHER_STEPS + _TIMING_STEPS
    seconds = left.elapsed_seconds + _ANOTHER_SECONDS + steps * pace.seconds
    return seconds < _REPEATING_SECONDS + _REPEATING_STEPS * left.plain_seconds


def is_much_faster(predicted_seconds: float, pace: Pace) -> bool:
    """Return whether a plan is predicted to be faster than one that has run."""
    return predicted_seconds * _SLOWER <= pace.seconds
