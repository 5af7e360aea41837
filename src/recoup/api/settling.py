"""Settling on a plan: the fastest that fits by prediction, corrected by real steps."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from torch.optim import Optimizer

from recoup.api.adaptation import Adapted
from recoup.api.adapted_passes import AdaptedPasses
from recoup.api.budgets import free_bytes, infeasible_with, told_bytes
from recoup.api.progress import Progress
from recoup.core.errors import InfeasibleError
from recoup.core.graph import Graph
from recoup.core.plan import plan_for_step
from recoup.core.segments import Action
from recoup.core.units import print_bytes
from recoup.engine.plans import digest_of
from recoup.engine.verification import Verify
from recoup.measure.correction import compared, corrected
from recoup.measure.floor import Cost, measure_floor, run_step
from recoup.measure.optimizers import missing_state_bytes, state_tensors
from recoup.measure.pace import Pace, pace_of
from recoup.measure.training import TrainingStep
from recoup.planners.plan import (
    floor_with,
    infeasible_with_search,
    plan_beside,
    plan_with,
    with_times_of,
)
from recoup.planners.search import Search
from recoup.planners.solution import Solution

_ROUNDS = 4
"""How often a plan that misses the budget is corrected."""

_PATIENCE_SECONDS = 3.0
_PATIENCE_STEPS = 6.0
"""How long after its begin a fit may still begin to plan more thoroughly: seconds, and
steps of the model. Real steps come after."""

_ROOM = 0.02
"""A plan that leaves more than this share of the budget unused is tried once more."""

_LIMIT_SECONDS = 4.0
_LIMIT_STEPS = 12.0
"""When a fit does nothing more that it need not do: seconds, and plain steps. All of it
shall take no more than 5 s and 15 steps; what is left is for a step that took longer
than those before it."""

_ANOTHER_SECONDS = 0.7
_ANOTHER_STEPS = 2.0
_TIMING_STEPS = 6.0
"""What it takes to plan once more and to try that, and to time it: seconds, and steps
as long as those that the plan so far takes."""

_SLOWER = 1.05
"""A plan that keeps the host longer than predicted by this factor is planned again."""

_TURNS = 2
"""How often the plan and the plain step are timed in turns on a CPU."""

_SURPRISE = 0.05
_LAPS = 3
_HOST_LAPS = 7
_LOOK_SECONDS = 1.0
"""A pace that is further from what was predicted than this share is measured again, by
so many laps if there is time. So is one that the host sets, whose times vary: by more
laps, as long as they are about so many seconds."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan in force, and what a real step with it cost.

    Attributes:
        target_bytes: The peak that was planned for.
        solution: The plan, and what it was predicted to cost.
        adapted: Takes it off again.
        cost: What a step cost.
    """

    target_bytes: int
    solution: Solution
    adapted: Adapted | AdaptedPasses
    cost: Cost


@dataclass(frozen=True, slots=True)
class Settled:
    """The plan that is in force in the end, and its pace.

    Attributes:
        attempt: The plan.
        pace: How long steps with it take.
        solution: The plan, and what it costs by times that are corrected by its pace.
    """

    attempt: Attempt
    pace: Pace
    solution: Solution


class Settling:
    """Looks for a plan that holds on a real step: plan, apply, check, correct.

    Args:
        step: The step.
        allow: What may be done with a value besides recomputing it.
        verify: When replayed values are compared with forward's.
        tell: Is told what is being done.

    Attributes:
        graph: The step as it was measured.
        search: The plans of it that are known.
        resident: What else is in memory, as the optimizers' state.
        reserved_bytes: Kept free for an optimizer's state that does not exist yet.
        planning_seconds: How long planning took so far.
        rounds: How many plans were tried on a real step so far.
    """

    graph: Graph
    search: Search

    def __init__(
        self,
        step: TrainingStep,
        allow: frozenset[Action],
        verify: Verify,
        tell: Progress,
    ) -> None:
        self._step = step
        self._allow = allow
        self._verify: Verify = verify
        self.tell = tell
        self.resident: list[object] = []
        self._in_force: Adapted | AdaptedPasses | None = None
        self._started = perf_counter()
        self.reserved_bytes = 0
        self.planning_seconds = 0.0
        self.rounds = 0

    def reserve(self, optimizers: Sequence[Optimizer]) -> None:
        """Leave room for the state of optimizers, and count what they have."""
        for optimizer in optimizers:
            self.resident += state_tensors(optimizer)
            self.reserved_bytes += missing_state_bytes(optimizer, self._step.device)

    def measure(self, blocks: Sequence[str] | None) -> None:
        """Run the step at floor memory."""
        self.tell("measuring a step at the least memory")
        self.graph = measure_floor(self._step, names=blocks, resident=self.resident)
        self.search = Search(self.graph, self._allow)

    def settle(self, asked_bytes: int) -> Settled:
        """Plan, apply and check until a plan holds on a real step.

        Raises:
            InfeasibleError: None does, not even the smallest.
        """
        try:
            best = self._best(asked_bytes)
            self._put_on(best)
            settled = self._timed(best)
            if self._is_late_by_the_host(settled):
                settled = self._hastened(settled, asked_bytes - self.reserved_bytes)
        except BaseException:
            self._take_off()
            raise
        return settled

    def _timed(self, attempt: Attempt) -> Settled:
        """Run the plan in force for its pace, and correct all times by it."""
        self.tell("timing the plan")
        solution = attempt.solution
        if self.graph.issuing is None:
            pace, graph = self._compared(attempt)
        else:
            pace = self._pace(solution.seconds, attempt.cost.seconds)
            graph = corrected(self.graph, solution.plans, pace)
        if graph is not self.graph:
            self.graph = graph
            self.search = self.search.with_times_of(graph)
            solution = with_times_of(solution, graph)
        return Settled(attempt, pace, solution)

    def _pace(self, predicted_seconds: float, alone_seconds: float) -> Pace:
        """Return the pace of the applied plan, by a second look if it is surprising.

        It is no longer than the step took alone.
        """
        pace = pace_of(self._step, repeats=1)
        off_seconds = abs(pace.seconds - predicted_seconds)
        if pace.is_bound_by_host or off_seconds > _SURPRISE * predicted_seconds:
            again = self._looked_at_again(pace, predicted_seconds)
            if again is not None and again.is_bound_by_host:
                return again  # many laps of a host that varies say more than one step
            pace = again or pace
        seconds = min(pace.seconds, alone_seconds)
        return Pace(seconds, min(pace.host_seconds, seconds))

    def _compared(self, attempt: Attempt) -> tuple[Pace, Graph]:
        """Time the plan and the plain step in turns, where the plain step fits.

        Returns:
            The pace of the plan; and the graph with times to match.
        """
        plans = attempt.solution.plans
        planned = [pace_of(self._step, repeats=1).seconds]
        if not any(plans):
            return Pace(planned[0], planned[0]), compared(
                self.graph, plans, planned[0], planned[0]
            )
        available_bytes = free_bytes(self._step.device)
        if self.search.plain_bytes > available_bytes:
            return Pace(planned[0], planned[0]), self.graph
        plain: list[float] = []
        for turn in range(_TURNS):
            if turn:
                planned.append(pace_of(self._step, repeats=1).seconds)
            self._take_off()
            plain.append(pace_of(self._step, repeats=1).seconds)
            self._put_on(attempt)
        seconds = min(planned)
        graph = compared(self.graph, plans, seconds, min(plain))
        return Pace(seconds, seconds), graph

    def _looked_at_again(self, pace: Pace, predicted_seconds: float) -> Pace | None:
        """Return the pace by as many laps as there is time for, if there is any."""
        laps = round(_LOOK_SECONDS / pace.seconds) if pace.is_bound_by_host else _LAPS
        for repeats in (min(max(laps, _LAPS), _HOST_LAPS), _LAPS):
            if self._has_time_for((repeats + 1) * pace.seconds):
                # A full collection might come in one of the laps else, and be a lap.
                gc.collect()
                return pace_of(
                    self._step, repeats=repeats, expected_seconds=predicted_seconds
                )
        return None

    def _has_time_for(self, seconds: float) -> bool:
        """Return whether something that takes so long ends within the limit."""
        limit = _LIMIT_SECONDS + _LIMIT_STEPS * self.search.plain_seconds
        return perf_counter() + seconds < self._started + limit

    def _is_late_by_the_host(self, settled: Settled) -> bool:
        """Return whether the device waits for the host longer than was predicted."""
        pace, predicted = settled.pace, settled.attempt.solution
        return (
            self.graph.issuing is not None
            and pace.is_bound_by_host
            and pace.host_seconds > _SLOWER * predicted.seconds
            and self._has_time_for(
                _ANOTHER_SECONDS + (_ANOTHER_STEPS + _TIMING_STEPS) * pace.seconds
            )
        )

    def _hastened(self, slow: Settled, budget_left: int) -> Settled:
        """Plan again, knowing what the host took; return the faster of both plans."""
        self.tell("planning once more, for a slower host")
        target = slow.attempt.target_bytes
        other = plan_beside(self.search, target, slow.attempt.solution)
        self.planning_seconds += other.seconds_planning
        if other.seconds * _SLOWER > slow.pace.seconds:
            return slow
        known = self.search
        tried = self._try(other, target, budget_left)
        if tried.cost.peak_bytes <= budget_left:
            found = self._timed(tried)
            if found.pace.seconds < slow.pace.seconds:
                return found
        self._put_on(slow.attempt)
        self.search, self.graph = known, known.graph
        return slow

    def _put_on(self, attempt: Attempt) -> None:
        if attempt.adapted is not self._in_force:
            self._take_off()
            self._in_force = attempt.adapted
            attempt.adapted.put_on(self._step.model)

    def _best(self, asked_bytes: int) -> Attempt:
        """Return the last of the plans that held; it need not be in force now."""
        budget_left = asked_bytes - self.reserved_bytes
        best: Attempt | None = None
        try:
            for tried in self._attempts(budget_left):
                if tried.cost.peak_bytes <= budget_left:
                    best = tried
        except InfeasibleError as error:
            return best or self._smallest(budget_left, asked_bytes, error)
        if best is not None:
            return best
        error = infeasible_with_search(self.search, budget_left)
        return self._smallest(budget_left, asked_bytes, error)

    def _attempts(self, budget_left: int) -> Iterator[Attempt]:
        """Yield plans tried on a real step, each corrected by the one before.

        One that misses the budget is followed by one for that much less; one that takes
        less than was predicted by one for more, once and if there is time.
        """
        target, solution = self._first(budget_left)
        before: Attempt | None = None
        fits = False
        for _ in range(_ROUNDS):
            if before is not None:
                solution = self._plan(target)
                if solution.plans == before.solution.plans:
                    return
            tried = self._try(solution, target, budget_left)
            yield tried
            if fits:
                return
            room_bytes = budget_left - tried.cost.peak_bytes
            error_bytes = tried.cost.peak_bytes - solution.peak_bytes
            fits = room_bytes >= 0
            has_room = error_bytes < 0 and room_bytes >= _ROOM * budget_left
            if fits and not (has_room and self._has_time_for_another(tried)):
                return
            target = (budget_left if fits else target) - error_bytes
            before = tried

    def _has_time_for_another(self, tried: Attempt) -> bool:
        """Return whether there is time to plan and try again after an attempt."""
        step_seconds = tried.cost.seconds
        return self._has_time_for(_ANOTHER_SECONDS + _ANOTHER_STEPS * step_seconds)

    def _first(self, budget_left: int) -> tuple[int, Solution]:
        """Plan for a little less than there is, if there is a plan for that.

        An allocator counts a little more or less than was predicted.
        """
        margin_bytes = told_bytes(budget_left, self._step.device) - budget_left
        if margin_bytes:
            with suppress(InfeasibleError):
                target = budget_left - margin_bytes
                return target, self._plan(target)
        return budget_left, self._plan(budget_left)

    def _smallest(
        self, budget_left: int, asked_bytes: int, error: InfeasibleError
    ) -> Attempt:
        """Try the smallest plan where no other one fits.

        Raises:
            InfeasibleError: It does not fit; the error says what it takes, measured.
        """
        started = perf_counter()
        solution = floor_with(self.search)
        self.planning_seconds += perf_counter() - started
        tried = self._try(solution, budget_left, budget_left)
        if tried.cost.peak_bytes > budget_left:
            # The floor is the same everywhere: what is predicted, or more if a real
            # step took more.
            most_bytes = max(tried.cost.peak_bytes, solution.peak_bytes)
            needed_bytes = most_bytes + self.reserved_bytes
            told = told_bytes(needed_bytes, self._step.device)
            more_bytes = told - solution.peak_bytes
            raise infeasible_with(error, more_bytes, asked_bytes) from None
        return tried

    def _plan(self, target: int) -> Solution:
        self.tell(f"planning for {print_bytes(target)}")
        started = perf_counter()
        try:
            return plan_with(self.search, target, until=self._patient_until)
        finally:
            self.planning_seconds += perf_counter() - started

    @property
    def _patient_until(self) -> float:
        step_seconds = self.search.plain_seconds
        return self._started + _PATIENCE_SECONDS + _PATIENCE_STEPS * step_seconds

    def _try(self, solution: Solution, target: int, budget_left: int) -> Attempt:
        """Apply a plan and run a real step: once to verify it, once to measure.

        Alone: where two are in force, neither is what runs.
        """
        self.tell("checking the plan on a real step")
        self._take_off()
        self.rounds += 1
        made = plan_for_step(
            self.graph,
            solution.plans,
            model=digest_of(self._step.model),
            budget_bytes=budget_left,
            peak_bytes=solution.peak_bytes,
            seconds=solution.seconds,
        )
        is_plain = not made.passes and made.roots == ("",) * made.model_calls
        kind = Adapted if is_plain else AdaptedPasses
        adapted = kind(
            self._step.model,
            self.graph,
            made,
            self._allow,
            verify=self._verify,
            reserved_bytes=self.reserved_bytes,
        )
        self._in_force = adapted
        self._step.begin()
        self._step.run()
        cost = run_step(self._step, resident=self.resident)
        return Attempt(target, solution, adapted, cost)

    def _take_off(self) -> None:
        if self._in_force is not None:
            self._in_force.remove()
            self._in_force = None
