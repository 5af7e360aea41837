"""Learn from a running training loop: observe a step, plan it, check the plan."""

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from recoup.backend.autograd.module_hooks import calling_frame
from recoup.backend.autograd.saved_tensors import current_backward
from recoup.backend.state.model_state import StateReader, listed
from recoup.backend.state.trees import tensors
from recoup.core.callers import user_stacklevel
from recoup.core.plan import Plan
from recoup.core.units import print_bytes
from recoup.engine.applied.applied_plan import Applied, Choice, plans_on
from recoup.engine.applied.model_blocks import block_names
from recoup.engine.applied.planned_runs import Cuts
from recoup.engine.recording.active import Call
from recoup.errors import BudgetWarning
from recoup.fitting.decision import Outcome
from recoup.fitting.managing.managed_steps import (
    CallKind,
    KnownStep,
    Limits,
    ManagedStep,
)
from recoup.measurement.steps.training_step import device_of
from recoup.measurement.tracing.live import LiveStep
from recoup.measurement.tracing.observation import cuts_of

_FEW = 8
"""Up to this many single layers are recomputed as one region: alone, each would hold
everything it saves."""

_KINDS = 32
"""The number of kinds of steps that are remembered, the most recent ones."""

_TRIES = 3
"""The most observations of steps in which no region could begin or end."""

_KEYS = itertools.count()


class Managed:
    """A model that a manager plans for, without keeping it alive.

    Copies of the model keep the last plan, and have no manager.
    """

    def __init__(self, model: nn.Module, owner: "Learner") -> None:
        # Stateless modules, such as a loss created in each step, count as equal.
        has_state = any(True for _ in (*model.parameters(), *model.buffers()))
        self.key = next(_KEYS) if has_state else (type(model), repr(model))
        self.name = type(model).__name__
        self.device = device_of(model)
        blocks = block_names(model)
        has_parts = any(any(model.get_submodule(b).children()) for b in blocks)
        self.cuts: tuple[str, ...] = ()
        if has_parts or len(blocks) > _FEW:
            self.cuts = cuts_of(model, blocks)
        self.last: Plan | Cuts | None = None
        self._reader: StateReader | None = None
        self.owner: Callable[[], Learner | None] = weakref.ref(owner)
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.applied = Applied(model, self.choose)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without the original's model and manager."""
        others = {"owner": _nobody, "model": _nobody, "_reader": None}
        return {**vars(self), **others}

    def kind_of(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallKind:
        """Return the kind of a call: everything that its memory depends on."""
        reader = self._reader
        if reader is None or not reader.is_of(model):
            reader = self._reader = StateReader(model)
        given = tensors((args, kwargs))
        mode = (reader.read(), tuple(tensor.requires_grad for tensor in given))
        return CallKind(self.key, mode, tuple(tuple(t.shape) for t in given))

    def choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Choice:
        """Return the plan of a call that begins now, and its watch."""
        owner = self.owner()
        if owner is None:
            return self.last, None
        return owner.begin_call(self, model, args, kwargs)

    def move(self, model: nn.Module, owner: "Learner") -> None:
        """Let another manager plan for the model, from the call on that begins now."""
        if isinstance(self.key, int):
            self.key = next(_KEYS)
        self.last = None
        self.owner, self.model = weakref.ref(owner), weakref.ref(model)

    def remove(self) -> None:
        """Remove the plan from the model."""
        self.applied.remove()

    def begin(self) -> None:
        """Do nothing: `choose` has begun the call."""

    def end(self, output: object, order: object) -> None:
        """Make the manager wait for the call's backward."""
        del order
        owner = self.owner()
        if owner is not None:
            owner.end_call(output)

    def cancel(self) -> None:
        """End a call that was interrupted."""
        self.end(None, None)


def managed_in(model: nn.Module) -> list[tuple[nn.Module, Managed]]:
    """Return what managers plan for in a model: it, or parts of it."""
    placed = [
        (part, plan.chooser) for part in model.modules() for plan in plans_on(part)
    ]
    return [(part, each) for part, each in placed if isinstance(each, Managed)]


@dataclass(eq=False)
class RunningStep:
    """A running step: the calls so far, and the progress of their backward.

    Attributes:
        key: The key by which its kind is looked up, besides shapes.
        place: The key, and the kind of the previous step.
        known: The kind; None while it is being observed, or cannot be.
        left_bytes: Bytes that earlier steps have left in memory.
        watch: The instruments, if it is observed or measured.
        limits: The limits when it began.
        expected: The prediction of its plan when it began.
        planned_bytes: The same, including known prediction errors.
        is_other: Whether it makes other calls than its kind.
        calls: The calls so far, and the models.
        has_backward: Whether backward has reached one of the calls.
    """

    key: object
    place: object
    known: KnownStep | None
    left_bytes: int
    limits: Limits
    watch: LiveStep | None = None
    expected: Outcome | None = None
    planned_bytes: int = 0
    is_other: bool = False
    calls: list[tuple[CallKind, Managed]] = field(
        default_factory=list[tuple[CallKind, Managed]]
    )
    has_backward: bool = False
    _open: set[int] = field(default_factory=set[int])
    _reached: set[int] = field(default_factory=set[int])
    _running: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether its backward has run, or cannot run any more."""
        return self.has_backward or (self._running is None and not self._open)

    @property
    def open_calls(self) -> set[int]:
        """The calls whose backward is still to come."""
        return self._open - self._reached

    @property
    def kinds(self) -> tuple[CallKind, ...]:
        """The kinds of the calls so far."""
        return tuple(kind for kind, _ in self.calls)

    def begin(self, kind: CallKind, managed: Managed) -> int:
        """Register a call; return its number."""
        self.calls.append((kind, managed))
        self._running = len(self.calls) - 1
        return self._running

    def wait_for(self, output: object) -> None:
        """Wait for the backward of the call that returned `output`."""
        number, self._running = self._running, None
        if self.watch is not None:
            self.watch.wait_for(output)
        nodes = [t.grad_fn for t in tensors(output) if t.grad_fn is not None]
        if nodes and number is not None:
            self._open.add(number)
            arrive = partial(self.reached, number)
            weakref.finalize(arrive, self.dropped, number).atexit = False
            for node in nodes:
                node.register_hook(arrive)

    def reached(self, number: int, *_: object) -> None:
        """Record that backward arrives at a call."""
        self._reached.add(number)
        self.has_backward = True

    def dropped(self, number: int) -> None:
        """Record that the graph of a call was freed."""
        self._open.discard(number)


class _OfThread(threading.local):
    """The state of one thread.

    Attributes:
        step: The running step.
        call: The running call of a model.
        previous: The kind of the previous step; None if unknown.
        watch: The instruments of the previous step.
        has_updated: Whether an optimizer has run since the last step.
        is_lost: Whether the previous step made other calls than expected.
        managed: The models that it has called, by key.
    """

    def __init__(self) -> None:
        self.step: RunningStep | None = None
        self.call: Call | None = None
        self.previous: KnownStep | None = None
        self.watch: LiveStep | None = None
        self.has_updated = self.is_lost = False
        self.managed: dict[object, Managed] = {}

    def gradients(self) -> list[Tensor]:
        """Return the models' current gradients."""
        models = [each.model() for each in tuple(self.managed.values())]
        parameters = (p for model in models if model for p in model.parameters())
        return [p.grad for p in parameters if p.grad is not None]


class Learner:
    """Learns the kinds of steps of a loop, and chooses a plan for each call.

    A step lasts from the first call of a model to the end of the backward that follows.
    A step of an unknown kind is observed with every block recomputed; later ones have a
    plan, and the first step with a plan is measured.

    Args:
        limits: Weak reference to a function that returns the current limits of plans.
    """

    def __init__(self, limits: "weakref.WeakMethod[Callable[[], Limits]]") -> None:
        self._limits = limits
        self._known: list[tuple[object, KnownStep]] = []
        # By place; None: a step began there like a known one, but turned out different.
        self._usual: dict[object, KnownStep | None] = {}
        self._warned: dict[object, int] = {}
        self._tries = 0
        self._planning = threading.RLock()
        self._mine = _OfThread()

    @property
    def is_in_call(self) -> bool:
        """Whether a call of a model is running on this thread."""
        call = self._mine.call
        return call is not None and call.is_under_way()

    def steps(self, limits: Limits) -> tuple[ManagedStep, ...]:
        """Return the observed kinds of steps, planned for limits."""
        self.end_step(only_over=True)
        with self._planning:
            for _, known in self._known:
                self._replan(known, limits)
            return tuple(known.report(limits) for _, known in self._known)

    def forget(self) -> None:
        """End the step, and forget the order of steps."""
        self.end_step()
        self._usual = {}

    def forget_models(self, keys: set[object]) -> None:
        """Forget the steps of dead models."""
        with self._planning:
            self._known = [
                (key, known)
                for key, known in self._known
                if not any(call.model in keys for call in known.calls)
            ]
            if keys:
                self._usual = {}

    def begin_call(
        self,
        managed: Managed,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Choice:
        """Return the plan of a call that begins now, and its watch."""
        mine = self._mine
        if current_backward() != -1:
            return managed.last, None  # user code reruns a forward, with its old plan
        if self.is_in_call:
            return None, None  # a submodule of the model whose call is running
        current_limits = self._limits()
        limits = None if current_limits is None else current_limits()
        if limits is None or not limits.is_on:
            self.end_step()
            return None, None
        if mine.step is None or mine.step.is_over:
            self.end_step()
        mine.call = Call(calling_frame())
        mine.managed[managed.key] = managed
        kind = managed.kind_of(model, args, kwargs)
        step = mine.step
        if step is None:
            step = mine.step = self._begin_step(managed, kind, limits)
        number = step.begin(kind, managed)
        if step.known is not None:
            managed.last = self._planned(step, step.known, number, limits)
            return managed.last, managed
        tracer = None
        if step.watch is not None:
            step.watch.call(model, str(number), args, kwargs)
            tracer = step.watch.tracer
        managed.last = Cuts(managed.cuts)
        return Cuts(managed.cuts, policy=tracer), managed

    def end_call(self, output: object) -> None:
        """Wait for the backward of the call that returns `output`."""
        self._mine.call = None
        if self._mine.step is not None:
            self._mine.step.wait_for(output)

    def optimizer_runs(self) -> None:
        """End the step: an optimizer is about to use its gradients."""
        self.end_step(only_over=True)
        self._mine.has_updated = True

    def _begin_step(
        self, managed: Managed, kind: CallKind, limits: Limits
    ) -> RunningStep:
        """Begin a step: with the plan for its kind, or observed if that is new."""
        mine = self._mine
        carries = int(bool(mine.gradients())) * (1 + mine.has_updated)
        key = (kind.model, kind.mode, carries)
        place = (key, id(mine.previous))
        left_bytes = 0 if mine.watch is None else mine.watch.left_bytes
        with self._planning:
            known = None if mine.is_lost else self._find(place, key, kind)
            if self._usual.get(place, known) is None:
                self._usual.pop(place, None)
            if known is not None:
                known.left_bytes = max(known.left_bytes, left_bytes)
                self._replan(known, limits)
        mine.watch, mine.has_updated, mine.is_lost = None, False, False
        step = RunningStep(key, place, known, left_bytes, limits)
        if known is not None:
            step.expected, step.planned_bytes = known.expected, known.planned_bytes
        traced = known is None
        needs_watch = known is None or known.needs_check
        if needs_watch and LiveStep.is_possible(traced=traced):
            step.watch = LiveStep(managed.device, mine.gradients, traced=traced)
        return step

    def _find(self, place: object, key: object, kind: CallKind) -> KnownStep | None:
        """Return the kind of step that most likely begins now.

        That is the one that began at this place before, or else the smallest known one
        that covers the call, the most recent of several.
        """
        if place in self._usual:
            usual = self._usual[place]
            if usual is None or usual.calls[0].covers(kind):
                return usual
        found = [
            known
            for other, known in reversed(self._known)
            if other == key and known.calls[0].covers(kind)
        ]
        return min(found, key=lambda known: known.calls[0].elements, default=None)

    def _planned(
        self, step: RunningStep, known: KnownStep, number: int, limits: Limits
    ) -> Plan | Cuts | None:
        """Return the plan of a call in a step of a known kind."""
        kind, managed = step.calls[number]
        calls = known.calls
        is_expected = number < len(calls) and calls[number].covers(kind)
        if step.is_other or not is_expected:
            if not step.is_other:
                self._warn_of_other(known, limits)
            step.is_other = True
            return Cuts(managed.cuts)
        self._replan(known, limits)
        if number not in known.fixed_calls:
            return known.plan_of(number)
        # Recompute nothing if no step needs it, whatever calls stay open.
        steps = [each for _, each in self._known]
        most_bytes = max(each.plain_bytes for each in steps)
        most_bytes += sum(each.fixed_bytes for each in steps)
        return None if most_bytes <= limits.budget_bytes else Cuts(managed.cuts)

    def _replan(self, known: KnownStep, limits: Limits) -> None:
        with self._planning:
            is_new = known.replan(limits)
        planned_bytes = known.planned_bytes
        if is_new and planned_bytes > limits.budget_bytes:
            ratio = limits.max_ratio
            cap = "" if ratio is None else f" with max_recompute_ratio={ratio}"
            what = f"the smallest plan{cap} takes {print_bytes(planned_bytes)}, and is"
            self._warn(known, limits, planned_bytes, f"{what} used")

    def end_step(self, *, only_over: bool = False) -> None:
        """Detach the instruments, and learn from the step."""
        mine = self._mine
        step = mine.step
        if step is None or (only_over and not step.is_over):
            return
        mine.step = mine.call = None
        watch, known = step.watch, step.known
        if watch is not None:
            watch.finish()
            mine.watch = watch
        if step.has_backward and watch is not None:
            if known is None:
                known = self._learn(step, watch)
            elif not step.is_other:
                self._check(step, known, watch)
        if step.is_other:
            known = self._known_kind(step)
            if known is None:
                self._usual[step.place] = None
                mine.is_lost = True
        if known is not None and step.has_backward:
            with self._planning:
                self._usual[step.place] = known
                others = [each for each in self._known if each[1] is not known]
                self._known = [*others, (step.key, known)][-_KINDS:]
        mine.previous = known

    def _known_kind(self, step: RunningStep) -> KnownStep | None:
        """Return the known kind of a step that has made all its calls."""
        for key, known in self._known:
            if key == step.key and known.is_made_of(step.kinds):
                return known
        return None

    def _learn(self, step: RunningStep, watch: LiveStep) -> KnownStep | None:
        """Return the kind of the observed step."""
        known = self._known_kind(step)
        if known is not None:
            return known
        paths = [
            {f"{number}.{name}" if name else str(number): name for name in managed.cuts}
            for number, (_, managed) in enumerate(step.calls)
        ]
        cuts = {path for each in paths for path in each}
        torn = watch.torn(cuts)
        if torn:  # unsuitable cuts: observe the next step without them
            for each, (_, managed) in zip(paths, step.calls, strict=True):
                bad = {name for path, name in each.items() if path in torn}
                managed.cuts = tuple(name for name in managed.cuts if name not in bad)
            return None
        plannable = watch.planned_calls
        if not plannable and self._tries < _TRIES:
            self._tries += 1  # the user's own hooks were active
            return None
        fixed = step.open_calls | (set(range(len(step.calls))) - plannable)
        known = KnownStep(
            step.kinds,
            tuple(managed.name for _, managed in step.calls),
            watch.graph(cuts, fixed),
            watch.start_bytes,
            frozenset(fixed),
            watch.fixed_bytes,
            step.left_bytes,
        )
        limits = step.limits
        taken_bytes = watch.peak_bytes + step.left_bytes
        if taken_bytes > limits.budget_bytes:
            self._replan(known, limits)  # which warns if no plan fits
            if known.planned_bytes <= limits.budget_bytes:
                self._warn(
                    known,
                    limits,
                    taken_bytes,
                    f"it took {print_bytes(taken_bytes)} while it was observed with "
                    "every block recomputed, and is planned for "
                    f"{print_bytes(known.planned_bytes)} from now on",
                )
        return known

    def _check(self, step: RunningStep, known: KnownStep, watch: LiveStep) -> None:
        """Compare the peak of a planned step with its plan and its budget."""
        assert step.expected is not None, "it began with a plan"
        taken_bytes = watch.peak_bytes + known.left_bytes
        known.checked(step.expected, taken_bytes)
        if taken_bytes > max(step.limits.budget_bytes, step.planned_bytes):
            self._warn(
                known,
                step.limits,
                taken_bytes,
                f"with its plan it took {print_bytes(taken_bytes)}, and is planned for "
                "less from now on",
            )

    def _warn_of_other(self, known: KnownStep, limits: Limits) -> None:
        if known.names not in self._warned:
            self._warned[known.names] = 0
            warning = BudgetWarning(
                f"expected a step to go on as an earlier one of "
                f"{listed(known.names, 4)}, got other models or larger batches; its "
                "memory is not known yet. The next such step is observed.",
                budget_bytes=limits.budget_bytes,
            )
            warnings.warn(warning, stacklevel=user_stacklevel())

    def _warn(
        self, known: KnownStep, limits: Limits, needed_bytes: int, what: str
    ) -> None:
        """Warn that a step does not fit a budget: once, unless it needs even more."""
        key = (known.names, limits.budget_bytes)
        if needed_bytes <= self._warned.get(key, 0):
            return
        self._warned[key] = needed_bytes
        warning = BudgetWarning(
            f"a step of {listed(known.names, 4)} does not fit into "
            f"{print_bytes(limits.budget_bytes)} ({limits.options}): {what}.",
            needed_bytes=needed_bytes,
            budget_bytes=limits.budget_bytes,
        )
        warnings.warn(warning, stacklevel=user_stacklevel())


def _nobody() -> None:
    """Replace a weak reference in a copy."""
