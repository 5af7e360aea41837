"""An applied plan that follows the calls it meets, and tightens when memory ran out.

The plan was made for one step. A call of another size, or of a model in another state,
is another step: it gets a plan of its own, and what it needs is compared with the
budget. The first call of its kind is traced for that.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.operators.fingerprints import fingerprint_bytes
from recoup.backend.state.model_state import ModelState, StateReader, needs
from recoup.backend.state.trees import named_tensors
from recoup.core.callers import user_stacklevel
from recoup.core.graph import Graph
from recoup.core.growth import Axis, Growth, group_of, resized
from recoup.core.plan import (
    Place,
    Plan,
    displaced,
    measured_order,
    plan_for,
    segments_of,
)
from recoup.core.segments import Action, Segment
from recoup.core.simulation import LoopKept, live_after, peak_with, simulate
from recoup.engine.applied.applied_plan import Applied, Choice
from recoup.engine.verification.replay_check import Verify
from recoup.errors import BudgetWarning, InfeasibleError
from recoup.fitting.following.loop_memory import LoopMemory, advice_for, reasons_of
from recoup.measurement.tracing.call_trace import CallTrace, storage_bytes
from recoup.planners.planner import floor_with, plan_with
from recoup.planners.search import Search

_TIGHTER = 0.9
"""A budget that was too much for the device is cut to this share of itself."""

_PLANNING_SECONDS = 0.5
"""Planning for another size begins nothing that takes long after so many seconds."""

_MOST_GROUPS = 48
"""For more groups of sizes than this no plan is made: the smallest plan serves them, or
the measured one where nothing is larger."""

_MOST_CASES = 4096
"""So many different calls are remembered, to be recognised without any work."""

_MARGIN = 0.03
"""A step of another size is predicted up to this share."""

_SURPRISE = 0.02
"""A group is planned again if the storages of its first call differ in total from the
prediction by more than this share."""

_Key = tuple[tuple[str, torch.Size, torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class _Measured:
    """One call of the measured step."""

    key: _Key
    size: dict[Axis, int]
    nbytes: int
    state: ModelState


@dataclass(slots=True)
class _Group:
    """Calls that share a plan.

    Attributes:
        size: The largest of them that is planned for.
        plan: The plan; None: it is to be made.
        segments: The same as segments of the measured step.
        is_traced: A call of it was seen.
        is_warned: A warning said that it does not fit.
        excess_bytes: What its calls take beyond the prediction.
    """

    size: dict[Axis, int]
    plan: Plan | None = None
    segments: tuple[Segment, ...] | None = None
    is_traced: bool = False
    is_warned: bool = False
    excess_bytes: int = 0


@dataclass(slots=True)
class _Case:
    """Calls with the same shapes, of a model in the same state."""

    group: _Group
    size: dict[Axis, int]
    nbytes: int
    measured: int
    state: ModelState
    differences: list[str] = field(default_factory=list[str])


class Adapted:
    """A plan applied to a model; calls that are not the measured one get their own.

    Gradients are right whatever the plan.

    Args:
        model: The model.
        graph: The measured step.
        made: The plan for it.
        allow: What may be done with a value besides recomputing it.
        verify: As for `CheckpointScope`.
        reserved_bytes: Part of the user's budget that the plan's does not contain.
        warns: Warn of calls that exceed the budget.
        attach: Apply the plan to the model. False: another one does, and asks `choose`.
    """

    def __init__(  # noqa: PLR0913 (what a plan is applied for)
        self,
        model: nn.Module,
        graph: Graph,
        made: Plan,
        allow: frozenset[Action],
        *,
        verify: Verify,
        reserved_bytes: int = 0,
        warns: bool = True,
        attach: bool = True,
    ) -> None:
        self.plan = made
        self._graph = graph
        self._allow = allow
        self._budget_bytes = made.budget_bytes
        self._reserved_bytes = reserved_bytes
        self._verify: Verify = verify
        self._warns = warns
        self._measured: list[_Measured] = []
        self._orders: dict[int, tuple[Plan, tuple[Place, ...]]] = {}
        self._growths: dict[int, Growth] = {}
        self._chosen = made
        self._reader: StateReader | None = None
        self._loop = LoopMemory(self._check_kept)
        self._said_open = False
        self._said: set[str] = set()
        self.adopt(made)
        self._applied: Applied | None = None
        if attach:
            self._applied = Applied(model, self.choose, verify=verify)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: it has another model, and no open calls."""
        return {**vars(self), "_reader": None}

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Apply the plan to a call of the model that has begun already."""
        assert self._applied is not None, "attached"
        self._applied.begin(model, args, kwargs)

    def put_on(self, model: nn.Module) -> None:
        """Apply the plan to the model, again after `remove`."""
        assert self._applied is not None, "it applies its own plan"
        self._applied.put_on(model)

    def remove(self) -> None:
        """Take the plan off the model."""
        if self._applied is not None:
            self._applied.remove()

    def tighten(self) -> bool:
        """Plan anew for less memory; say whether that was possible.

        A plan that takes much less than the budget was still too much.
        """
        taken_bytes = self._chosen.peak_bytes or self._budget_bytes
        budget_bytes = int(min(taken_bytes, self._budget_bytes) * _TIGHTER)
        try:
            made = _planned(self._graph, budget_bytes, self._allow)
        except InfeasibleError:
            return False
        self._budget_bytes = budget_bytes
        self.adopt(made)
        return True

    def adopt(self, made: Plan) -> None:
        """Apply another plan for the measured step."""
        self.plan = self._chosen = made
        self._cases: dict[tuple[_Key, ModelState], _Case] = {}
        self._orders.clear()
        self._groups: dict[object, _Group] = {}
        self._loop.forget()

    def finish_measuring(self) -> None:
        """Warn from now on of memory that only the training loop keeps."""
        self._loop.finish_measuring()

    @property
    def planned_groups(self) -> int:
        """How many groups of calls have a plan."""
        return 1 + sum(group.plan is not None for group in self._groups.values())

    def choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Choice:
        """Return the plan for a call, and what watches the call."""
        found = named_tensors((args, kwargs))
        key = tuple([(path, t.shape, t.dtype) for path, t in found if _counts(t)])
        state = self._state_of(model)
        if len(self._measured) < self.plan.model_calls:
            self._measured.append(
                _Measured(key, _size_of(key), _bytes_of(found), state)
            )
            self._chosen = self.plan
            return self.plan, _Watch(self, None, self.plan)
        case = self._cases.get((key, state))
        if case is None:
            case = self._case(key, _bytes_of(found), state)
            if len(self._cases) >= _MOST_CASES:
                self._cases.clear()
            self._cases[key, state] = case
        self._say_if_open()
        self._chosen = self._plan_of(case)
        return self._chosen, _Watch(self, case, self._chosen)

    def _state_of(self, model: nn.Module) -> ModelState:
        if self._reader is None or not self._reader.is_of(model):
            self._reader = StateReader(model)
        return self._reader.read()

    def _case(self, key: _Key, nbytes: int, state: ModelState) -> _Case:
        """Return what is known of calls of a kind that has not occurred before."""
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
        size.update((a, n) for a, n in _size_of(key).items() if a in size)
        group_size = group_of(measured.size, size)
        reader = self._reader
        differences = (
            [] if reader is None else reader.differences(measured.state, state)
        )
        other = state if differences else None
        # Other tensors than the measured call had may mean other operators.
        other_paths = () if same else tuple(sorted(paths))
        place = (number, tuple(sorted(group_size.items())), other, other_paths)
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = _Group(group_size)
            # Nothing that is asked of the measured step can be new here.
            group.is_traced = bool(same) and not differences
        return _Case(group, size, nbytes, number, state, differences)

    def _plan_of(self, case: _Case) -> Plan:
        group = case.group
        measured = self._measured[case.measured]
        is_measured = group.size == measured.size
        if is_measured and not group.excess_bytes:
            return self.plan
        if group.plan is not None:
            return group.plan
        is_smaller = all(n <= measured.size[axis] for axis, n in group.size.items())
        if is_smaller and not group.excess_bytes:
            is_new = not group.is_traced
            if is_new or self.planned_groups > _MOST_GROUPS:
                # Whatever fits a larger step fits this one.
                return self.plan
        self._plan_group(case)
        assert group.plan is not None, "a group has a plan once it was planned"
        return group.plan

    def _plan_group(self, case: _Case) -> None:
        """Plan for all sizes of a group, and say if none fits."""
        group = case.group
        step = self._step_of(group.size, case)
        target_bytes = self._budget_bytes - group.excess_bytes - self._slack(step)
        search = Search(step, self._allow)
        until = perf_counter() + _PLANNING_SECONDS
        if self.planned_groups > _MOST_GROUPS:
            target_bytes = 0
        try:
            solution = plan_with(search, target_bytes, until=until)
        except InfeasibleError:
            solution = floor_with(search)
        group.segments = tuple(solution.segments)
        group.plan = plan_for(
            step,
            solution.segments,
            budget_bytes=self._budget_bytes,
            peak_bytes=solution.simulation.peak_bytes,
            seconds=solution.simulation.seconds,
        )
        if group.is_traced:
            self._check_size(case, group.segments)

    def _slack(self, step: Graph) -> int:
        """Return what a step of another size may take beyond its prediction.

        Its first run is verified, which takes memory of its own.
        """
        error_bytes = int(_MARGIN * self._budget_bytes)
        if self._verify == "off":
            return error_bytes
        largest = max((storage.bytes for storage in step.storages), default=0)
        return error_bytes + fingerprint_bytes(largest)

    def _step_of(self, size: Mapping[Axis, int], case: _Case) -> Graph:
        """Return the measured step at another size."""
        measured = self._measured[case.measured]
        if size == measured.size:
            return self._graph
        growth = self._growth_of(case.measured)
        added_bytes = max(0, case.nbytes - measured.nbytes)
        return resized(self._graph, growth.predicted(size), added_bytes=added_bytes)

    def _growth_of(self, number: int) -> Growth:
        growth = self._growths.get(number)
        if growth is None:
            storages = [storage.bytes for storage in self._graph.storages]
            growth = Growth(self._measured[number].size, storages)
            self._growths[number] = growth
        return growth

    def _segments_of(self, case: _Case) -> tuple[Segment, ...] | None:
        group = case.group
        if group.plan is not None:
            return group.segments
        return segments_of(self._graph, self.plan)

    def _traced(self, case: _Case, trace: CallTrace) -> None:
        """Learn from the first call of a group."""
        group = case.group
        group.is_traced = True
        growth = self._growth_of(case.measured)
        operations = self._graph.operations_of_call(case.measured)
        found, is_same = storage_bytes(self._graph, trace, operations)
        is_measured = case.size == self._measured[case.measured].size
        used = self._segments_of(case)
        if not is_measured and not case.differences:
            before = growth.predicted(case.size)
            growth.add(case.size, found)
            after = growth.predicted(case.size)
            if abs(sum(before) - sum(after)) > _SURPRISE * sum(after):
                self._check_size(case, used)
                group.plan = None
                return
        if used is None:
            return
        step = self._step_of(case.size, case)
        excess_bytes = trace.live_bytes - live_after(step, used, operations)
        reader = self._reader
        if case.differences and reader is not None:
            measured = self._measured[case.measured].state
            added_bytes = reader.added_gradient_bytes(measured, case.state)
            if is_same and excess_bytes <= 0 and not added_bytes:
                return
            group.excess_bytes = max(0, excess_bytes) + added_bytes
            group.plan = None
            peak_bytes = simulate(step, used).peak_bytes + group.excess_bytes
            self._say_difference(case, peak_bytes)
            return
        if not is_same and excess_bytes > 0:
            group.excess_bytes = excess_bytes
            group.plan = None
        self._check_size(case, used)

    def _check_size(self, case: _Case, used: tuple[Segment, ...] | None) -> None:
        """Warn if the plan of a call needs more than the budget."""
        group = case.group
        if used is None or group.is_warned:
            return
        step = self._step_of(case.size, case)
        peak_bytes = simulate(step, used).peak_bytes + group.excess_bytes
        if used == group.segments:
            peak_bytes += self._slack(step)
        if peak_bytes > self._budget_bytes:
            group.is_warned = True
            self._warn(
                f"expected a batch that fits, got {self._described(case)}: "
                "{needs}. The smallest plan known is applied; give smaller batches, "
                "or call recoup.fit with the largest batch.",
                peak_bytes,
            )

    def _described(self, case: _Case) -> str:
        """Return in words which axes differ from the measured call."""
        measured = self._measured[case.measured].size
        changed = [
            f"{_argument(path)} axis {axis}: {measured[path, axis]} -> {length}"
            for (path, axis), length in case.size.items()
            if length != measured[path, axis]
        ]
        return f"other sizes ({', '.join(changed[:4])})" if changed else "other tensors"

    def _say_difference(self, case: _Case, needed_bytes: int) -> None:
        reasons = "; ".join(case.differences)
        if reasons not in self._said:
            self._said.add(reasons)
            self._warn(
                f"expected the step that recoup.fit measured, got another one: "
                f"{reasons}; {{needs}}. Later calls get a plan that leaves room for "
                "it, as far as there is one. Call recoup.fit on the model as you "
                "train it to have the budget checked.",
                needed_bytes,
            )

    def _is_in_order(self, plan: Plan, order: Sequence[Place]) -> bool:
        known = self._orders.get(id(plan))
        if known is None:
            # With the plan, so that its identity is not given to another.
            known = (plan, measured_order(self._graph, plan))
            self._orders[id(plan)] = known
        return known[1] == tuple(order)

    def _say_order(self, case: _Case, plan: Plan, order: Sequence[Place]) -> None:
        """Warn of a call that did not run the blocks as the measured one did."""
        used = segments_of(self._graph, plan)
        if used is None or "order" in self._said:
            return
        wrong = displaced(plan, self._orders[id(plan)][1], order)
        names = [plan.spans[number].start.module or "the model" for number in wrong]
        step = self._step_of(case.size, case)
        begun = [used[n] for n in range(len(used)) if n not in wrong]
        peak_bytes = simulate(step, begun).peak_bytes
        if peak_bytes > self._budget_bytes:
            self._said.add("order")
            self._warn(
                f"expected the blocks in the measured order, got another one: "
                f"{', '.join(names[:3])} did not run as in the measured step; "
                "{needs}, if what ran elsewhere is kept. Call recoup.fit "
                "with a step that runs the blocks as you train them.",
                peak_bytes,
            )

    def _say_if_open(self) -> None:
        """Warn of a call whose memory adds to that of calls before it."""
        count = self._loop.open_calls()
        if count < self.plan.model_calls or self._said_open or not self._warns:
            return
        self._said_open = True
        used = segments_of(self._graph, self.plan) or ()
        held_bytes = sum(
            live_after(self._graph, used, self._graph.operations_of_call(number))
            for number in range(self.plan.model_calls)
        )
        times = self.plan.model_calls
        self._warn(
            f"expected backward after {times} call{'s' if times > 1 else ''} of the "
            f"model, as in the measured step, got another call before it: {{needs}}. "
            "Call recoup.fit with step= a function that runs all calls and backward.",
            self.plan.peak_bytes + held_bytes * count // times,
        )

    def _check_kept(self, case: _Case | None, plan: Plan, kept: LoopKept) -> None:
        """Warn if a step does not fit because of what the training loop keeps."""
        if not self._warns:
            return
        kept = kept.beyond(self._graph)
        reasons = reasons_of(kept)
        if case is None:
            step, used = self._graph, segments_of(self._graph, plan)
        else:
            step, used = self._step_of(case.size, case), self._segments_of(case)
        if used is None or reasons.keys() <= self._said:
            return
        needed_bytes = peak_with(step, used, kept)
        if case is not None:
            needed_bytes += case.group.excess_bytes
        if needed_bytes > self._budget_bytes:
            self._said.update(reasons)
            self._warn(
                "expected a training loop that keeps what the measured step kept, got "
                f"{' and '.join(reasons.values())}: {{needs}}. To fit, "
                f"{advice_for(kept)}.",
                needed_bytes,
            )

    def _warn(self, message: str, needed_bytes: int) -> None:
        if not self._warns:
            return
        needed_bytes += self._reserved_bytes
        budget_bytes = self._budget_bytes + self._reserved_bytes
        text = message.replace("{needs}", needs(needed_bytes, budget_bytes))
        warning = BudgetWarning(
            text, needed_bytes=needed_bytes, budget_bytes=budget_bytes
        )
        warnings.warn(warning, stacklevel=user_stacklevel())

    def ended(
        self,
        case: _Case | None,
        plan: Plan,
        output: object,
        order: Sequence[Place] | None,
        trace: CallTrace | None,
    ) -> None:
        """Learn from a call that returned; see `Watch.end`.

        Args:
            case: What is known of it; None: it was a call of the measured step.
            plan: The plan that it ran with.
            output: What it returned.
            order: The places of the plan as they were reached.
            trace: Its operators, if it was the first of its kind.
        """
        self._loop.opened(
            case, plan, output, self._reader, is_measured_plan=plan is self.plan
        )
        if case is None:
            return
        is_alone = plan.model_calls == 1
        if order is not None and is_alone and not self._is_in_order(plan, order):
            self._say_order(case, plan, order)
        elif trace is not None:
            self._traced(case, trace)


class _Watch:
    """Watches one call: traces it if it is the first of its kind."""

    __slots__ = ("_adapted", "_case", "_plan", "_trace")

    def __init__(self, adapted: Adapted, case: _Case | None, plan: Plan) -> None:
        self._adapted = adapted
        self._plan = plan
        self._case = case
        is_new = (
            case is not None
            and not case.group.is_traced
            and not torch.compiler.is_compiling()
        )
        self._trace = CallTrace() if is_new else None

    def begin(self) -> None:
        """Begin to trace."""
        if self._trace is not None:
            self._trace.begin()

    def end(self, output: object, order: Sequence[Place] | None) -> None:
        """Learn from the call."""
        self.cancel()
        if output is not None:
            self._adapted.ended(self._case, self._plan, output, order, self._trace)

    def cancel(self) -> None:
        """Stop tracing."""
        if self._trace is not None:
            self._trace.end()


def _counts(tensor: Tensor) -> bool:
    """Return whether the shape of a tensor may say how large a step is."""
    return tensor.dim() > 0 and tensor.numel() > 1


def _size_of(key: _Key) -> dict[Axis, int]:
    found: dict[Axis, int] = {}
    for path, shape, dtype in key:
        found.update(((path, axis), length) for axis, length in enumerate(shape))
        found[path, -1] = dtype.itemsize
    return found


def _bytes_of(found: Sequence[tuple[str, Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in found)


def _argument(path: str) -> str:
    """Return an input's path as a user writes it: `0.1` is the second argument."""
    kind, _, rest = path.partition(".")
    return f"args.{rest}" if kind == "0" else rest


def _planned(graph: Graph, budget_bytes: int, allow: frozenset[Action]) -> Plan:
    search = Search(graph, allow)
    solution = plan_with(search, budget_bytes)
    return plan_for(
        graph,
        solution.segments,
        budget_bytes=budget_bytes,
        peak_bytes=solution.simulation.peak_bytes,
        seconds=solution.simulation.seconds,
    )
