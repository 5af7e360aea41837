"""The manager that chooses by itself what to checkpoint, within a budget."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from recoup.api.learner import Learner
from recoup.api.managed import MANAGED, Managed
from recoup.api.situations import ManagedStep
from recoup.backend.graph import current_backward, records_gradients
from recoup.backend.hooks import keywords_of_call
from recoup.core.errors import UsageError
from recoup.engine.manager import ScopeManager
from recoup.engine.node import CheckpointNode
from recoup.engine.observers import Watched, subscribe, unsubscribe
from recoup.engine.plans import plans_on
from recoup.engine.region import Region
from recoup.engine.selection import candidate_of, select

_MEBIBYTE = 1 << 20


class CheckpointManager(ScopeManager):
    """Accounts for scopes, and chooses by itself what to checkpoint if asked to.

    Scopes are registered one by one, or all that run inside `with manager:`.

    With `auto_checkpoint=True` the manager learns from the training loop as it runs.
    The first step is observed: from the first call of a model, inside `with manager:`
    or after `apply`, to the end of the backward that follows, with the loss and all
    else in between. Nothing runs twice for that. Every block is recomputed in that
    step, which is the plan with the least risk. From the second step on the fastest
    plan within `memory_threshold` of the budget is used, and the first step that runs
    with it is measured. `steps` has planned and measured bytes.

    The budget is for what a step adds to memory: activations, temporaries and the
    gradients of the models, those included that earlier steps of a sum have left. A
    step that does not fit is run with the smallest plan, and a warning, once, says how
    much it needs. A step that takes more memory than one known (a larger batch, other
    models, other training flags) is observed again. A change of the budget or of a
    switch holds from the next call on. Scopes and marks of the user's own inside a
    model stay as they are: they win over the plan.

    A context may be entered again, and on several threads. Models that a thread calls
    which is not in it run as they are. Of several managers whose contexts a thread is
    in, the innermost chooses; a model that one of them manages is left alone by the
    others.

    For a bound on all of a device's memory, checked on a real step, use `recoup.fit`.

    Args:
        max_memory_mb: The budget for what a step adds to memory, in MiB.
        auto_checkpoint: Let the manager choose.
        memory_threshold: The share of the budget to plan for, above 0 and up to 1.
        max_recompute_ratio: The most that a planned step may recompute, as a share of
            the time of forward; no operator is then recomputed twice. It comes before
            the budget. None: as much as the budget takes.

    Raises:
        UsageError: An option is out of range.

    Examples:
        >>> import torch
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        >>> model = nn.Sequential(*(layer() for _ in range(8)))
        >>> manager = CheckpointManager(max_memory_mb=4, auto_checkpoint=True)
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
        super().__init__(
            max_memory_mb=max_memory_mb,
            auto_checkpoint=auto_checkpoint,
            memory_threshold=memory_threshold,
        )
        self.max_recompute_ratio = max_recompute_ratio
        self._managed: list[Managed] = []
        self._learner = Learner(weakref.proxy(self))
        self._watching: list[RemovableHandle] = []
        self._contexts = 0
        self._depth = _Depth()
        self._inside: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._decided: weakref.WeakKeyDictionary[Watched, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._decisions: dict[str, list[bool]] = {}
        self._decider: _Decider | None = None
        self._optimizers: RemovableHandle | None = None

    @property
    def max_recompute_ratio(self) -> float | None:
        """The most that a planned step may recompute, as a share of forward's time."""
        return self._max_recompute_ratio

    @max_recompute_ratio.setter
    def max_recompute_ratio(self, ratio: float | None) -> None:
        is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if ratio is not None and not (is_number and ratio > 0):
            raise UsageError(
                f"expected a max_recompute_ratio above 0 or None, got {ratio!r}; to "
                "recompute nothing set auto_checkpoint=False."
            )
        self._max_recompute_ratio = ratio

    @property
    def budget_bytes(self) -> int:
        """What a step may add to memory: the threshold's share of the budget."""
        return int(self.max_memory_mb * _MEBIBYTE * self.memory_threshold)

    @property
    def steps(self) -> tuple[ManagedStep, ...]:
        """The kinds of steps that were observed, planned for the budget as it is."""
        return self._learner.steps

    @property
    def planned_bytes(self) -> int:
        """What a step adds to memory at its peak, of the kind that adds most."""
        return max((step.planned_bytes for step in self.steps), default=0)

    @property
    def measured_bytes(self) -> int | None:
        """The most that a step added which ran with its plan and was measured."""
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
                "apply chooses what to checkpoint in a model, and auto_checkpoint is "
                "off. Turn it on, or place CheckpointScope by hand."
            )
        known = MANAGED.get(model)
        if known is None or known.owner is not self._learner:
            self._manage(model)
        return model

    def remove(self) -> None:
        """Take everything that was chosen off the models again."""
        self._learner.forget()
        with self._lock:
            for managed in self._managed:
                managed.remove()
            for handle in self._watching:
                handle.remove()
            if self._optimizers is not None:
                self._optimizers.remove()
            self._optimizers = None
            self._managed, self._watching = [], []
            self._decisions = {}
            if self._decider is not None:
                unsubscribe(self._decider)
                self._decider = None

    def should_checkpoint(self, node: CheckpointNode) -> bool:
        """Return whether a node is one of those to recompute.

        Without `auto_checkpoint` none is. A region inside a model that the manager
        chooses for is recomputed if its plan, or the user's own scope, says so. For
        others the answer is that of `selective_checkpointing` of all living nodes.
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

        The cheapest choice is taken, evenly spread among nodes that are alike. It
        holds from the next step on for scopes of the nodes' names, registered or run
        inside `with manager:`, while `auto_checkpoint` is on: those chosen are
        recomputed, the others keep what autograd saves. Marks in them win.
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

    @property
    def nodes(self) -> list[CheckpointNode]:
        """The living regions of registered scopes and of the manager's own blocks."""
        found = super().nodes
        for node in found:
            region = node.region
            if region is not None and region in self._decided:
                node.is_checkpoint = self._decided[region]
        return found

    def began(self, region: Watched) -> None:
        """Account for a region that runs inside `with manager:`."""
        if self._learner.is_in_call:
            self._inside.add(region)
        else:
            self.decide(region)
        super().began(region)

    def decide(self, region: Watched) -> None:
        """Let a region that begins recompute or keep, as was chosen for its name."""
        choices = self._decisions.get(region.name)
        if not choices or not self.auto_checkpoint or not isinstance(region, Region):
            return
        alive = sum(1 for node in self.nodes if node.name == region.name)
        is_chosen = choices[min(alive, len(choices) - 1)]
        self._decided[region] = is_chosen
        if region.options.recompute != is_chosen and region.options.store is None:
            region.options = replace(region.options, recompute=is_chosen)

    def __enter__(self) -> Self:
        super().__enter__()
        _ENTERED.managers.append(self)
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
        _ENTERED.leave(self)
        if self not in _ENTERED.managers:
            self._depth.calls = 0
            self._learner.end_step(only_over=error is None)
        super().__exit__(kind, error, traceback)

    def _entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self not in _ENTERED.managers:
            return
        self._depth.calls += 1
        is_mine = self._depth.calls == 1 and _ENTERED.innermost() is self
        if not is_mine or not records_gradients() or current_backward() != -1:
            return
        if any(plans_on(part) for part in module.modules()):
            return
        managed = self._manage(module)
        # Its hooks come too late for the call that is under way.
        managed.applied.begin(module, args, keywords_of_call())

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del module, args, output
        if self in _ENTERED.managers:
            self._depth.calls = max(0, self._depth.calls - 1)

    def _manage(self, model: nn.Module) -> Managed:
        managed = Managed(model, self._learner)
        with self._lock:
            alive = [each for each in self._managed if each.model() is not None]
            dead = {each.key for each in self._managed} - {each.key for each in alive}
            self._managed = [*alive, managed]
            if self._optimizers is None:
                hook = _ending(self._learner)
                self._optimizers = register_optimizer_step_pre_hook(hook)
        self._learner.forget_models({key for key in dead if isinstance(key, int)})
        return managed


class _Decider:
    """Tells a manager of regions of its registered scopes, without keeping it alive."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = weakref.ref(manager)

    def began(self, region: Watched) -> None:
        """Let the manager decide about a region of one of its scopes."""
        manager = self._manager()
        if manager is not None and any(s.name == region.name for s in manager.scopes):
            manager.decide(region)

    def ended(self, region: Watched) -> None:
        """Nothing more to decide."""


class _Depth(threading.local):
    """How many modules that a thread has called have not returned."""

    def __init__(self) -> None:
        self.calls = 0


class _Entered(threading.local):
    """The managers whose contexts a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.managers: list[CheckpointManager] = []

    def leave(self, manager: CheckpointManager) -> None:
        """Leave the innermost context of a manager."""
        for number in reversed(range(len(self.managers))):
            if self.managers[number] is manager:
                del self.managers[number]
                return

    def innermost(self) -> CheckpointManager | None:
        """Return the innermost manager that chooses."""
        choosing = (each for each in reversed(self.managers) if each.auto_checkpoint)
        return next(choosing, None)


_ENTERED = _Entered()


def _ending(learner: Learner) -> Callable[..., None]:
    """Return what ends a step when an optimizer runs."""
    reference = weakref.ref(learner)

    def end(*_: object) -> None:
        found = reference()
        if found is not None:
            found.optimizer_runs()

    return end
