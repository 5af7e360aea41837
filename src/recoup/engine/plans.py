"""Plans carried out: forward hooks begin and end the regions that a plan names."""

import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from recoup.backend.compiled import is_compiled
from recoup.backend.graph import Pack, Unpack, ambient_hooks, records_gradients
from recoup.core.errors import PlanError, UnsupportedError
from recoup.core.plan import Held, Place, Plan, Span
from recoup.core.segments import Action
from recoup.engine.active import Yielding, begin, end, is_innermost, is_open
from recoup.engine.policies import Policy
from recoup.engine.region import Options, Region
from recoup.engine.tiers.host import Host
from recoup.engine.tiers.protocol import Tier
from recoup.engine.verification import Verify

Choose = Callable[[tuple[Any, ...], dict[str, Any]], Plan | None]
"""Returns the plan for a call of the model with these arguments; None: keep all."""

_SERIAL = itertools.count()
_HOST = Host()


class HeldBySpan:
    """The policy of one region that runs by a plan.

    A value is told by its operator and by how many of that operator's values came
    before it in the region, which other sizes of the batch do not change. Where a
    region makes more of them than when it was measured, as when its graph depends on
    the data, the others go by their kind: they are held if most of the known are.

    Args:
        held: For each operator, which of its values are held, and how.
        made: For each of these operators, how many values are known.

    Examples:
        >>> policy = HeldBySpan({"aten.mm.default": {1: Action.KEEP}}, {})
        >>> [policy.keeps("aten.mm.default", 64) for _ in range(3)]
        [False, True, False]
        >>> held = {"aten.mm.default": {0: Action.KEEP, 1: Action.KEEP}}
        >>> policy = HeldBySpan(held, {"aten.mm.default": 3})
        >>> [policy.keeps("aten.mm.default", 64) for _ in range(5)]
        [True, True, False, True, True]
    """

    def __init__(
        self, held: Mapping[str, Mapping[int, Action]], made: Mapping[str, int]
    ) -> None:
        self._held = held
        self._made = made
        self._seen: dict[str, int] = {}

    def keeps(self, operator: str, nbytes: int) -> bool | Tier:
        """Return whether the plan holds this value, or the tier that does."""
        del nbytes
        held = self._held.get(operator)
        if held is None:
            return False
        nth = self._seen.get(operator, 0)
        self._seen[operator] = nth + 1
        known = self._made.get(operator)
        if known is not None and nth >= known and 2 * len(held) > known:
            return True
        action = held.get(nth)
        return _HOST if action is Action.OFFLOAD else action is Action.KEEP


def table_of(held: Iterable[Held]) -> dict[str, dict[int, Action]]:
    """Return held values by operator and number."""
    table: dict[str, dict[int, Action]] = {}
    for value in held:
        table.setdefault(value.operator, {})[value.nth] = value.action
    return table


class _Stretch:
    """A span with what is worked out once: its policy's table, its key, its depth."""

    def __init__(self, span: Span, parent: "_Stretch | None", serial: int) -> None:
        self.span = span
        self.parent = parent
        self.table = table_of(span.held)
        self.made = dict(span.made)
        self.name = f"{span.start.label} .. {span.stop.label}"
        self.key = ("plan", serial, self.name)


class Script:
    """A plan made ready: what begins and what ends at each place."""

    def __init__(self, plan: Plan) -> None:
        self.starts: dict[Place, list[_Stretch]] = {}
        self._serial = next(_SERIAL)
        self._collect(plan.spans, None)

    def places(self) -> set[Place]:
        """Return every place that matters."""
        stops = {s.span.stop for started in self.starts.values() for s in started}
        return stops | set(self.starts)

    def _collect(self, spans: tuple[Span, ...], parent: _Stretch | None) -> None:
        for span in spans:
            stretch = _Stretch(span, parent, self._serial)
            self.starts.setdefault(span.start, []).append(stretch)
            self._collect(span.inner, stretch)


@dataclass(frozen=True)
class Cuts:
    """Instead of a plan: one region after the other, cut wherever a module is reached.

    Everything is recomputed but what the policy keeps. It serves to measure a model of
    which nothing is known yet.

    Attributes:
        modules: The paths of the modules at whose beginning and end is cut.
        policy: Which outputs to keep.
    """

    modules: tuple[str, ...]
    policy: Policy | None = None


class _CuttingRun:
    """One forward of a model that is cut everywhere."""

    def __init__(self, cuts: Cuts) -> None:
        self._options = Options(policy=cuts.policy, verify="off")
        self._open: object = None
        self._hooks = ambient_hooks()

    def reach(self, module: str, *, entering: bool) -> None:
        """End one region and begin the next."""
        del module, entering
        if _are_foreign(self._hooks):
            return
        if self._open is not None and is_open(self._open):
            if not is_innermost(self._open):
                return
            end(self._open)
        self._open = Yielding()
        begin(self._open, "a measured block", self._options, "cut")

    def close(self) -> None:
        """End the last region."""
        if self._open is not None:
            end(self._open)


class _Run:
    """One forward of a model that has a plan: what is open, what was called."""

    def __init__(self, script: Script, verify: Verify) -> None:
        self._script = script
        self._verify: Verify = verify
        self._open: list[tuple[_Stretch, object]] = []
        self._calls: dict[tuple[str, bool], int] = {}
        self._hooks = ambient_hooks()

    def reach(self, module: str, *, entering: bool) -> None:
        """End and begin what ends and begins here.

        Not where the model's own code has put hooks since, as torch's checkpointing
        does: what is inside these is theirs.
        """
        call = self._calls.get((module, entering), 0)
        self._calls[module, entering] = call + 1
        if _are_foreign(self._hooks):
            return
        place = Place(module, call, entering)
        self._forget_ended()
        if any(stretch.span.stop == place for stretch, _ in self._open):
            self._end_down_to(place)
        for stretch in self._script.starts.get(place, ()):
            self._start(stretch)

    def close(self) -> None:
        """End everything."""
        while self._open:
            end(self._open.pop()[1])

    def _end_down_to(self, place: Place) -> None:
        """End the outermost stretch that ends here, and all inside it.

        One that the user has put a scope into, which is still open, goes on instead.
        """
        last = [stretch.span.stop == place for stretch, _ in self._open].index(True)
        while len(self._open) > last and is_innermost(self._open[-1][1]):
            end(self._open.pop()[1])

    def _forget_ended(self) -> None:
        """Let go of stretches that were ended with the scope they were begun in."""
        self._open = [item for item in self._open if is_open(item[1])]

    def _start(self, stretch: _Stretch) -> None:
        around = self._open[-1][0] if self._open else None
        if around is not stretch.parent:
            return  # the one before it or around it did not end or begin as planned
        policy = HeldBySpan(stretch.table, stretch.made) if stretch.table else None
        owner = Yielding()
        options = Options(policy=policy, verify=self._verify)
        begin(owner, stretch.name, options, stretch.key)
        self._open.append((stretch, owner))


def _are_foreign(before: tuple[Pack, Unpack] | None) -> bool:
    """Return whether the hooks in force are neither a region's nor those of before."""
    hooks = ambient_hooks()
    if hooks is None or (before is not None and hooks[0] is before[0]):
        return False
    pack = hooks[0]
    ours = isinstance(getattr(pack, "__self__", None), Region)
    return not ours and not getattr(pack, "is_noting", False)


class _Runs(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Applied, _Run | _CuttingRun | None]] = []


class Applied:
    """A plan in force on a model, until `remove`.

    The model stays the same object with the same parameters and the same `state_dict`.

    Args:
        model: The model.
        plan: The plan, or a function that chooses one for the arguments of each call,
            or cuts.
        modules: With a function: the paths of all modules that its plans may name.
        verify: As for `CheckpointScope`.

    Raises:
        PlanError: The plan names a module that the model does not have.
        UnsupportedError: The model is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | Choose | Cuts,
        *,
        modules: Iterable[str] = (),
        verify: Verify = "first",
    ) -> None:
        if is_compiled(model):
            raise UnsupportedError(
                f"a plan cannot be applied to this {type(model).__name__}: it has "
                "compiled parts, whose operators cannot be seen. Apply the plan to the "
                "model before torch.compile, or use checkpoint_module on its blocks."
            )
        if isinstance(plan, Plan) and plan.model not in ("", digest_of(model)):
            raise PlanError(
                f"this plan was made for another model than this "
                f"{type(model).__name__}: its modules or the shapes of its parameters "
                "differ. Make it anew with recoup.fit."
            )
        self._plan = plan
        self._verify: Verify = verify
        self._scripts: dict[int, tuple[Plan, Script]] = {}
        names = set(modules)
        if isinstance(plan, Plan):
            names |= {place.module for place in Script(plan).places()}
        elif isinstance(plan, Cuts):
            names |= set(plan.modules)
        found = {name: _submodule(model, name) for name in names - {""}}
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        ]
        for name, module in found.items():
            self._handles += [
                module.register_forward_pre_hook(
                    functools.partial(_reach, self, name, True)
                ),
                module.register_forward_hook(
                    functools.partial(_reach, self, name, False)
                ),
            ]
        self._handles.append(model.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        """Take the plan off the model, which is then as it was before."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Run | _CuttingRun | None:
        if not records_gradients():
            return None
        plan = self._plan
        if isinstance(plan, Cuts):
            return _CuttingRun(plan)
        if not isinstance(plan, Plan):
            plan = plan(args, kwargs)
        if plan is None or not plan.spans:
            return None
        known = self._scripts.get(id(plan))
        if known is None:
            known = self._scripts[id(plan)] = (plan, Script(plan))
        return _Run(known[1], self._verify)

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        del model
        self.begin(args, kwargs)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note that the model is called with these arguments."""
        run = self._run(args, kwargs)
        _RUNS.stack.append((self, run))
        if run is not None:
            run.reach("", entering=True)

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del model, args, output
        if not _RUNS.stack or _RUNS.stack[-1][0] is not self:
            return
        _, run = _RUNS.stack.pop()
        if run is not None:
            run.close()

    def reach(self, name: str, *, entering: bool) -> None:
        """Take note that a module is entered or left."""
        if _RUNS.stack:
            applied, run = _RUNS.stack[-1]
            if applied is self and run is not None:
                run.reach(name, entering=entering)


_RUNS = _Runs()


def digest_of(model: nn.Module) -> str:
    """Return a text that is equal for models of the same modules and parameters.

    Examples:
        >>> digest_of(nn.Linear(2, 2)) == digest_of(nn.Linear(2, 2))
        True
        >>> digest_of(nn.Linear(2, 2)) == digest_of(nn.Linear(2, 3))
        False
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name}:{type(module).__name__};".encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype};".encode())
    return digest.hexdigest()[:16]


def apply_plan(model: nn.Module, plan: Plan, *, verify: Verify = "first") -> Applied:
    """Put a plan in force on a model, without measuring.

    Args:
        model: The model that the plan was made for.
        plan: The plan, for example read with `Plan.from_json`.
        verify: As for `CheckpointScope`.

    Returns:
        What takes it off again: call its `remove`.

    Raises:
        PlanError: The plan was made for another model.

    Examples:
        >>> import torch
        >>> from recoup.core.plan import Span
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> whole = Span(Place("", 0, True), Place("", 0, False))
        >>> applied = apply_plan(model, Plan((whole,)))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> applied.remove()
    """
    return Applied(model, plan, verify=verify)


def _reach(applied: Applied, name: str, entering: bool, *_: Any) -> None:  # noqa: FBT001
    applied.reach(name, entering=entering)


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise PlanError(
            f"the plan names the module {name!r}, which this {type(model).__name__} "
            "does not have. Apply it to the model it was made for, or make it anew "
            "with recoup.fit."
        ) from error
