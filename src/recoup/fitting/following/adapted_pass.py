"""The plan of one pass of a step, and plans for calls that are not the measured one.

The plan was made for one step. A call of another size, or of a model in another state,
is another step: it gets a plan of its own, and its peak is compared with the
budget. The first call of another size is traced, a step in another state is metered,
and one that trains more parameters is observed: its graph is another one.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from recoup.backend.autograd.transforms import is_transformed
from recoup.backend.state.model_state import ModelState, StateReader
from recoup.backend.state.trees import named_tensors
from recoup.core.graph import Graph
from recoup.core.growth import group_of, resized
from recoup.core.plan import Place, Plan, displaced, measured_order, segments_of
from recoup.core.segments import Action, Segment
from recoup.core.simulation import LoopKept, live_after, simulate
from recoup.engine.applied.applied_plan import Choice, refuse_sharded
from recoup.engine.applied.planned_runs import Cuts
from recoup.engine.verification.replay_check import Verify
from recoup.errors import InfeasibleError
from recoup.fitting.following.budget_warnings import BudgetWarnings
from recoup.fitting.following.call_groups import (
    CallCase,
    CallGroup,
    CallKey,
    MeasuredCall,
    SizedSteps,
    bytes_of,
    describe_size,
    key_of,
    size_of,
)
from recoup.fitting.following.loop_memory import EarlierOutputs, LoopMemory
from recoup.fitting.following.replanning import replanned, verification_bytes
from recoup.fitting.following.watched_step import (
    CallWatch,
    StepMeter,
    expected_excess,
    observe_step,
    unseen_bytes,
)
from recoup.measurement.tracing.call_trace import CallTrace, storage_bytes
from recoup.measurement.tracing.live import LiveStep

_TIGHTER = 0.9
"""A budget that was too much for the device is cut to this share of itself."""

_MOST_GROUPS = 48
"""For more groups of sizes than this no plan is made: the smallest plan serves them, or
the measured one where nothing is larger."""

_MOST_CASES = 4096
"""The most kinds of calls that are remembered, so that they are recognised at once."""

_MARGIN = 0.03
"""A step of another size is predicted up to this share."""

_SURPRISE = 0.02
"""A group is planned again if the storages of its first call differ in total from the
prediction by more than this share."""

_METERED_STEPS = 3
"""The most steps in another state to meter until one is within the budget."""

_NO_PLAN = Plan()
"""Stands for the plan of an observed call, whose blocks are all recomputed."""


class AdaptedPass:
    """The plan of one pass of a step, and plans for calls that are not measured ones.

    Its arguments are those of `Adapted`, for one pass.

    Attributes:
        unmeasured: The paths of blocks that did not run in the measured step.
        unseen_bytes: Bytes that the measured step counts and a meter does not.
        first: Returns the meter of the step of the next call; None: no meter.
    """

    def __init__(
        self,
        graph: Graph,
        made: Plan,
        allow: frozenset[Action],
        *,
        verify: Verify,
        reserved_bytes: int = 0,
        is_fixed: bool = False,
    ) -> None:
        self.plan = made
        self._graph = graph
        self._allow = allow
        self._warnings = BudgetWarnings(made.budget_bytes, reserved_bytes)
        self._verify: Verify = verify
        self._is_fixed = is_fixed
        self._measured: list[MeasuredCall] = []
        self.unmeasured: set[str] = set()
        self.unseen_bytes = 0
        self.first: Callable[..., LiveStep | None] | None = None
        self._steps = SizedSteps(graph, self._measured)
        self._chosen = made
        self._reader: StateReader | None = None
        self._loop = LoopMemory(self._check_kept)
        self._meter = StepMeter()
        self._observed: tuple[LiveStep, Cuts, CallCase, CallKey] | None = None
        self._torn: set[str] = set()
        self._unchecked: list[str] = []
        self.adopt(made)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has another model and no open calls."""
        return {**vars(self), "_reader": None, "_observed": None}

    def tighten(self) -> bool:
        """Plan again for less memory; return whether that was possible.

        A plan that takes much less than the budget was still too much.
        """
        known_bytes = self._warnings.budget_bytes
        taken_bytes = self._chosen.peak_bytes or known_bytes
        self._warnings.budget_bytes = int(min(taken_bytes, known_bytes) * _TIGHTER)
        try:
            made, _ = self._replanned(
                self._graph, self._warnings.budget_bytes, or_smallest=False
            )
        except InfeasibleError:
            self._warnings.budget_bytes = known_bytes
            return False
        self.adopt(made)
        return True

    def _replanned(
        self, step: Graph, target_bytes: int, *, or_smallest: bool = True
    ) -> tuple[Plan, tuple[Segment, ...]]:
        """Plan a step, with room for the verification of the plan's first run."""
        return replanned(
            step,
            self._allow,
            target_bytes - verification_bytes(step, self._verify),
            self._warnings.budget_bytes,
            or_smallest=or_smallest,
        )

    def adopt(self, made: Plan) -> None:
        """Apply another plan for the measured step."""
        self.plan = self._chosen = made
        self._cases: dict[tuple[CallKey, ModelState], CallCase] = {}
        # With its plan, whose identity is then not given to another.
        self._orders: dict[int, tuple[Plan, tuple[Place, ...]]] = {}
        self._groups: dict[object, CallGroup] = {}
        self._others: dict[bytes, AdaptedPass] = {}
        self._loop.forget()

    def stop(self) -> None:
        """Take the instruments off a step that is metered or observed."""
        self._meter.stop()
        if self._observed is not None and self._observed[0].finish():
            self._observed = None
        for other in self._others.values():
            other.stop()

    def share(self, earlier: EarlierOutputs, said: set[str]) -> None:
        """Share outputs and the warnings given so far with other passes of the step."""
        self._loop.earlier = earlier
        self._warnings.said = said

    def finish_measuring(self) -> None:
        """Warn from now on of memory that only the training loop keeps."""
        self._loop.finish_measuring()

    @property
    def planned_groups(self) -> int:
        """How many groups of calls have a plan."""
        return 1 + sum(group.plan is not None for group in self._groups.values())

    @property
    def open_calls(self) -> int:
        """How many calls of this thread wait for their backward."""
        count = self._loop.open_calls()
        for other in self._others.values():  # no generator: it runs in every call
            count += other.open_calls
        return count

    def choose(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_alone: bool = True,
        metered: LiveStep | None = None,
    ) -> Choice:
        """Return the plan for a call, and what watches the call.

        Args:
            model: The model.
            args: Its positional arguments.
            kwargs: The same, by name.
            is_alone: No call of another pass waits for its backward.
            metered: Counts the bytes of the step that begins with this call.
        """
        if is_transformed():
            self._warnings.say_transformed(self._graph)
            return None, None
        state = self._state_of(model)
        if self._is_fixed:
            self._say_if_open()
            return self.plan, CallWatch(self, None, self.plan)
        found = named_tensors((args, kwargs))
        key = key_of(found)
        if len(self._measured) < self.plan.model_calls:
            return self._choose_measured(model, found, key, state)
        if self._observed is not None:
            self._learn(*self._observed)
        if (other := self._others.get(state.trained)) is not None:
            return other.choose(model, args, kwargs, is_alone=is_alone, metered=metered)
        case = self._cases.get((key, state))
        if case is None:
            case = self._case(key, bytes_of(found), state)
            if len(self._cases) >= _MOST_CASES:
                self._cases.clear()
            self._cases[key, state] = case
        self._say_if_open()
        if case.group.metered_steps == _METERED_STEPS and is_alone:
            observed = self._observe(case, key, model, found, (args, kwargs))
            if observed is not None:
                return observed[1], CallWatch(self, None, _NO_PLAN, observed[0])
        self._chosen = self._plan_of(case)
        if case.group.metered_steps or self._meter.step is not None:
            mine = self._metered_step(case, model, found, is_alone=is_alone)
            metered = metered if mine is None else mine
        if self.first is not None:
            first, self.first = self.first, None
            metered = metered or first(self._warnings, self.unseen_bytes, model, found)
        return self._chosen, CallWatch(self, case, self._chosen, metered)

    def _choose_measured(
        self,
        model: nn.Module,
        found: Sequence[tuple[str, Tensor]],
        key: CallKey,
        state: ModelState,
    ) -> Choice:
        """Note a call of the measured step, the first calls after `fit`."""
        if not self._measured:
            self.unseen_bytes = unseen_bytes(self._graph, model, found)
        measured = MeasuredCall(key, size_of(key), bytes_of(found), state)
        self._measured.append(measured)
        self._chosen = self.plan
        return self.plan, CallWatch(self, None, self.plan)

    def _metered_step(
        self,
        case: CallCase,
        model: nn.Module,
        found: Sequence[tuple[str, Tensor]],
        *,
        is_alone: bool,
    ) -> LiveStep | None:
        """Return the meter of the step that begins with a call."""
        running = self._meter.running(case.group)
        if running is not None:
            return running
        if self.open_calls or not is_alone:
            return None  # the step has begun
        if not self._meter.stop() or not case.group.metered_steps:
            return None
        plan = self._chosen
        # The step does not keep the pass alive, nor does the meter.
        owner = weakref.ref(self)

        def ended(peak_bytes: int) -> None:
            if (found := owner()) is not None:
                found.metered(case, plan, peak_bytes)

        batch = [tensor for _, tensor in found]
        return self._meter.begin(model, batch, ended, kind=case.group)

    def _observe(
        self,
        case: CallCase,
        key: CallKey,
        model: nn.Module,
        found: Sequence[tuple[str, Tensor]],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> tuple[LiveStep, Cuts] | None:
        """Observe the step that begins with a call, if it trains more parameters."""
        if (
            not self._measured[case.measured].trains_less_than(case.state)
            or self.plan.roots != ("",)
            or self.open_calls
            or not LiveStep.is_possible(traced=True)
            or not self._meter.stop()
        ):
            return None
        owner = weakref.ref(self)
        reasons = "; ".join(case.group.differences)

        def ended(peak_bytes: int) -> None:
            if (found := owner()) is not None:
                found.say_difference(reasons, peak_bytes)

        batch = (tensor for _, tensor in found)
        observed = observe_step(model, batch, arguments, self._torn, ended)
        self._observed = (*observed, case, key)
        return observed

    def _learn(
        self, observed: LiveStep, cuts: Cuts, case: CallCase, key: CallKey
    ) -> None:
        """Plan for the step that was observed, if its backward has ended."""
        if not observed.has_ended and self.open_calls:
            return  # the next call of the same step
        if not observed.finish():
            return  # another thread's step
        self._observed = None
        if not observed.has_ended:
            return
        torn = observed.torn(cuts.modules)
        if torn:
            self._torn |= torn
            return
        graph = observed.graph(cuts.modules, ())
        sizes = [storage.bytes for storage in graph.storages]
        graph = resized(graph, sizes, added_bytes=self.unseen_bytes)
        made, _ = self._replanned(graph, self._warnings.budget_bytes)
        other = AdaptedPass(graph, made, self._allow, verify=self._verify)
        other._warnings = self._warnings
        call = MeasuredCall(key, size_of(key), case.nbytes, case.state)
        other._measured.append(call)
        other._unchecked = case.group.differences
        other.unmeasured, other.unseen_bytes = self.unmeasured, self.unseen_bytes
        other.finish_measuring()
        other.share(self._loop.earlier, self._warnings.said)
        self._others[case.state.trained] = other

    def say_outside(self, name: str) -> None:
        """Warn of a call of a module outside of calls of the fitted models."""
        self._warnings.say_outside(name, self._graph)

    def say_difference(self, reason: str, peak_bytes: int) -> int:
        """Warn of a step that is not the measured one, if it exceeded the budget.

        Returns:
            By how many bytes it did.
        """
        peak_bytes += self.unseen_bytes
        self._warnings.say_difference([reason], peak_bytes)
        return max(0, peak_bytes - self._warnings.budget_bytes)

    def leave_room(self, nbytes: int) -> None:
        """Plan the measured step for `nbytes` less, or with the smallest plan."""
        target_bytes = self.plan.peak_bytes - nbytes
        self.adopt(self._replanned(self._graph, target_bytes)[0])

    def metered(self, case: CallCase, plan: Plan, peak_bytes: int) -> None:
        """Compare the peak of a step with this plan with prediction and budget.

        The first step in another state runs with the smallest plan. Any other plan is
        expected to exceed its prediction in the same proportion.
        One that exceeds the budget is planned again, and metered again.
        """
        group = case.group
        if not group.metered_steps:
            return
        is_first = group.metered_steps == _METERED_STEPS
        peak_bytes += self.unseen_bytes
        fits = peak_bytes <= self._warnings.budget_bytes
        self._warnings.say_difference(group.differences, peak_bytes)
        if fits != is_first:
            group.metered_steps = 0  # it holds, or nothing smaller is known
            return
        group.metered_steps -= 1
        step = self._steps.step_of(case.size, case)
        used = segments_of(self._graph, plan)
        predicted_bytes = simulate(step, used or ()).peak_bytes
        if is_first:
            group.excess_bytes = expected_excess(
                step, predicted_bytes, peak_bytes, self._warnings.budget_bytes
            )
        else:
            group.excess_bytes += peak_bytes - self._warnings.budget_bytes
        group.plan = None
        if not group.metered_steps:
            self._plan_group(case, target_bytes=0)

    def _state_of(self, model: nn.Module) -> ModelState:
        if self._reader is None or not self._reader.is_of(model):
            self._reader = StateReader(model)
        known = self._reader.classes
        state = self._reader.read()
        if self._reader.classes != known:
            refuse_sharded(self._reader.classes - known)
        return state

    def _case(self, key: CallKey, nbytes: int, state: ModelState) -> CallCase:
        """Return the case of a kind of calls that has not occurred before."""
        same = [n for n, one in enumerate(self._measured) if one.key == key]
        paths = {path for path, _, _ in key}
        alike = same or [
            n
            for n, one in enumerate(self._measured)
            if {path for path, _, _ in one.key} == paths
        ]
        number = (alike or [0])[0]
        measured = self._measured[number]
        size = {**measured.size}
        size.update((a, n) for a, n in size_of(key).items() if a in size)
        group_size = group_of(measured.size, size)
        reader = self._reader
        differences = reader.differences(measured.state, state) if reader else []
        other = state if differences else None
        # Other tensors than the measured call had may mean other operators.
        other_paths = () if same else tuple(sorted(paths))
        place = (number, tuple(sorted(group_size.items())), other, other_paths)
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = CallGroup(group_size, differences=differences)
            # Nothing that is asked of the measured step can be new here.
            group.is_traced = bool(same) and not differences
            group.metered_steps = _METERED_STEPS if differences else 0
            if self._unchecked and not differences and group_size == measured.size:
                # It was observed, and no step has run with the plan for it.
                group.differences = self._unchecked
                group.metered_steps = _METERED_STEPS - 1
        return CallCase(group, size, nbytes, number, state)

    def _plan_of(self, case: CallCase) -> Plan:
        group = case.group
        if group.metered_steps == _METERED_STEPS and group.plan is None:
            self._plan_group(case, target_bytes=0)
        measured = self._measured[case.measured]
        is_measured = group.size == measured.size
        if group.plan is not None:
            return group.plan
        if is_measured and not group.excess_bytes:
            return self.plan
        is_smaller = all(n <= measured.size[axis] for axis, n in group.size.items())
        is_late = not group.is_traced or self.planned_groups > _MOST_GROUPS
        if is_smaller and is_late and not group.excess_bytes:
            return self.plan  # whatever fits a larger step fits this one
        self._plan_group(case)
        assert group.plan is not None, "a group has a plan once it was planned"
        return group.plan

    def _plan_group(self, case: CallCase, target_bytes: int | None = None) -> None:
        """Plan all sizes of a group for a peak, by default the rest of the budget."""
        group = case.group
        step = self._steps.step_of(group.size, case)
        if target_bytes is None:
            room_bytes = int((1 - _MARGIN) * self._warnings.budget_bytes)
            target_bytes = room_bytes - group.excess_bytes
        if self.planned_groups > _MOST_GROUPS:
            target_bytes = 0
        group.plan, group.segments = self._replanned(step, target_bytes)
        if group.is_traced and not case.group.differences:
            self._check_size(case, group.segments)

    def _segments_of(self, case: CallCase) -> tuple[Segment, ...] | None:
        if case.group.plan is not None:
            return case.group.segments
        return segments_of(self._graph, self.plan)

    def _traced(self, case: CallCase, trace: CallTrace) -> None:
        """Learn from the first call of a group."""
        group = case.group
        group.is_traced = True
        growth = self._steps.growth_of(case.measured)
        operations = self._graph.operations_of_call(case.measured)
        found, is_same = storage_bytes(self._graph, trace, operations)
        is_measured = case.size == self._measured[case.measured].size
        if case.group.differences:
            sizes = {n: self._graph.storages[n].bytes for n in found}
            trains_more = self._measured[case.measured].trains_less_than(case.state)
            if is_same and is_measured and found == sizes and not trains_more:
                group.metered_steps = 0  # nothing that matters has changed
                group.plan = None
            return
        used = self._segments_of(case)
        if not is_measured:
            before = growth.predicted(case.size)
            growth.add(case.size, found)
            after = growth.predicted(case.size)
            if abs(sum(before) - sum(after)) > _SURPRISE * sum(after):
                self._check_size(case, used)
                group.plan = None
                return
        if used is None:
            return
        step = self._steps.step_of(case.size, case)
        excess_bytes = trace.live_bytes - live_after(step, used, operations)
        if not is_same and excess_bytes > 0:
            group.excess_bytes = excess_bytes
            group.plan = None
        self._check_size(case, used)

    def _check_size(self, case: CallCase, used: tuple[Segment, ...] | None) -> None:
        """Warn if the plan of a call needs more than the budget."""
        group = case.group
        if used is None or group.is_warned:
            return
        step = self._steps.step_of(case.size, case)
        peak_bytes = simulate(step, used).peak_bytes + group.excess_bytes
        if used == group.segments:
            # Its first run is verified, which takes memory of its own.
            peak_bytes += int(_MARGIN * self._warnings.budget_bytes)
            peak_bytes += verification_bytes(step, self._verify)
        size = describe_size(case, self._measured[case.measured])
        group.is_warned = self._warnings.say_size(size, peak_bytes)

    def _say_blocks(self, case: CallCase, blocks: Mapping[str, CallTrace]) -> None:
        """Leave room for blocks that were not measured; warn if there is none."""
        used, group = self._segments_of(case), case.group
        if used is None:
            return
        self.unmeasured.difference_update(blocks)
        more_bytes = sum(trace.live_bytes for trace in blocks.values())
        group.add_blocks(blocks, more_bytes, metered_steps=_METERED_STEPS - 1)
        step = self._steps.step_of(case.size, case)
        peak_bytes = simulate(step, used).peak_bytes + group.excess_bytes
        self._warnings.say_difference(group.differences, peak_bytes)

    def open_bytes(self, used: Sequence[Segment] = ()) -> int:
        """Return the bytes that open calls hold, by default without regions."""
        times = self.plan.model_calls
        calls = map(self._graph.operations_of_call, range(times))
        held_bytes = sum(live_after(self._graph, used, each) for each in calls)
        return held_bytes * self._loop.open_calls() // times

    def say_predicted(self, reason: str, held_bytes: int) -> None:
        """Warn of a step without regions in which other passes hold this much."""
        peak_bytes = simulate(self._graph, ()).peak_bytes
        self._warnings.say_difference([reason], peak_bytes + held_bytes)

    def _say_if_open(self) -> None:
        """Warn of a call whose memory adds to that of open calls."""
        times = self.plan.model_calls
        if self._loop.open_calls() >= times and "open" not in self._warnings.said:
            held_bytes = self.open_bytes(segments_of(self._graph, self.plan) or ())
            self._warnings.say_open(times, self.plan.peak_bytes + held_bytes)

    def _check_kept(
        self, case: CallCase | None, plan: Plan, kept: LoopKept
    ) -> int | None:
        """Return the room that the training loop leaves; warn if it leaves none."""
        step, used, excess_bytes = self._graph, segments_of(self._graph, plan), 0
        if case is not None:
            step, used = self._steps.step_of(case.size, case), self._segments_of(case)
            excess_bytes = case.group.excess_bytes
        if used is None:
            return None
        return self._warnings.say_kept(step, used, kept, excess_bytes)

    def ended(
        self,
        case: CallCase | None,
        plan: Plan,
        output: object,
        order: Sequence[Place] | None,
        trace: CallTrace | None,
        blocks: Mapping[str, CallTrace],
    ) -> None:
        """Learn from a call that returned.

        Args:
            case: Its group and size; None: it was a call of the measured step.
            plan: The plan that it ran with.
            output: Its result.
            order: The places of the plan as they were reached; None: no plan ran.
            trace: Its operators, if it was the first of its kind.
            blocks: Traces of blocks that did not run in the measured step.
        """
        self._loop.opened(
            case, plan, output, self._reader, is_measured_plan=plan is self.plan
        )
        if case is None:
            self.unmeasured.difference_update(blocks)
            return
        if blocks:
            self._say_blocks(case, blocks)
        wrong = None
        if order is not None and plan.model_calls == 1:
            if id(plan) not in self._orders:
                self._orders[id(plan)] = (plan, measured_order(self._graph, plan))
            wrong = displaced(plan, self._orders[id(plan)][1], order)
        if wrong is not None:
            if (used := segments_of(self._graph, plan)) is not None:
                step = self._steps.step_of(case.size, case)
                self._warnings.say_order(plan, step, used, wrong)
        elif trace is not None:
            self._traced(case, trace)
