"""An applied plan that follows the calls it meets, and tightens when memory ran out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from recoup.backend.autograd.transforms import is_transformed
from recoup.backend.state.trees import tensors_within
from recoup.core.graph import Graph
from recoup.core.plan import Plan
from recoup.core.segments import Action
from recoup.engine.applied.applied_plan import Applied, Choice, PassOrder, shapes_of
from recoup.engine.applied.model_blocks import block_names
from recoup.engine.verification.replay_check import Verify
from recoup.fitting.following.adapted_pass import AdaptedPass
from recoup.fitting.following.budget_warnings import BudgetWarnings
from recoup.fitting.following.loop_memory import EarlierOutputs
from recoup.fitting.following.watched_step import StepMeter
from recoup.measurement.steps.training_step import device_of
from recoup.measurement.timing.block_frames import StepMarks, marked_graph
from recoup.measurement.tracing.live import LiveStep

_METERED_STEPS = 3
"""The most steps with calls out of order to meter until one is within the budget."""

_TIGHTER = 0.9
"""The passes that take more than this share of the largest are tightened with it."""


class Adapted:
    """A plan applied to the modules that a step calls: each pass has its own part.

    Gradients are right whatever the plan.

    Args:
        model: The model, or what contains the models.
        graph: The measured step.
        made: The plan for it.
        allow: Actions allowed on a value besides recomputing it.
        verify: As for `CheckpointScope`.
        reserved_bytes: Part of the user's budget that the plan's does not contain.
        is_fixed: All calls get this plan; warn only of memory that the loop keeps.

    Attributes:
        plan: The plan for the measured step.
        parts: The plan of each pass, in the order of `Plan.parts`.
    """

    def __init__(  # noqa: PLR0913 (the step and its plan)
        self,
        model: nn.Module,
        graph: Graph,
        made: Plan,
        allow: frozenset[Action],
        *,
        verify: Verify,
        reserved_bytes: int = 0,
        is_fixed: bool = False,
    ) -> None:
        self.plan = made
        self.parts = [
            AdaptedPass(
                each,
                part,
                allow,
                verify=verify,
                reserved_bytes=reserved_bytes,
                is_fixed=is_fixed,
            )
            for each, part in zip(graph.passes, made.parts, strict=True)
        ]
        earlier, said = EarlierOutputs(), set[str]()
        for part in self.parts:
            part.share(earlier, said)
        self._order = PassOrder(made)
        self._disorder = None if is_fixed else _Disorder(self.parts)
        self._roots = made.all_roots
        # A plan does not keep the model alive, unless parts of it are called.
        self._model = None if self._roots == ("",) else model
        is_one = len(self.parts) == 1 and self._model is None
        choose = self.parts[0].choose if is_one else self._choose
        ran = {boundary.module for each in graph.passes for boundary in each.boundaries}
        unmeasured = set[str]() if is_fixed else set(block_names(model)) - ran
        for part in self.parts:
            part.unmeasured = unmeasured
        self._applied = Applied(
            model,
            choose,
            verify=verify,
            roots=self._roots,
            unplanned=unmeasured,
            outside=None if is_fixed else self._say_outside,
        )

    def put_on(self, model: nn.Module) -> None:
        """Apply the plan to the model, again after `remove`."""
        self._applied.put_on(model)

    def remove(self) -> None:
        """Take the plan off the model."""
        self._applied.remove()
        for part in self.parts:
            part.stop()

    def tighten(self) -> bool:
        """Plan again for less memory; return whether that was possible.

        The passes that take most are planned for a tenth less than they took.
        """
        limit = max(part.plan.peak_bytes for part in self.parts) * _TIGHTER
        largest = [part for part in self.parts if part.plan.peak_bytes >= limit]
        if not all(part.tighten() for part in largest):
            return False
        plans = tuple(part.plan for part in self.parts)
        if not self.plan.passes:
            self.plan = plans[0]
            return True
        self.plan = replace(
            self.plan,
            passes=plans,
            budget_bytes=max(plan.budget_bytes for plan in plans),
            peak_bytes=max(plan.peak_bytes for plan in plans),
        )
        return True

    def adopt(self, made: Plan) -> None:
        """Apply another plan for the measured step."""
        for part, plan in zip(self.parts, made.parts, strict=True):
            part.adopt(plan)
            part.first = None  # its first run is verified, which takes memory
        self.plan = made

    def finish_measuring(self) -> None:
        """Warn from now on of memory that only the training loop keeps."""
        for part in self.parts:
            part.finish_measuring()
            part.first = _first_step

    def _say_outside(self, name: str) -> None:
        """Warn of a call of a part of the model, to which no plan applies."""
        max(self.parts, key=lambda part: part.plan.peak_bytes).say_outside(name)

    def _choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Choice:
        whole = model if self._model is None else self._model
        if is_transformed():
            return self.parts[0].choose(whole, args, kwargs)
        root = next(n for n in self._roots if whole.get_submodule(n) is model)
        number = self._order.pass_of(root, shapes_of((args, kwargs)))
        expected = self._order.expected
        reason = ""
        if expected is not None:
            reason = (
                f"{root or 'the model'} was called where the measured step called "
                f"{expected or 'the model'}"
            )
        chosen = self.parts[number]
        is_alone = not any(part.open_calls for part in self.parts)
        disorder, metered = self._disorder, None
        if disorder is not None:
            metered = disorder.meter(reason, whole, (args, kwargs), is_alone=is_alone)
        is_known = disorder is not None and not disorder.is_open
        if reason and metered is None and not is_known:
            # Noticed in the middle of a step: its peak can only be predicted.
            others = [part for part in self.parts if part is not chosen]
            held_bytes = sum(part.open_bytes() for part in others)
            chosen.say_predicted(reason, held_bytes)
        return chosen.choose(whole, args, kwargs, is_alone=is_alone, metered=metered)


def _first_step(
    said: BudgetWarnings,
    unseen_bytes: int,
    model: nn.Module,
    found: Sequence[tuple[str, Tensor]],
) -> LiveStep | None:
    """Return the meter of the first step after `fit`, if an allocator counts.

    Later ones are not compared with the budget: an optimizer has made its state since.
    """
    device = device_of(model)  # the step does not keep the model alive
    if device.type == "cpu" or not LiveStep.is_possible():
        return None

    def ended(peak_bytes: int) -> None:
        said.say_more(peak_bytes + unseen_bytes, device)

    return LiveStep.of_model(model, [tensor for _, tensor in found], ended)


def watched_loop(
    model: nn.Module,
    marks: StepMarks | None,
    graph: Graph,
    budget_bytes: int,
    reserved_bytes: int,
    rest: Plan | None = None,
) -> Adapted | None:
    """Watch the memory that the loop of a model with compiled blocks keeps.

    Args:
        model: The model.
        marks: The marks of the compiled step.
        graph: The eager step, as it was measured.
        budget_bytes: The budget, without the reserved bytes.
        reserved_bytes: Part of the user's budget that is reserved.
        rest: The plan of code in no compiled block, applied with it.

    Returns:
        What watches it; None: its passes were not those of the eager step.
    """
    marked = None if marks is None else marked_graph(marks, graph)
    if marked is None:
        return None
    rests = [()] * len(graph.passes) if rest is None else [p.spans for p in rest.parts]
    plans = tuple(
        Plan(
            roots=known.roots,
            model_calls=known.model_calls,
            budget_bytes=budget_bytes,
            peak_bytes=max(each.other_bytes),
            spans=spans,
        )
        for each, known, spans in zip(marked.passes, graph.passes, rests, strict=True)
    )
    made = plans[0]
    if len(plans) > 1:
        made = replace(made, passes=plans, order=graph.order)
    return Adapted(
        model,
        marked,
        made,
        frozenset(),
        verify="off" if rest is None else "first",
        reserved_bytes=reserved_bytes,
        is_fixed=True,
    )


class _Disorder:
    """Calls in another order than in the measured step.

    Such a call may get the plan of another pass. From the next step on steps are
    metered, until one that has such a call is within the budget; all passes are planned
    for less by the bytes that it exceeds the budget by.

    Attributes:
        is_open: Whether there was such a call whose cost is unknown.
    """

    def __init__(self, parts: Sequence[AdaptedPass]) -> None:
        self.is_open = False
        self._parts = parts
        self._steps = _METERED_STEPS
        self._reason = ""
        self._meter = StepMeter()

    def meter(
        self, reason: str, model: nn.Module, arguments: object, *, is_alone: bool
    ) -> LiveStep | None:
        """Return what counts the bytes of the step that a call is in.

        Args:
            reason: The difference from the measured step, in words; empty: none.
            model: The model.
            arguments: Its arguments.
            is_alone: No call waits for its backward.
        """
        if reason:
            self.is_open = self._steps > 0
            self._reason = self._reason or reason
        if not self.is_open:
            return None
        running = self._meter.running()
        if running is not None or not is_alone:
            return running  # the step has begun
        if not self._meter.stop():
            return None
        # A step that begins as another pass is that pass.
        self._reason = ""

        def ended(peak_bytes: int) -> None:
            if self._reason:
                self._ended(peak_bytes)

        return self._meter.begin(model, tensors_within(arguments), ended)

    def _ended(self, peak_bytes: int) -> None:
        part = max(self._parts, key=lambda each: each.unseen_bytes)
        excess_bytes = part.say_difference(self._reason, peak_bytes)
        self._steps = self._steps - 1 if excess_bytes else 0
        self.is_open = self._steps > 0
        if excess_bytes:
            for part in self._parts:
                part.leave_room(excess_bytes)
