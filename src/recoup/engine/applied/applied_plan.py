"""Applied plans: forward hooks begin and end the regions of a plan."""

import functools
import hashlib
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import nn

from recoup.backend.autograd.module_hooks import forward_pre_hooks
from recoup.backend.autograd.saved_tensors import is_in_backward, records_gradients
from recoup.backend.compiler.recognition import (
    is_compiled,
    is_sharded,
    leave_uncompiled,
)
from recoup.backend.state.trees import tensors
from recoup.core.plan import Place, Plan
from recoup.engine.applied.planned_runs import (
    Cuts,
    CuttingRun,
    DueInterval,
    Episode,
    Run,
    Script,
    SegmentedRun,
    Segments,
)
from recoup.engine.applied.repeated_blocks import RepeatedForward
from recoup.engine.verification.replay_check import Verify
from recoup.errors import PlanError, UnsupportedError, UsageError


class Watch(Protocol):
    """Observes one call of a model."""

    def begin(self) -> None:
        """Start observing, before the first region of the call."""
        ...

    def end(self, output: object, order: Sequence[Place] | None) -> None:
        """Stop observing, after the last region.

        Args:
            output: The result of the call; None after an exception.
            order: The places of the plan in the order reached; None without a plan.
        """
        ...

    def cancel(self) -> None:
        """Stop observing after an interrupt."""
        ...


@runtime_checkable
class BlockWatch(Watch, Protocol):
    """Observes one call of a model, including blocks that no plan names."""

    def reach(self, block: str, *, entering: bool) -> None:
        """Handle that the call enters or leaves such a block."""
        ...


Choice = tuple[Plan | Cuts | None, Watch | None]
Choose = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Choice]
"""Function from a model call's arguments to a plan or cuts (None: keep all) and an
observer of the call."""

_AnyRun = Run | CuttingRun | SegmentedRun


class _Runs(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Applied, _AnyRun | None, Watch | None, nn.Module]] = []
        self.episodes: WeakKeyDictionary[Applied, Episode] = WeakKeyDictionary()


class Applied:
    """A plan applied to a model, until `remove`.

    The model stays the same object with the same parameters and the same `state_dict`.

    Args:
        model: The model.
        plan: The plan, or a function that chooses one for the arguments of each call,
            or cuts, or segments.
        verify: As for `CheckpointScope`; segments have separate options.
        flag: The name of a model attribute that tells whether the plan is active.
        roots: The paths of the modules that are called from outside: by default the
            model itself; None: any module.
        unplanned: The paths of modules that no plan names, for `BlockWatch`.
        outside: Callback with a module's path, when a third of the modules that plans
            name were called with gradients outside of any root's call, so that no plan
            applies: for example, when a part of the model is called directly.

    Raises:
        PlanError: The plan names a module that the model does not have.
        UnsupportedError: The model is compiled.
        UsageError: A plan is active on it, or on a part of it.
    """

    def __init__(  # noqa: PLR0913 (which calls it is for, and who watches them)
        self,
        model: nn.Module,
        plan: Plan | Choose | Cuts | Segments,
        *,
        verify: Verify = "first",
        flag: str | None = None,
        roots: Iterable[str] | None = ("",),
        unplanned: Iterable[str] = (),
        outside: Callable[[str], None] | None = None,
    ) -> None:
        if is_compiled(model):
            raise UnsupportedError(
                f"a plan cannot be applied to this {type(model).__name__}: it has "
                "compiled parts, whose operators cannot be seen. Apply the plan to the "
                'model before torch.compile, use fit(..., compile="inductor"), which '
                "compiles the blocks itself, or checkpoint_module on its blocks."
            )
        _refuse_two_plans(model)
        if isinstance(plan, Plan) and plan.model not in ("", digest_of(model)):
            raise PlanError(
                f"expected a plan for this {type(model).__name__}, got one for a model "
                "with other modules, or parameters of other shapes or types; make a "
                "new plan with recoup.fit."
            )
        self._plan = plan
        self._was_sharded = any(is_sharded(type(module)) for module in model.modules())
        self._verify: Verify = verify
        self._flag = flag
        self._scripts: dict[int, tuple[Plan, Script]] = {}
        self._modules: set[str] = set()
        self._order: PassOrder | None = None
        if isinstance(plan, Plan):
            for part in plan.parts:
                self._modules |= _modules_of(Script(part))
            roots = plan.all_roots
            self._order = PassOrder(plan) if plan.passes else None
        elif isinstance(plan, Cuts | Segments):
            self._modules = set(plan.modules) - {""}
        self._unplanned = tuple(unplanned)
        self._outside = outside
        self._entered: set[str] = set()
        self._handles: list[Any] = []
        self._forwards: list[RepeatedForward] = []
        self._roots = None if roots is None else tuple(sorted(set(roots)))
        self._named: list[tuple[nn.Module, str]] = []
        self._whole: nn.Module | None = None
        self.put_on(model)

    def put_on(self, model: nn.Module) -> None:
        """Apply the plan to the model, again after `remove`."""
        found = _submodules(model, self._modules)
        names = self._roots
        if names is None:
            names = tuple(name for name, _ in model.named_modules())
        roots = [(_submodule(model, name), name) for name in names]
        refuse_scripted([*((name, root) for root, name in roots), *found.items()])
        # A plan keeps the model alive only if parts of it are roots.
        self._named = [item for item in roots if item[1]]
        self._whole = model if self._named else None
        self._handles = []
        add = self._handles.append
        try:
            for root, _ in roots:
                lead = functools.partial(root.register_forward_pre_hook, prepend=True)
                add(lead(self._begin, with_kwargs=True))
            self._follow(found, _reach)
            unplanned = _submodules(model, self._unplanned)
            self._follow(unplanned, _reach_unplanned)
            for root, _ in roots:
                add(root.register_forward_hook(self._end, always_call=True))
            for forward in self._forwards:
                forward.put_on()
        except BaseException:
            self.remove()
            raise

    def _name_of(self, root: nn.Module) -> str:
        return next((name for known, name in self._named if known is root), "")

    def _follow(
        self, modules: Mapping[str, nn.Module], reach: Callable[..., None]
    ) -> None:
        """Call a function when modules are entered and left."""
        add = self._handles.append
        for name, module in modules.items():
            hook = functools.partial(functools.partial, reach, self, name)
            add(module.register_forward_pre_hook(hook(True)))
            add(module.register_forward_hook(hook(False)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without hooks of modules that died."""
        living = [handle for handle in self._handles if handle.hooks_dict_ref()]
        return {**vars(self), "_handles": living}

    @property
    def chooser(self) -> object:
        """The object that chooses the plan of each call; None: the plan is fixed."""
        return getattr(self._plan, "__self__", None)

    def remove(self) -> None:
        """Remove the plan from the model, restoring the model."""
        self._close_interrupted()
        for forward in self._forwards:
            forward.remove()
        # The first ones last: by these `plans_in` finds a plan that is half removed.
        for handle in reversed(self._handles):
            handle.remove()
        self._handles = []
        self._named = []
        self._whole = None

    def due_call(self, block: str) -> DueInterval | None:
        """Return the block call that is about to start, if backward repeats it."""
        applied, run, _, _ = _RUNS.stack[-1] if _RUNS.stack else (None,) * 4
        return run.due_call(block) if applied is self and isinstance(run, Run) else None

    def _run(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_AnyRun | None, Watch | None]:
        if not records_gradients():
            return None, None
        plan = self._plan
        if isinstance(plan, Cuts):
            return CuttingRun(plan), None
        if isinstance(plan, Segments):
            return SegmentedRun(plan), None
        watch: Watch | None = None
        if not isinstance(plan, Plan):
            plan, watch = plan(model, args, kwargs)
        elif self._order is not None:
            name = self._name_of(model)
            plan = plan.passes[self._order.pass_of(name, shapes_of((args, kwargs)))]
        if isinstance(plan, Cuts):
            self._follow_missing(model, set(plan.modules) - {""})
            return CuttingRun(plan), watch
        if plan is None or not plan.spans:
            return None, watch
        known = self._scripts.get(id(plan))
        if known is None:
            known = (plan, Script(plan))
            self._follow_missing(model, _modules_of(known[1]))
            self._repeat_missing(model, known[1].repeated)
            self._scripts[id(plan)] = known
        run = Run(known[1], self._verify, self._episode(plan.model_calls))
        return run, watch

    def _follow_missing(self, model: nn.Module, names: set[str]) -> None:
        """Put hooks on the modules that only this plan names.

        Hooks on all modules would cost as much as half of a ResNet's forward.
        """
        with _FOLLOWING:
            missing = names - self._modules
            whole = model if self._whole is None else self._whole
            found = _submodules(whole, missing)
            refuse_scripted(found.items())
            self._follow(found, _reach)
            self._modules |= missing

    def _repeat_missing(self, model: nn.Module, names: set[str]) -> None:
        """Install a `RepeatedForward` on the blocks that a plan repeats."""
        with _FOLLOWING:
            missing = names - {forward.name for forward in self._forwards}
            whole = model if self._whole is None else self._whole
            for name, block in _submodules(whole, missing).items():
                self._forwards.append(RepeatedForward(block, name, self))
                self._forwards[-1].put_on()

    def _episode(self, model_calls: int) -> Episode | None:
        """Return the episode of this call, or None if the plan is for one call."""
        if model_calls == 1:
            return None
        episode = _RUNS.episodes.get(self)
        if episode is None or not episode.takes(model_calls):
            episode = _RUNS.episodes[self] = Episode(model_calls)
            episode.takes(model_calls)
        return episode

    @leave_uncompiled
    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_inside(model):
            self.reach(self._name_of(model), entering=True, is_root=True)
        elif self._roots is None and self._name_of(model) and is_in_backward():
            return  # recomputed by torch's own checkpointing
        elif self._flag is None or model.__dict__.get(self._flag, False):
            self.begin(model, args, kwargs)
        else:
            self._close_interrupted()
            _RUNS.stack.append((self, None, None, model))

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin a run of the plan for a call of the model."""
        if not self._was_sharded:
            refuse_sharded([type(model)])
        self._close_interrupted()
        run, watch = self._run(model, args, kwargs)
        _RUNS.stack.append((self, run, watch, model))
        if watch is not None:
            watch.begin()
        if run is not None:
            run.reach(self._name_of(model), entering=True)

    def _is_inside(self, model: nn.Module) -> bool:
        """Return whether a root is called inside the call of another root."""
        if self._roots == ("",) or not _RUNS.stack:
            return False
        applied, _, _, root = _RUNS.stack[-1]
        return applied is self and root is not model

    @leave_uncompiled
    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del args
        if self._is_inside(model):
            self.reach(self._name_of(model), entering=False, is_root=True)
            return
        if not _RUNS.stack or _RUNS.stack[-1][0] is not self:
            return
        entry = _RUNS.stack[-1]
        _, run, watch, _ = entry
        try:
            if run is not None:
                run.close()
            if watch is not None:
                watch.end(output, run.order if isinstance(run, Run) else None)
            _RUNS.stack.remove(entry)
        except Exception:  # not after an interrupt: the next call closes the entry
            _RUNS.stack.remove(entry)
            raise

    def _close_interrupted(self) -> None:
        """Close what an interrupted call left open on this thread.

        After an exception torch calls the forward hooks, but not after an interrupt. (A
        model that calls itself runs without regions from then on, which is correct.)
        """
        if not _RUNS.stack:
            return
        mine = [item for item in _RUNS.stack if item[0] is self]
        for entry in reversed(mine):
            _, run, watch, _ = entry
            if run is not None:
                run.close()
            if watch is not None:
                watch.cancel()
            _RUNS.stack.remove(entry)

    def reach(self, name: str, *, entering: bool, is_root: bool = False) -> None:
        """Begin and end the regions at the entry or exit of a module."""
        if is_root and (self._roots is None or name in self._modules):
            return  # handled by its hooks as an inner module, if any
        if _RUNS.stack:
            applied, run, _, root = _RUNS.stack[-1]
            if (
                applied is self
                and run is not None
                and (is_root or not name or self._name_of(root) != name)
            ):
                run.reach(name, entering=entering)
        elif entering and self._outside is not None:
            self._enter_outside(name)

    def _enter_outside(self, name: str) -> None:
        """Count a module call outside of any root's call."""
        if not records_gradients() or is_in_backward() or self._outside is None:
            return
        self._entered.add(name)
        if _OUTSIDE * len(self._entered) >= len(self._modules):
            self._entered.clear()
            self._outside(name)

    def reach_unplanned(self, name: str, *, entering: bool) -> None:
        """Notify the observer that a module without a plan is entered or left."""
        applied, _, watch, _ = _RUNS.stack[-1] if _RUNS.stack else (None,) * 4
        if applied is self and isinstance(watch, BlockWatch):
            watch.reach(name, entering=entering)


_RUNS = _Runs()

_OUTSIDE = 3
"""If one in this many modules is called outside of a root, a part of the model is
called directly, and not just an embedding or head that a loss also uses."""

_FOLLOWING = threading.Lock()
"""Held while hooks are added during training. Global, because locks cannot be copied
with a model."""


def digest_of(model: nn.Module, *, is_unsharded: bool = False) -> str:
    """Return a hash of a model's module types and parameter shapes and dtypes.

    Args:
        model: The model.
        is_unsharded: Whether to give the hash that it had before `fully_shard`.

    Examples:
        >>> digest_of(nn.Linear(2, 2)) == digest_of(nn.Linear(2, 2))
        True
        >>> digest_of(nn.Linear(2, 2)) == digest_of(nn.Linear(2, 3))
        False
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        kind = type(module)
        if is_unsharded and is_sharded(kind):
            kind = kind.__mro__[2]  # after fully_shard's own class and FSDPModule
        digest.update(f"{name}:{kind.__name__};".encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype};".encode())
    return digest.hexdigest()[:16]


@leave_uncompiled
def _reach(applied: Applied, name: str, entering: bool, *_: Any) -> None:  # noqa: FBT001
    applied.reach(name, entering=entering)


@leave_uncompiled
def _reach_unplanned(applied: Applied, name: str, entering: bool, *_: Any) -> None:  # noqa: FBT001
    applied.reach_unplanned(name, entering=entering)


def refuse_scripted(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise `UnsupportedError` if one of the modules cannot have hooks."""
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            part = f"its part {name!r}" if name else "it"
            raise UnsupportedError(
                f"expected a model whose modules run hooks, got one of torch.jit "
                f"({part} is scripted); use the model before torch.jit.script or "
                "torch.jit.trace."
            )


def plans_on(module: nn.Module) -> list[Applied]:
    """Return the plans and segments on a module itself.

    Found through the hooks, which copies of a module share.
    """
    owners = [getattr(hook, "__self__", None) for hook in forward_pre_hooks(module)]
    return [owner for owner in owners if isinstance(owner, Applied)]


def plans_in(model: nn.Module) -> list[Applied]:
    """Return the plans and segments on a model and its submodules."""
    return [applied for module in model.modules() for applied in plans_on(module)]


def remove_plans(model: nn.Module, but: Collection[Applied] = ()) -> None:
    """Remove the plans on a model, but for some, even if an interrupt arrives."""
    try:
        _remove_plans(model, but)
    finally:  # what an interrupt has cut short
        _remove_plans(model, but)


def _remove_plans(model: nn.Module, but: Collection[Applied]) -> None:
    for applied in plans_in(model):
        if applied not in but:
            applied.remove()


def refuse_sharded(kinds: Iterable[type[nn.Module]]) -> None:
    """Raise `UsageError` if a module was sharded since its plan was applied."""
    for kind in kinds:
        if is_sharded(kind):
            raise UsageError(
                f"expected a {kind.__bases__[-1].__name__} as it was when its plan was "
                "applied, got one that was sharded since: remove the plan (`remove`), "
                "call fully_shard first, then recoup.fit."
            )


def _refuse_two_plans(model: nn.Module) -> None:
    """Raise if a plan is active on the model or a submodule."""
    for name, module in model.named_modules():
        if plans_on(module):
            part = f"the part {name!r} of it" if name else "it"
            raise UsageError(
                f"expected a {type(model).__name__} without a plan or segments, got "
                f"one that has them on {part} already; call `remove` of the result "
                "of recoup.fit, recoup.apply_plan or the manager first. For segments, "
                "or a copy of a model with a plan, call "
                f"recoup.uncheckpoint_module({'that part' if name else 'the model'})."
            )


def shapes_of(arguments: object) -> tuple[torch.Size, ...]:
    """Return the shapes of the tensors in arguments."""
    return tuple(tensor.shape for tensor in tensors(arguments))


def _modules_of(script: Script) -> set[str]:
    """Return the paths of the modules that a plan names, without the model's own."""
    return {place.module for place in script.places()} - {""}


def _submodules(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    return {name: _submodule(model, name) for name in sorted(names)}


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise PlanError(
            f"expected a model with the module {name!r} of the plan, got a "
            f"{type(model).__name__} without it; apply the plan to the model it was "
            "made for, or make a new plan with recoup.fit."
        ) from error


class PassOrder:
    """Assigns the calls of a step with several passes to the passes.

    Calls are expected in the order of the measured step. An unexpected one is matched
    by its module and arguments. A wrong answer costs memory, but gradients stay right.

    Attributes:
        expected: The module that was expected instead, or None.

    Examples:
        >>> first, second = Plan(roots=("g", "d")), Plan(roots=("d",))
        >>> order = PassOrder(Plan(passes=(first, second), order=(0, 1)))
        >>> [order.pass_of(root) for root in ("g", "d", "d", "g", "d", "g")]
        [0, 0, 1, 0, 0, 0]
    """

    def __init__(self, plan: Plan) -> None:
        order = plan.order or (0,)
        self._calls = [
            (number, root, not place)
            for number in order
            for place, root in enumerate(plan.parts[number].roots)
        ]
        self._keys: list[Hashable] = [None] * len(self._calls)
        self._next = 0
        self.expected: str | None = None

    def pass_of(self, root: str, key: Hashable = None) -> int:
        """Return the pass of the next call.

        Args:
            root: The path of the called module.
            key: A key that distinguishes its calls, such as its argument shapes.
        """
        count = len(self._calls)
        ahead = [(self._next + shift) % count for shift in range(count)]
        same = [n for n in ahead if self._calls[n][1] == root]
        wanted = self._calls[ahead[0]][1]
        self.expected = None if wanted == root else wanted
        unknown = [n for n in same if self._keys[n] is None]
        alike = [n for n in same if self._keys[n] == key]
        if ahead[0] in alike or (unknown and ahead[0] == unknown[0]):
            place = ahead[0]
        else:
            candidates = alike or same or ahead
            firsts = [n for n in candidates if self._calls[n][2]]
            place = (firsts or candidates)[0]
        if self._keys[place] is None:
            self._keys[place] = key
        self._next = (place + 1) % count
        return self._calls[place][0]
