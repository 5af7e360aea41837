"""Learn from a training loop as it runs: observe a step, plan it, check the plan."""

import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

from recoup.api.managed import Managed, RunningStep, gradients_of
from recoup.api.situations import CallKind, ManagedStep, Situation
from recoup.backend.frames import calling_frame
from recoup.backend.graph import current_backward
from recoup.core.callers import user_stacklevel
from recoup.core.errors import BudgetWarning
from recoup.core.plan import Plan
from recoup.core.units import print_bytes
from recoup.engine.active import Call
from recoup.engine.plans import Choice
from recoup.engine.runs import Cuts
from recoup.measure.live import LiveStep

_NAMED = 4
"""A warning names so many models."""

_KINDS = 32
"""So many kinds of steps are remembered: the last ones."""

_TRIES = 3
"""How often a step is observed in which no region could begin or end."""


class Limits(Protocol):
    """What a plan has to keep to, as the user has set it last."""

    @property
    def auto_checkpoint(self) -> bool:
        """Whether to choose at all."""
        ...

    @property
    def max_memory_mb(self) -> int:
        """The budget, in MiB."""
        ...

    @property
    def memory_threshold(self) -> float:
        """The share of it to plan for."""
        ...

    @property
    def budget_bytes(self) -> int:
        """That share in bytes."""
        ...

    @property
    def max_recompute_ratio(self) -> float | None:
        """The most to recompute, as a share of forward's time."""
        ...


class _OfThread(threading.local):
    """What one thread does under a manager.

    Attributes:
        step: The step that runs.
        call: The call of a model that is under way.
        previous: The kind of the step before it.
        watch: What the step before it was observed with.
        has_updated: An optimizer has run since the last step.
        is_lost: The step before it was of no known kind.
        managed: The models that it has called, by key.
    """

    def __init__(self) -> None:
        self.step: RunningStep | None = None
        self.call: Call | None = None
        self.previous: Situation | None = None
        self.watch: LiveStep | None = None
        self.has_updated = self.is_lost = False
        self.managed: dict[object, Managed] = {}


class Learner:
    """Knows the kinds of steps of a loop, and chooses a plan for each call.

    A step goes from the first call of a model to the end of the backward that follows.
    One of a kind that is not known is observed with every block recomputed; from the
    next on there is a plan, and the first step that runs with it is measured.

    Args:
        limits: What plans have to keep to.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._situations: list[tuple[object, Situation]] = []
        self._usual: dict[object, Situation] = {}
        self._unknown: set[object] = set()
        self._told: dict[object, int] = {}
        self._tries = 0
        self._planning = threading.RLock()
        self._mine = _OfThread()

    @property
    def is_in_call(self) -> bool:
        """Whether a call of a model is under way on this thread."""
        call = self._mine.call
        return call is not None and call.is_under_way()

    @property
    def steps(self) -> tuple[ManagedStep, ...]:
        """The kinds of steps that were observed, planned for the budget as it is."""
        self.end_step(only_over=True)
        with self._planning:
            return tuple(self._step_of(each) for _, each in self._situations)

    def forget(self) -> None:
        """End the step, and expect none of the known ones to follow."""
        self.end_step()
        self._unknown, self._usual = set(), {}

    def forget_models(self, keys: set[object]) -> None:
        """Forget the steps of models that are gone."""
        with self._planning:
            self._situations = [
                (key, situation)
                for key, situation in self._situations
                if not any(call.model in keys for call in situation.calls)
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
        """Return what is recomputed in a call that begins now, and who watches it."""
        mine = self._mine
        if current_backward() != -1:
            return managed.last, None  # user code runs forward again, as it did before
        if self.is_in_call:
            return None, None  # a part of the model whose call is under way
        if not self._limits.auto_checkpoint:
            self.end_step()
            return None, None
        if mine.step is None or mine.step.is_over:
            self.end_step()
        mine.call = Call(calling_frame())
        mine.managed[managed.key] = managed
        kind = managed.kind_of(model, args, kwargs)
        step = mine.step
        if step is None:
            step = mine.step = self._begin_step(managed, kind)
        return self._choose(step, managed, kind, (model, args, kwargs)), managed

    def end_call(self, output: object) -> None:
        """Wait for the backward of the call that returns this."""
        self._mine.call = None
        step = self._mine.step
        if step is not None:
            step.wait_for(output)

    def optimizer_runs(self) -> None:
        """End the step: an optimizer is about to use its gradients."""
        self.end_step(only_over=True)
        self._mine.has_updated = True

    def _begin_step(self, managed: Managed, kind: CallKind) -> RunningStep:
        """Begin a step: with the plan for its kind, or observed where that is new."""
        mine = self._mine
        gradients = partial(gradients_of, mine.managed)
        carries = int(bool(gradients())) * (1 + mine.has_updated)
        mine.has_updated = False
        key = (kind.model, kind.mode, carries)
        place = (key, id(mine.previous))
        left_bytes = None if mine.watch is None else mine.watch.left_bytes
        with self._planning:
            is_new = mine.is_lost or place in self._unknown
            situation = None if is_new else self._find(place, key, kind)
            self._unknown.discard(place)
            mine.is_lost = False
        step = RunningStep(key, place, situation, left_bytes or 0)
        if situation is not None and left_bytes is not None:
            situation.left_bytes = max(situation.left_bytes, left_bytes)
        mine.watch = None
        step.budget_bytes = self._limits.budget_bytes
        if LiveStep.is_possible() and (situation is None or self._is_due(situation)):
            traced = situation is None
            step.watch = LiveStep(managed.device, gradients, traced=traced)
        if situation is not None:
            step.planned_bytes = situation.planned_bytes
        return step

    def _find(self, place: object, key: object, kind: CallKind) -> Situation | None:
        """Return the kind of step that most likely begins now.

        That is the one that came here before, or else the tightest one known that
        takes no less memory, the one used last of several.
        """
        usual = self._usual.get(place)
        if usual is not None and usual.calls[0].covers(kind):
            return usual
        found = [
            situation
            for known, situation in reversed(self._situations)
            if known == key and situation.calls[0].covers(kind)
        ]
        return min(found, key=lambda s: s.calls[0].elements, default=None)

    def _remember(self, step: RunningStep, situation: Situation) -> None:
        """Mark a kind of step as the one used last."""
        with self._planning:
            self._usual[step.place] = situation
            others = [each for each in self._situations if each[1] is not situation]
            self._situations = [*others, (step.key, situation)][-_KINDS:]

    def _is_due(self, situation: Situation) -> bool:
        """Plan for the budget as it is; return whether the plan is to be measured."""
        self._replan(situation)
        return situation.needs_check

    def _choose(
        self,
        step: RunningStep,
        managed: Managed,
        kind: CallKind,
        call: tuple[nn.Module, tuple[Any, ...], dict[str, Any]],
    ) -> Plan | Cuts | None:
        number = step.begin(kind, managed)
        watch, situation = step.watch, step.situation
        if situation is None:
            tracer = None if watch is None else watch.tracer
            if watch is not None:
                watch.call(call[0], number, *call[1:])
            managed.last = Cuts(managed.cuts)
            return Cuts(managed.cuts, policy=tracer)
        managed.last = self._planned(step, situation, number, managed)
        return managed.last

    def _planned(
        self, step: RunningStep, situation: Situation, number: int, managed: Managed
    ) -> Plan | Cuts | None:
        kind = step.calls[number]
        calls = situation.calls
        is_known = number < len(calls) and calls[number].covers(kind)
        if step.is_other or not is_known:
            if not step.is_other:
                self._say_other(situation)
            step.is_other = True
            return Cuts(managed.cuts)
        self._replan(situation)
        if number not in situation.fixed_calls:
            return situation.plan_of(number)
        return None if self._all_fits_plain() else Cuts(managed.cuts)

    def _all_fits_plain(self) -> bool:
        """Return whether no step needs anything recomputed, whatever stays open."""
        found = [situation for _, situation in self._situations]
        fixed_bytes = sum(situation.fixed_bytes for situation in found)
        plain_bytes = max(situation.plain_bytes for situation in found)
        return plain_bytes + fixed_bytes <= self._limits.budget_bytes

    def _replan(self, situation: Situation) -> None:
        with self._planning:
            if not situation.replan(
                self._limits.budget_bytes, self._limits.max_recompute_ratio
            ):
                return
        if situation.planned_bytes > self._limits.budget_bytes:
            self._warn(
                situation,
                situation.planned_bytes,
                f"the smallest plan{self._cap()} takes "
                f"{print_bytes(situation.planned_bytes)}, and is used",
            )

    def end_step(self, *, only_over: bool = False) -> None:
        """Take the instruments off, and learn from what they saw."""
        mine = self._mine
        step = mine.step
        if step is None or (only_over and not step.is_over):
            return
        mine.step = mine.call = None
        watch, situation = step.watch, step.situation
        if watch is not None:
            watch.finish()
            mine.watch = watch
        if step.has_backward and watch is not None:
            if situation is None:
                situation = self._learn(step, watch)
            elif not step.is_other:
                self._check(step, situation, watch)
        if step.is_other:
            situation = self._known(step)
            if situation is None:
                self._unknown.add(step.place)
                mine.is_lost = True
        if situation is not None and step.has_backward:
            self._remember(step, situation)
        mine.previous = situation

    def _known(self, step: RunningStep) -> Situation | None:
        """Return the kind of a step whose calls are all made."""
        for key, situation in self._situations:
            if key == step.key and situation.is_made_of(step.calls):
                return situation
        return None

    def _learn(self, step: RunningStep, watch: LiveStep) -> Situation | None:
        """Return the kind of step that was observed."""
        cuts = {
            f"{number}.{name}" if name else str(number)
            for number, managed in enumerate(step.managed)
            for name in managed.cuts
        }
        known = self._known(step)
        if known is not None:
            return known
        torn = watch.torn(cuts)
        if torn:  # those places are no good; the next step is observed without them
            for number, managed in enumerate(step.managed):
                managed.leave_out(torn, number)
            return None
        plannable = watch.planned_calls
        if not plannable and self._tries < _TRIES:
            self._tries += 1  # somebody else's hooks were there
            return None
        fixed = step.open_calls | (set(range(len(step.calls))) - plannable)
        situation = Situation(
            tuple(step.calls),
            tuple(managed.name for managed in step.managed),
            watch.graph(cuts, fixed),
            watch.start_bytes,
            frozenset(fixed),
            watch.fixed_bytes,
        )
        situation.left_bytes = step.left_bytes
        with self._planning:
            self._situations.append((step.key, situation))
        taken_bytes = watch.peak_bytes + step.left_bytes
        if taken_bytes <= self._limits.budget_bytes:
            return situation
        self._replan(situation)  # which warns if no plan fits
        if situation.planned_bytes <= self._limits.budget_bytes:
            self._warn(
                situation,
                taken_bytes,
                f"it took {print_bytes(taken_bytes)} while it was observed with every "
                "block recomputed, and is planned for "
                f"{print_bytes(situation.planned_bytes)} from now on",
            )
        return situation

    def _check(self, step: RunningStep, situation: Situation, watch: LiveStep) -> None:
        """Compare what a planned step took with its plan and its budget."""
        taken_bytes = watch.peak_bytes + situation.left_bytes
        situation.checked(taken_bytes, step.planned_bytes)
        if taken_bytes > max(step.budget_bytes, step.planned_bytes):
            self._warn(
                situation,
                taken_bytes,
                f"with its plan it took {print_bytes(taken_bytes)}, and is planned for "
                "less from now on",
            )

    def _step_of(self, situation: Situation) -> ManagedStep:
        self._replan(situation)
        return ManagedStep(
            models=situation.names,
            budget_bytes=self._limits.budget_bytes,
            plain_bytes=situation.plain_bytes,
            planned_bytes=situation.planned_bytes,
            measured_bytes=situation.measured_bytes,
            recompute_ratio=situation.recompute_ratio,
        )

    def _cap(self) -> str:
        ratio = self._limits.max_recompute_ratio
        return "" if ratio is None else f" with max_recompute_ratio={ratio}"

    def _say_other(self, situation: Situation) -> None:
        if situation.names not in self._told:
            self._told[situation.names] = 0
            warning = BudgetWarning(
                f"a step that begins as one of {_listed(situation.names)} did goes on "
                "with other models or larger batches; its memory is not known yet. "
                "The next one is observed.",
                budget_bytes=self._limits.budget_bytes,
            )
            warnings.warn(warning, stacklevel=user_stacklevel())

    def _warn(self, situation: Situation, needed_bytes: int, what: str) -> None:
        """Warn that a step does not fit a budget: once, unless it needs more still."""
        key = (situation.names, self._limits.budget_bytes)
        if needed_bytes <= self._told.get(key, 0):
            return
        self._told[key] = needed_bytes
        limits = self._limits
        warning = BudgetWarning(
            f"a step of {_listed(situation.names)} does not fit into "
            f"{print_bytes(limits.budget_bytes)} (max_memory_mb="
            f"{limits.max_memory_mb}, memory_threshold={limits.memory_threshold}): "
            f"{what}.",
            needed_bytes=needed_bytes,
            budget_bytes=self._limits.budget_bytes,
        )
        warnings.warn(warning, stacklevel=user_stacklevel())


def _listed(names: Sequence[str]) -> str:
    """Return some of the names, and how many there are besides."""
    text = ", ".join(names[:_NAMED])
    others = len(names) - _NAMED
    return f"{text} and {others} more" if others > 0 else text
