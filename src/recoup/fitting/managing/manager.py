"""The manager: statistics of scopes, and automatic checkpointing within a budget."""

import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from recoup.backend.autograd.module_hooks import keywords_of_call
from recoup.backend.autograd.saved_tensors import current_backward, records_gradients
from recoup.core.callers import user_stacklevel
from recoup.engine.applied.applied_plan import plans_in
from recoup.engine.recording.observers import Watched, subscribe, unsubscribe
from recoup.engine.recording.region import Region
from recoup.engine.scopes.checkpoint_node import (
    CheckpointNode,
    candidate_of,
    held_bytes,
    select,
)
from recoup.engine.scopes.scope import CheckpointScope
from recoup.engine.scopes.statistics import Accounts, StatisticsTable
from recoup.errors import BudgetWarning, UsageError
from recoup.fitting.managing.learner import Learner, Managed, managed_in
from recoup.fitting.managing.managed_steps import Limits, ManagedStep

_MEBIBYTE = 1 << 20


class CheckpointManager:
    """Collect statistics of scopes, and optionally choose what to checkpoint.

    Covers registered scopes, and all that run inside `with manager:`.

    With `auto_checkpoint=True` the manager learns from the running training loop. It
    observes the first step, from the first call of a model, inside `with manager:` or
    after `apply`, to the end of the backward that follows, including the loss and
    everything else in between. Nothing runs twice for that. In that step every block is
    recomputed, the plan with the least risk. From the second step on it uses the
    fastest plan within `memory_threshold` of the budget, and measures the first step
    with it. `steps` has planned and measured bytes.

    The budget limits the memory that a step adds: activations, temporaries and the
    gradients of the models, including accumulated ones of earlier steps. A step that
    does not fit runs with the smallest plan, and one warning names what it needs. A
    step that takes more memory than a known one (a larger batch, other models, other
    training flags) is observed again. Changed options apply from the next call on. The
    user's own scopes and marks inside a model take precedence over the plan.

    The context may be entered repeatedly, and on several threads. Models called on
    other threads run unchanged. Of nested managers on a thread the innermost chooses; a
    model that one of them manages is ignored by the others. So is, with a warning, a
    model that a manager elsewhere plans for until its `remove`. A model whose manager
    no longer exists gets the next one.

    For a bound on all of a device's memory, checked on a real step, use `recoup.fit`.

    Args:
        max_memory_mb: The budget for the memory that a step adds, in MiB.
        auto_checkpoint: Whether the manager chooses what to checkpoint.
        memory_threshold: The share of the budget to plan for, above 0 and up to 1.
        max_recompute_ratio: The most that a planned step may recompute, as a share of
            forward's time; no operator is then recomputed twice. Takes precedence over
            the budget. None: no limit.

    Raises:
        UsageError: An option is out of range.

    Examples:
        >>> import torch
        >>> x = torch.ones(256, requires_grad=True)
        >>> manager = CheckpointManager(max_memory_mb=4)
        >>> with manager, CheckpointScope("block"):
        ...     y = x.exp().sin()
        >>> manager.total_memory_bytes(), manager.scope_memory_bytes("block")
        (1024, 1024)

        >>> def layer():
        ...     return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        >>> model = nn.Sequential(*(layer() for _ in range(8)))
        >>> manager.auto_checkpoint = True
        >>> with manager:
        ...     for _ in range(2):
        ...         model.zero_grad()
        ...         model(torch.ones(512, 64)).sum().backward()
        >>> [step] = manager.steps
        >>> step.measured_bytes <= step.planned_bytes <= step.budget_bytes
        True
        >>> manager.remove()
    """

    def __init__(
        self,
        *,
        max_memory_mb: int = 1024,
        auto_checkpoint: bool = False,
        memory_threshold: float = 0.8,
        max_recompute_ratio: float | None = None,
    ) -> None:
        self.max_memory_mb = max_memory_mb
        self.auto_checkpoint = auto_checkpoint
        self.memory_threshold = memory_threshold
        self.max_recompute_ratio = max_recompute_ratio
        self._scopes: list[CheckpointScope] = []
        self._told: set[object] = set()  # models that another manager plans for
        self._accounts = Accounts()
        self._lock = threading.Lock()
        self._managed: list[Managed] = []
        self._learner = Learner(weakref.WeakMethod(self._limits))
        self._watching: list[RemovableHandle] = []
        self._contexts = 0
        self._inside: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._decided: weakref.WeakKeyDictionary[Watched, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._decisions: dict[str, list[bool]] = {}
        self._decider: _Decider | None = None
        self._optimizers: RemovableHandle | None = None

    @property
    def max_memory_mb(self) -> int:
        """The budget for the memory that a step adds, in MiB."""
        return self._max_memory_mb

    @max_memory_mb.setter
    def max_memory_mb(self, mebibytes: int) -> None:
        if not _is_number(mebibytes, int) or mebibytes < 1:
            raise UsageError(
                "expected max_memory_mb as a whole number of MiB, at least 1, got "
                f"{mebibytes!r}."
            )
        self._max_memory_mb = mebibytes

    @property
    def auto_checkpoint(self) -> bool:
        """Whether the manager chooses what to checkpoint."""
        return self._auto_checkpoint

    @auto_checkpoint.setter
    def auto_checkpoint(self, choose: bool) -> None:
        if type(choose) is not bool:
            raise UsageError(
                f"expected auto_checkpoint to be True or False, got {choose!r}."
            )
        self._auto_checkpoint = choose

    @property
    def memory_threshold(self) -> float:
        """The share of the budget to plan for."""
        return self._memory_threshold

    @memory_threshold.setter
    def memory_threshold(self, share: float) -> None:
        if not _is_number(share) or not 0 < share <= 1:
            raise UsageError(
                f"expected a memory_threshold above 0 and up to 1, got {share!r}."
            )
        self._memory_threshold = float(share)

    @property
    def max_recompute_ratio(self) -> float | None:
        """The most that a planned step may recompute, as a share of forward's time."""
        return self._max_recompute_ratio

    @max_recompute_ratio.setter
    def max_recompute_ratio(self, ratio: float | None) -> None:
        if ratio is not None and not (_is_number(ratio) and ratio > 0):
            raise UsageError(
                f"expected a max_recompute_ratio above 0 or None, got {ratio!r}; to "
                "recompute nothing set auto_checkpoint=False."
            )
        self._max_recompute_ratio = ratio

    @property
    def budget_bytes(self) -> int:
        """The bytes that a step may add: the threshold's share of the budget."""
        return int(self.max_memory_mb * _MEBIBYTE * self.memory_threshold)

    def _limits(self) -> Limits:
        """Return the current limits of plans."""
        options = f"max_memory_mb={self.max_memory_mb}, memory_threshold="
        options += str(self.memory_threshold)
        ratio = self.max_recompute_ratio
        return Limits(self.auto_checkpoint, self.budget_bytes, ratio, options)

    @property
    def scopes(self) -> tuple[CheckpointScope, ...]:
        """The registered scopes."""
        return tuple(self._scopes)

    @property
    def nodes(self) -> list[CheckpointNode]:
        """The living regions of registered scopes and of the manager's own blocks."""
        found: list[Watched | None] = [*self._accounts.regions]
        found += [node.region for scope in self._scopes for node in scope.nodes]
        regions = {id(region): region for region in found if region is not None}
        nodes = [CheckpointNode(region=region) for region in regions.values()]
        for node, region in zip(nodes, regions.values(), strict=True):
            node.is_checkpoint = self._decided.get(region, node.is_checkpoint)
        return nodes

    def register_scope(self, scope: CheckpointScope) -> None:
        """Include a scope in the statistics; a second call does nothing."""
        _require_scope(scope)
        if scope not in self._scopes:
            self._scopes.append(scope)
            scope.add_account(self._accounts.named(scope.name))

    def unregister_scope(self, scope: CheckpointScope) -> None:
        """Exclude a scope from the statistics.

        Raises:
            UsageError: It is not registered.
        """
        _require_scope(scope)
        if scope not in self._scopes:
            raise UsageError(
                f"expected a registered scope, got {scope.name!r}, which is not; call "
                "register_scope first."
            )
        self._scopes.remove(scope)
        scope.remove_account(self._accounts.named(scope.name))

    @property
    def statistics(self) -> StatisticsTable:
        """The statistics of regions by name, including freed ones; printable.

        Covers the regions of registered scopes, and all that ran inside
        `with manager:`.
        """
        for node in self.nodes:
            node.count_bytes()
        return self._accounts.table()

    def reset_statistics(self) -> None:
        """Set all counts to zero."""
        self._accounts.reset()
        for scope in self._scopes:
            scope.add_account(self._accounts.named(scope.name))

    def clear_all_checkpoints(self) -> None:
        """Free everything that the living regions hold, at once.

        A later backward through them raises `ClearedError`.
        """
        for node in self.nodes:
            node.clear_saved_activations()
        self._accounts.forget_regions()

    def scope_memory_bytes(self, name: str) -> int:
        """Return the bytes that living regions of this name hold."""
        return held_bytes(node for node in self.nodes if node.name == name)

    def total_memory_bytes(self) -> int:
        """Return the bytes that all living regions hold, shared storages once."""
        return held_bytes(self.nodes)

    @property
    def current_memory_mb(self) -> float:
        """The result of `total_memory_bytes`, in MiB."""
        return self.total_memory_bytes() / _MEBIBYTE

    @property
    def steps(self) -> tuple[ManagedStep, ...]:
        """The observed kinds of steps, planned for the current budget."""
        return self._learner.steps(self._limits())

    @property
    def planned_bytes(self) -> int:
        """The most bytes that any kind of step is predicted to add."""
        return max((step.planned_bytes for step in self.steps), default=0)

    @property
    def measured_bytes(self) -> int | None:
        """The most bytes that a measured step with a plan added."""
        found = [step.measured_bytes for step in self.steps]
        return max((n for n in found if n is not None), default=None)

    def apply(self, model: nn.Module) -> nn.Module:
        """Choose what to checkpoint in a model, from its first step on.

        Returns:
            The same model.

        Raises:
            UsageError: `auto_checkpoint` is off, or a plan is active on the model.
        """
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"expected a model, got {type(model).__name__}.")
        if not self.auto_checkpoint:
            raise UsageError(
                "expected auto_checkpoint=True for apply, which chooses what to "
                "checkpoint, got False; set it, or place CheckpointScope by hand."
            )
        if not any(each.model() is model for each in self._managed):
            self._manage(model)
        return model

    def remove(self) -> None:
        """Remove all plans from the models."""
        self._learner.forget()
        with self._lock:
            hooks = [*self._managed, *self._watching]
            hooks += [] if self._optimizers is None else [self._optimizers]
            for hook in hooks:
                hook.remove()
            self._managed, self._watching, self._optimizers = [], [], None
            self._decisions = {}
            if self._decider is not None:
                unsubscribe(self._decider)
                self._decider = None

    def should_checkpoint(self, node: CheckpointNode) -> bool:
        """Return whether a node should be recomputed.

        Without `auto_checkpoint` none should. For a region inside a managed model its
        plan, or the user's own scope, decides; for others `selective_checkpointing` of
        all living nodes.
        """
        if not isinstance(node, CheckpointNode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"expected a CheckpointNode, got {type(node).__name__}.")
        if not self.auto_checkpoint:
            return False
        region = node.region
        if isinstance(region, Region) and region in self._inside:
            return region.options.recompute
        if region is not None and region in self._decided:
            return self._decided[region]
        nodes = [known for known in self.nodes if known.region not in self._inside]
        places = [known.region for known in nodes]
        if region is None or region not in places:
            nodes, places = [*nodes, node], [*places, region]
        candidates = [candidate_of(known) for known in nodes]
        return places.index(region) in select(candidates, self.budget_bytes)

    def selective_checkpointing(self, nodes: Sequence[CheckpointNode]) -> None:
        """Choose which of the nodes to recompute, so that the rest fits the budget.

        Takes the cheapest choice, evenly spaced among equal nodes. While
        `auto_checkpoint` is on, it applies from the next step on to scopes of the
        nodes' names, registered or run inside `with manager:`: chosen ones are
        recomputed, the others keep all that autograd saves. Marks take precedence.
        """
        chosen: list[int] = []
        if self.auto_checkpoint:
            chosen = select([candidate_of(node) for node in nodes], self.budget_bytes)
        self._decisions = {}
        for number, node in enumerate(nodes):
            node.is_checkpoint = number in chosen
            if node.region is not None:
                self._decided[node.region] = node.is_checkpoint
            if self.auto_checkpoint:
                self._decisions.setdefault(node.name, []).append(node.is_checkpoint)
        if self._decider is None and self._scopes:
            self._decider = _Decider(self)
            subscribe(self._decider)

    def decide(self, region: Watched) -> None:
        """Make a new region recompute or keep, as was chosen for its name."""
        choices = self._decisions.get(region.name)
        if not choices or not self.auto_checkpoint or not isinstance(region, Region):
            return
        alive = sum(1 for node in self.nodes if node.name == region.name)
        is_chosen = choices[min(alive, len(choices) - 1)]
        self._decided[region] = is_chosen
        if region.options.recompute != is_chosen and region.options.store is None:
            region.options = replace(region.options, recompute=is_chosen)

    def began(self, region: Watched) -> None:
        """Track a region that runs inside `with manager:`."""
        if self._learner.is_in_call:
            self._inside.add(region)
        else:
            self.decide(region)
        self._accounts.follow(region)

    def ended(self, region: Watched) -> None:
        """Do nothing: statistics are collected on request."""

    def __enter__(self) -> Self:
        subscribe(self)
        _THREAD.managers.append(self)
        with self._lock:
            self._contexts += 1
            if self.auto_checkpoint and not self._watching:
                self._watching = [
                    register_module_forward_pre_hook(self._entered),
                    register_module_forward_hook(self._left, always_call=True),
                ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._contexts -= 1
            if not self._contexts:
                for handle in self._watching:
                    handle.remove()
                self._watching = []
        managers = _THREAD.managers
        if self in managers:  # false if another thread entered it
            del managers[-1 - managers[::-1].index(self)]
        if self not in managers:
            _THREAD.depths.pop(self, None)
            self._learner.end_step(only_over=error is None)
        unsubscribe(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: options, scopes and counts.

        Regions belong to a step, and models to the original manager.
        """
        options = {
            name: getattr(self, name) for name in signature(type(self)).parameters
        }
        return {"options": options, "scopes": self._scopes, "accounts": self._accounts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["options"])
        self._accounts = state["accounts"]
        for scope in state["scopes"]:
            self.register_scope(scope)

    def _entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self not in _THREAD.managers:
            return
        depth = _THREAD.depths[self] = _THREAD.depths.get(self, 0) + 1
        choosing = [each for each in _THREAD.managers if each.auto_checkpoint]
        is_mine = depth == 1 and choosing and choosing[-1] is self
        if not is_mine or not records_gradients() or current_backward() != -1:
            return
        if plans_in(module):
            self._take_over(module)
            return
        managed = self._manage(module)
        # Its hooks are too late for the running call.
        managed.applied.begin(module, args, keywords_of_call())

    def _take_over(self, model: nn.Module) -> None:
        """Plan for a model, or for parts of it, whose managers are gone.

        Their hooks stay: it is too late to replace them in the running call.

        Warns:
            BudgetWarning: Another manager, outside of this one, plans for the model.
        """
        around = [manager._learner for manager in _THREAD.managers]  # noqa: SLF001
        for part, managed in managed_in(model):
            learner = managed.owner()
            if learner is None:
                managed.move(part, self._learner)
                self._add(managed)
            elif learner not in around and managed.key not in self._told:
                self._told.add(managed.key)
                warning = BudgetWarning(
                    f"expected a {type(part).__name__} without a plan inside "
                    "`with manager:`, got one that another CheckpointManager plans "
                    "for: that one's budget applies to it, not this one's. Call "
                    "`remove` of the other manager first."
                )
                warnings.warn(warning, stacklevel=user_stacklevel())

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del module, args, output
        if self in _THREAD.managers:
            _THREAD.depths[self] = max(0, _THREAD.depths.get(self, 0) - 1)

    def _manage(self, model: nn.Module) -> Managed:
        managed = Managed(model, self._learner)
        self._add(managed)
        return managed

    def _add(self, managed: Managed) -> None:
        with self._lock:
            alive = [each for each in self._managed if each.model() is not None]
            dead = {each.key for each in self._managed} - {each.key for each in alive}
            self._managed = [*alive, managed]
            if self._optimizers is None:
                self._optimizers = register_optimizer_step_pre_hook(
                    _calling(weakref.WeakMethod(self._learner.optimizer_runs))
                )
        self._learner.forget_models({key for key in dead if isinstance(key, int)})


class _Decider:
    """Passes regions of registered scopes to a manager, without keeping it alive."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = weakref.ref(manager)

    def began(self, region: Watched) -> None:
        """Make the manager decide about a region of one of its scopes."""
        manager = self._manager()
        if manager is not None and any(s.name == region.name for s in manager.scopes):
            manager.decide(region)

    def ended(self, region: Watched) -> None:
        """Do nothing."""


class _Managers(threading.local):
    """The manager contexts that a thread is in.

    Attributes:
        managers: The managers, innermost last.
        depths: The number of open module calls under each.
    """

    def __init__(self) -> None:
        self.managers: list[CheckpointManager] = []
        self.depths: dict[CheckpointManager, int] = {}


_THREAD = _Managers()


def _calling(method: "weakref.WeakMethod[Any]") -> Any:
    """Return a hook that calls a method of an object, unless that died."""

    def call(*_: object) -> None:
        found = method()
        if found is not None:
            found()

    return call


def _is_number(value: object, kind: type[int | float] = float) -> bool:
    is_kind = isinstance(value, (int, kind))
    return is_kind and not isinstance(value, bool)


def _require_scope(scope: object) -> None:
    if not isinstance(scope, CheckpointScope):
        raise TypeError(f"expected a CheckpointScope, got {type(scope).__name__}.")
