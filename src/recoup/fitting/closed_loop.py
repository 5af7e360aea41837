"""The closed loop of `fit`: measure, plan, run a real step, correct; see `decision`."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from torch.optim import Optimizer

from recoup.backend.training.sharing_processes import SharingProcesses
from recoup.core.graph import Graph
from recoup.core.plan import plan_for_step
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.core.units import print_bytes
from recoup.engine.applied.applied_plan import digest_of
from recoup.engine.verification.replay_check import Verify
from recoup.errors import InfeasibleError, MismatchError
from recoup.fitting.budgets import (
    Budget,
    budget_bytes,
    budget_for_floor,
    free_bytes,
    infeasible_with,
)
from recoup.fitting.decision import (
    LAPS,
    Infeasible,
    TimeLeft,
    is_much_faster,
    is_near_host,
    may_repeat_calls,
    more_laps,
    plan_for_slower_host,
    settle,
    settled_pace,
)
from recoup.fitting.following.adaptation import Adapted
from recoup.fitting.following.replanning import least_verification_bytes
from recoup.fitting.progress import Progress
from recoup.measurement.steps.floor import (
    Cost,
    measure_floor,
    run_step,
    verifying_within,
)
from recoup.measurement.steps.optimizers import missing_state_bytes, state_tensors
from recoup.measurement.steps.training_step import TrainingStep
from recoup.measurement.timing.host_cost import compared, corrected
from recoup.measurement.timing.pace import Pace, pace_of
from recoup.measurement.tracing.side_effects import repeatable_blocks
from recoup.planners.planner import (
    floor_with,
    infeasible_with_search,
    plan_beside,
    plan_by_calls,
    plan_with,
    with_times_of,
)
from recoup.planners.search import Search
from recoup.planners.solution import Solution

_TURNS = 2
"""The number of turns in which plan and plain step are timed on a CPU."""

_VERIFIED = 0.005
"""The largest share of a budget reserved for verification on an accelerator. On the CPU
nothing is reserved: a plan that uses the whole budget may be much faster."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements that the loop makes, each a function of the step.

    Attributes:
        graph: Function that returns its graph, measured at floor memory.
        cost: Function that runs it once and returns its peak and time.
        pace: Function that runs it several times in a row and returns its pace.
        clock: Function that returns the time in seconds.
        repeatable: Function that runs it once and returns the repeatable blocks.
    """

    graph: Callable[..., Graph] = measure_floor
    cost: Callable[..., Cost] = run_step
    pace: Callable[..., Pace] = pace_of
    clock: Callable[[], float] = perf_counter
    repeatable: Callable[..., frozenset[str]] = repeatable_blocks


_REAL = Measurements()


def _shared(mine: Measurements, sharing: SharingProcesses) -> Measurements:
    """Return measurements with equal results in all processes.

    The graph is that of the process with the largest plain peak, a cost is the largest,
    times are those of the first process.
    """

    def graph(*args: Any, **kwargs: Any) -> Graph:
        found = sharing.gather(mine.graph(*args, **kwargs))
        return found[0] if len(found) == 1 else max(found, key=_plain_bytes)

    def cost(*args: Any, **kwargs: Any) -> Cost:
        found = sharing.gather(mine.cost(*args, **kwargs))
        return Cost(
            max(each.peak_bytes for each in found), max(each.seconds for each in found)
        )

    def pace(*args: Any, **kwargs: Any) -> Pace:
        return sharing.gather(mine.pace(*args, **kwargs))[0]

    def repeatable(*args: Any, **kwargs: Any) -> frozenset[str]:
        first, *others = sharing.gather(mine.repeatable(*args, **kwargs))
        return first.intersection(*others)

    def clock() -> float:
        return sharing.gather(mine.clock())[0]

    return Measurements(graph, cost, pace, clock, repeatable)


def _plain_bytes(graph: Graph) -> int:
    return max(simulate(each, ()).peak_bytes for each in graph.passes)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan that a real step ran with.

    Attributes:
        target_bytes: The peak that was planned for; None: the smallest plan.
        solution: The plan, and its predicted cost.
        adapted: The applied plan.
        cost: The measured cost of a step.
    """

    target_bytes: int | None
    solution: Solution
    adapted: Adapted
    cost: Cost


@dataclass(frozen=True, slots=True)
class Settled:
    """The accepted plan, which is active, and its pace.

    Attributes:
        attempt: The attempt with the plan.
        pace: The pace of steps with it.
        solution: The plan, with costs from times corrected by its pace.
    """

    attempt: Attempt
    pace: Pace
    solution: Solution


class ClosedLoop:
    """Measure a step, and find the fastest plan that keeps a budget on a real step.

    Processes that share the model's parameters run the same steps with the same plan,
    that of the first process.

    Attributes:
        graph: The measured step.
        search: Its known plans.
        allow: Actions allowed on a value besides recomputing it.
        resident: Other objects in memory, such as the optimizers' state.
        reserved_bytes: Bytes reserved for optimizer state that does not exist yet.
        planning_seconds: The total planning time so far.
        rounds: The number of plans tried on a real step so far.
    """

    graph: Graph
    search: Search

    def __init__(
        self,
        step: TrainingStep,
        allow: frozenset[Action],
        verify: Verify,
        tell: Progress,
        measurements: Measurements = _REAL,
        *,
        rerun: bool | None = False,
    ) -> None:
        self._step = step
        self._sharing = SharingProcesses(step.model)
        self._measure = measurements = _shared(measurements, self._sharing)
        self.allow = allow
        self._verify: Verify = verify
        self._rerun = rerun
        self.tell = tell
        self.resident: list[object] = []
        self._active: Adapted | None = None
        self._started = measurements.clock()
        self.reserved_bytes = 0
        self.planning_seconds = 0.0
        self.rounds = 0

    def reserve(self, optimizers: Sequence[Optimizer]) -> None:
        """Reserve memory for missing optimizer state; count the existing state."""
        for optimizer in optimizers:
            self.resident += state_tensors(optimizer)
            self.reserved_bytes += missing_state_bytes(optimizer, self._step.device)
        self.reserved_bytes = max(self._sharing.gather(self.reserved_bytes))

    def asked_bytes(self, budget: Budget) -> int:
        """Return a budget in bytes, the smallest of all processes sharing the model.

        Args:
            budget: The budget, as for `recoup.fit`.
        """
        plain_bytes = self.search.plain_bytes + self.reserved_bytes
        found = budget_bytes(budget, plain_bytes, self._step.device)
        return min(self._sharing.gather(found))

    def measure(self, blocks: Sequence[str] | None) -> None:
        """Measure the step at floor memory."""
        self.tell("measuring a step at the least memory")
        self.graph = self._measure.graph(
            self._step, names=blocks, resident=self.resident
        )
        self.search = Search(self.graph, self.allow)

    def settle(self, asked_bytes: int) -> Settled:
        """Plan and try until a plan keeps the budget on a real step; leave it active.

        Raises:
            InfeasibleError: Even the smallest plan exceeds the budget.
        """
        budget_bytes = asked_bytes - self.reserved_bytes
        try:
            attempt = self._accepted(budget_bytes, asked_bytes)
            self._activate(attempt)
            settled = self._timed(attempt)
            if self.graph.host_costs is not None and plan_for_slower_host(
                settled.pace, attempt.solution.seconds, self._left
            ):
                settled = self._hastened(settled, budget_bytes)
            if self._may_rerun(settled.pace):
                settled = self._repeating(settled, budget_bytes)
        except BaseException:
            self._deactivate()
            raise
        return settled

    @property
    def _left(self) -> TimeLeft:
        elapsed_seconds = self._measure.clock() - self._started
        return TimeLeft(elapsed_seconds, self.search.plain_seconds)

    def _accepted(self, budget_bytes: int, asked_bytes: int) -> Attempt:
        """Return the accepted attempt; its plan need not be active now."""
        # An allocator's peak differs a little from the prediction.
        margin_bytes = budget_for_floor(budget_bytes, self._step.device) - budget_bytes
        if margin_bytes and self._verify != "off":
            verified_bytes = least_verification_bytes(self.graph, self._step.device)
            verified_bytes = min(verified_bytes, int(_VERIFIED * budget_bytes))
            margin_bytes = max(margin_bytes, verified_bytes)
        last: Attempt | None = None

        def attempt(
            target: int | None,
        ) -> tuple[int | None, int | None, Attempt | None]:
            nonlocal last
            known = None if last is None or target is None else last.solution.plans
            last, solution = None, self._plan(target)
            if solution is None or solution.plans == known:
                return solution and solution.peak_bytes, None, None
            last = self._try(solution, target, budget_bytes)
            return solution.peak_bytes, last.cost.peak_bytes, last

        accepted = settle(
            attempt,
            budget_bytes,
            margin_bytes=margin_bytes,
            has_time=lambda: (
                last is not None and self._left.allows_attempt(last.cost.seconds)
            ),
        )
        if isinstance(accepted, Infeasible):
            raise self._infeasible(accepted.needed_bytes, budget_bytes, asked_bytes)
        assert accepted is not None, "only a plan that ran is accepted"
        return accepted

    def _plan(self, target: int | None) -> Solution | None:
        """Return the fastest plan for a target, or None."""
        return self._sharing.gather(self._own_plan(target))[0]

    def _own_plan(self, target: int | None) -> Solution | None:
        started = perf_counter()
        try:
            if target is None:
                return floor_with(self.search)
            self.tell(f"planning for {print_bytes(target)}")
            until = started + self._left.patience_seconds
            return plan_with(self.search, target, until=until)
        except InfeasibleError:
            return None
        finally:
            self.planning_seconds += perf_counter() - started

    def _infeasible(
        self, needed_bytes: int, budget_bytes: int, asked_bytes: int
    ) -> InfeasibleError:
        """Return the error with the floor: predicted, or measured if larger."""
        return infeasible_with(
            infeasible_with_search(self.search, budget_bytes),
            asked_bytes,
            self._step.device,
            needed_bytes=needed_bytes,
            reserved_bytes=self.reserved_bytes,
        )

    def _try(
        self, solution: Solution, target: int | None, budget_bytes: int
    ) -> Attempt:
        """Apply a plan and run a real step: once to verify it, once to measure."""
        self.tell("checking the plan on a real step")
        self._deactivate()
        self.rounds += 1
        made = plan_for_step(
            self.graph,
            solution.plans,
            model=digest_of(self._step.model),
            budget_bytes=budget_bytes,
            peak_bytes=solution.peak_bytes,
            seconds=solution.seconds,
        )
        self._active = Adapted(
            self._step.model,
            self.graph,
            made,
            self.allow,
            verify=self._verify,
            reserved_bytes=self.reserved_bytes,
        )
        self._step.begin()
        with verifying_within(budget_bytes, self._step, resident=self.resident):
            self._step.run()
        cost = self._measure.cost(self._step, resident=self.resident)
        return Attempt(target, solution, self._active, cost)

    def _timed(self, attempt: Attempt) -> Settled:
        """Measure the pace of the active plan, and correct all times by it."""
        self.tell("timing the plan")
        if self.graph.host_costs is None:
            return self._settled(attempt, *self._compared(attempt))
        solution = attempt.solution
        pace = self._pace(solution.seconds, attempt.cost.seconds)
        return self._settled(attempt, pace, corrected(self.graph, solution.plans, pace))

    def _settled(self, attempt: Attempt, pace: Pace, graph: Graph) -> Settled:
        """Return a plan with its pace; adopt the times of `graph`."""
        solution = attempt.solution
        if graph is not self.graph:
            self.graph = graph
            self.search = self.search.with_times_of(graph)
            solution = with_times_of(solution, graph)
        return Settled(attempt, pace, solution)

    def _pace(self, predicted_seconds: float, alone_seconds: float) -> Pace:
        """Return the pace of the active plan on an accelerator."""
        first, again = self._measure.pace(self._step, repeats=1), None
        laps = more_laps(first, predicted_seconds, self._left)
        if laps:
            gc.collect()  # so that no full collection falls into a lap
            again = self._measure.pace(
                self._step, repeats=laps, expected_seconds=predicted_seconds
            )
        return settled_pace(first, again, alone_seconds)

    def _compared(self, attempt: Attempt) -> tuple[Pace, Graph]:
        """Time the plan and the plain step in turns, if the plain step fits.

        Returns:
            The pace of the plan, and the graph with corrected times.
        """
        plans = attempt.solution.plans
        planned = [self._measure.pace(self._step, repeats=1).seconds]
        plain: list[float] = []
        if not any(plans):
            plain = planned
        elif self.search.plain_bytes <= min(
            self._sharing.gather(free_bytes(self._step.device))
        ):
            for turn in range(_TURNS):
                if turn:
                    planned.append(self._measure.pace(self._step, repeats=1).seconds)
                self._deactivate()
                plain.append(self._measure.pace(self._step, repeats=1).seconds)
                self._activate(attempt)
        seconds = min(planned)
        graph = self.graph
        if plain:
            graph = compared(graph, plans, seconds, min(plain))
        return Pace(seconds, seconds), graph

    def _hastened(self, slow: Settled, budget_bytes: int) -> Settled:
        """Plan again with the measured host time; return the faster of both plans."""
        self.tell("planning once more, for a slower host")
        known, before = self.search, slow.attempt
        target = before.target_bytes
        target = budget_bytes if target is None else target
        other = self._sharing.gather(plan_beside(known, target, before.solution))[0]
        self.planning_seconds += other.seconds_planning
        if not is_much_faster(other.seconds, slow.pace):
            return slow
        tried = self._try(other, target, budget_bytes)
        return self._faster(slow, tried, budget_bytes) or self._kept(slow, known)

    def _faster(
        self, slow: Settled, tried: Attempt, budget_bytes: int
    ) -> Settled | None:
        """Return the other plan, which is active, if it fits and is faster."""
        if tried.cost.peak_bytes > budget_bytes:
            return None
        if self.graph.host_costs is None:
            found = self._timed(tried)
            return found if found.pace.seconds < slow.pace.seconds else None
        # Host times drift: time both plans now, in the same way.
        self.tell("timing both plans")
        before, now = self._lap(slow.attempt), self._lap(tried)
        if now.seconds >= before.seconds:
            return None
        plans = tried.solution.plans
        return self._settled(tried, now, corrected(self.graph, plans, now))

    def _lap(self, attempt: Attempt) -> Pace:
        self._activate(attempt)
        gc.collect()
        return self._measure.pace(self._step, repeats=LAPS)

    def _may_rerun(self, pace: Pace) -> bool:
        waits = self.graph.host_costs is not None and is_near_host(pace)
        is_wanted = waits if self._rerun is None else self._rerun
        return is_wanted and may_repeat_calls(pace, self._left)

    def _repeating(self, slow: Settled, budget_bytes: int) -> Settled:
        """Try to rerun blocks instead of recording; return the faster of both plans."""
        known = self.search
        blocks = frozenset(c.module for each in known.passes for c in each.graph.calls)
        if not blocks or not any(slow.solution.plans):
            return slow
        # The real step decides: its peak may be a little below the prediction.
        slack = budget_for_floor(budget_bytes, self._step.device) - budget_bytes
        if self._plan_by_calls(known, blocks, budget_bytes + slack, slow) is None:
            return self._kept(slow, known)
        self.tell("looking for blocks that can be called again")
        self._deactivate()
        blocks = self._measure.repeatable(self._step, sorted(blocks))
        try:
            found = self._called(slow, blocks, slack, budget_bytes)
        except MismatchError:
            # The second call gave other bits: it has undetected dependencies.
            found = None
        return found or self._kept(slow, known)

    def _called(
        self, slow: Settled, blocks: frozenset[str], slack: int, budget_bytes: int
    ) -> Settled | None:
        """Return the plan that reruns these blocks, if it is faster."""
        known = self.search
        for target in dict.fromkeys((budget_bytes + slack, budget_bytes - slack)):
            other = self._plan_by_calls(known, blocks, target, slow)
            if other is None:
                return None
            tried = self._try(other, target, budget_bytes)
            if tried.cost.peak_bytes <= budget_bytes:
                return self._faster(slow, tried, budget_bytes)
        return None

    def _plan_by_calls(
        self, search: Search, blocks: frozenset[str], target: int, slow: Settled
    ) -> Solution | None:
        """Plan with repeatable blocks; adopt that graph.

        Returns:
            The plan, or None if no such plan fits.
        """
        self.graph = search.graph.map_passes(
            lambda each: replace(each, repeatable=blocks)
        )
        self.search = search.with_times_of(self.graph)
        found = plan_by_calls(self.search, target, slow.solution)
        self.planning_seconds += found.seconds_planning if found else 0.0
        return self._sharing.gather(found)[0]

    def _kept(self, settled: Settled, search: Search) -> Settled:
        """Return to an earlier plan, and to its search and graph."""
        self._activate(settled.attempt)
        self.search, self.graph = search, search.graph
        return settled

    def _activate(self, attempt: Attempt) -> None:
        if attempt.adapted is not self._active:
            self._deactivate()
            self._active = attempt.adapted
            attempt.adapted.put_on(self._step.model)

    def _deactivate(self) -> None:
        if self._active is not None:
            self._active.remove()
            self._active = None
