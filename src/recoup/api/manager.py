"""The manager that chooses by itself what to checkpoint, within a budget."""

import threading
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from recoup.api.choosing import peak_bytes, plan_together, way_beside, way_within
from recoup.api.contexts import CONTEXTS, Depth
from recoup.api.managed import Managed, managed_for, managed_in, measured
from recoup.api.open_calls import OpenCalls
from recoup.backend.compiled import leave_uncompiled
from recoup.backend.hooks import keywords_of_call
from recoup.core.errors import UsageError
from recoup.core.units import print_bytes
from recoup.engine.manager import ScopeManager
from recoup.engine.node import CheckpointNode, held_bytes

_MEBIBYTE = 1 << 20

_NAMED = 4
"""A warning names so many models."""


class CheckpointManager(ScopeManager):
    """Accounts for scopes, and chooses by itself what to checkpoint if asked to.

    Scopes are registered one by one, or all that run inside `with manager:`.

    With `auto_checkpoint=True` the first forward of a model, inside `with manager:` or
    after `apply`, is measured, and a plan is put in force: of all that a step has in
    memory beside what was there before it (activations, gradients), as much is
    recomputed as it takes to stay within `memory_threshold` of the budget. Scopes and
    marks inside the model stay as they are. If no plan fits, the smallest is taken,
    with a warning that names the budget it needs.

    Where a step calls several models one after the other, they share the budget: while
    one runs, those before it hold what their backward needs. In the first such step
    each is planned for what those before it leave, which may be too little; from the
    second on all are planned together. A change of the budget holds from the next call
    on.

    A context may be entered again, and on several threads. Models that a thread calls
    which is not in it run as they are. Of several managers whose contexts a thread is
    in, the innermost chooses; a model that one of them has chosen for is left alone by
    the others.

    For a bound on all of a device's memory, checked on a real step, use `recoup.fit`.

    Args:
        max_memory_mb: The budget for what a step adds to memory, in MiB.
        auto_checkpoint: Let the manager choose.
        memory_threshold: The share of the budget to plan for, above 0 and up to 1.

    Raises:
        UsageError: An option is out of range.

    Examples:
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        >>> model = nn.Sequential(*(layer() for _ in range(8)))
        >>> manager = CheckpointManager(max_memory_mb=4, auto_checkpoint=True)
        >>> with manager:
        ...     model(torch.ones(512, 64)).sum().backward()
        >>> manager.planned_bytes < 0.8 * 4 * 2**20
        True
        >>> manager.remove()
    """

    def __init__(
        self,
        *,
        max_memory_mb: int = 1024,
        auto_checkpoint: bool = False,
        memory_threshold: float = 0.8,
    ) -> None:
        super().__init__(
            max_memory_mb=max_memory_mb,
            auto_checkpoint=auto_checkpoint,
            memory_threshold=memory_threshold,
        )
        self._planned_bytes = 0
        self._planned_for = 0
        self._is_stale = False
        self._managed: list[Managed] = []
        self._calls = OpenCalls()
        self._planning = threading.RLock()
        self._waiting: list[RemovableHandle] = []
        self._watching: list[RemovableHandle] = []
        self._contexts = 0
        self._depth = Depth()

    @property
    def budget_bytes(self) -> int:
        """What a step may add to memory: the threshold's share of the budget."""
        return int(self.max_memory_mb * _MEBIBYTE * self.memory_threshold)

    @property
    def planned_bytes(self) -> int:
        """What a step adds to memory, at its peak, with all that was planned."""
        return self._planned_bytes

    def apply(self, model: nn.Module) -> nn.Module:
        """Choose what to checkpoint in a model, when it is first called.

        Returns:
            The same model.

        Raises:
            UsageError: `auto_checkpoint` is off.
        """
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"this takes a model: got {type(model).__name__}.")
        if not self.auto_checkpoint:
            raise UsageError(
                "apply chooses what to checkpoint in a model, and auto_checkpoint is "
                "off. Turn it on, or place CheckpointScope by hand."
            )

        @leave_uncompiled
        def first(
            model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            if self._knows(model):
                handle.remove()
            elif self._may_choose(model):
                managed = self._choose(model, args, kwargs)
                handle.remove()
                # Its hooks come too late for the call that is under way.
                managed.begin(model, args, kwargs)

        handle = model.register_forward_pre_hook(first, with_kwargs=True, prepend=True)
        self._waiting.append(handle)
        return model

    def remove(self) -> None:
        """Take everything that was chosen off the models again."""
        with self._planning, self._lock:
            for managed in self._managed:
                managed.remove()
            for handle in (*self._waiting, *self._watching):
                handle.remove()
            self._managed, self._waiting, self._watching = [], [], []
            self._calls = OpenCalls()

    def should_checkpoint(self, node: CheckpointNode) -> bool:
        """Return whether a node is one of those to recompute.

        Without `auto_checkpoint` none is. With it, those are chosen among the living
        nodes that the manager knows and this one; see `selective_checkpointing`.
        """
        if not isinstance(node, CheckpointNode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"this takes a CheckpointNode: got {type(node).__name__}.")
        if not self.auto_checkpoint:
            return False
        region = node.region
        nodes = [
            node if region is not None and known.region is region else known
            for known in self.nodes
        ]
        # In its place if it has one: which of equally large ones are chosen depends
        # on their places.
        return node in self._chosen(nodes if node in nodes else [*nodes, node])

    def selective_checkpointing(self, nodes: Sequence[CheckpointNode]) -> None:
        """Mark as many of the nodes as it takes to stay within the budget.

        The fewest are marked: the largest, and among equally large ones those that
        are evenly spread.
        """
        chosen = self._chosen(nodes) if self.auto_checkpoint else []
        for node in nodes:
            node.is_checkpoint = node in chosen

    def called(self, managed: Managed) -> None:
        """Take note of a call of a planned model, and plan anew where that is due."""
        # Whoever is planning now, on another thread, will see the next call.
        if CONTEXTS.measuring or not self._planning.acquire(blocking=False):
            return
        try:
            is_begun = self._calls.is_step_begun()
            is_new = self._calls.begin(managed)
            self._is_stale |= is_new and len(self._calls.now) > 1
            is_changed = self._planned_for != self.budget_bytes
            is_due = is_changed or (self._is_stale and is_begun)
            if is_due:
                self._plan_anew(is_changed=is_changed)
            if is_due or is_new:
                self._planned_bytes = peak_bytes(self._calls.rows)
        finally:
            self._planning.release()

    def returned(self, managed: Managed, output: object) -> None:
        """Take note of what a planned model returned."""
        self._calls.end(managed, output)

    def __enter__(self) -> Self:
        super().__enter__()
        CONTEXTS.entered.append(self)
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
        CONTEXTS.leave(self)
        if self not in CONTEXTS.entered:
            self._depth.calls = 0
        super().__exit__(kind, error, traceback)

    def _entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if CONTEXTS.measuring or self not in CONTEXTS.entered:
            return
        self._depth.calls += 1
        is_mine = self._depth.calls == 1 and CONTEXTS.innermost() is self
        if not is_mine or self._knows(module) or not self._may_choose(module):
            return
        kwargs = keywords_of_call()
        managed = self._choose(module, args, kwargs)
        # Its hooks come too late for the call that is under way.
        managed.begin(module, args, kwargs)

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del module, args, output
        if not CONTEXTS.measuring and self in CONTEXTS.entered:
            self._depth.calls = max(0, self._depth.calls - 1)

    def _knows(self, model: nn.Module) -> bool:
        managed = managed_for(model)
        return managed is not None and managed.owner is self

    def _may_choose(self, model: nn.Module) -> bool:
        """Return whether this is a step, and no other manager chose for the model."""
        if CONTEXTS.measuring or not torch.is_grad_enabled():
            return False
        return all(found.owner in (self, None) for found in managed_in(model))

    def _chosen(self, nodes: Sequence[CheckpointNode]) -> list[CheckpointNode]:
        sizes = [held_bytes([node]) for node in nodes]
        return [nodes[number] for number in chosen(sizes, self.budget_bytes)]

    def _choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Managed:
        """Measure a step of the model on these arguments, and put a plan in force."""
        with self._planning:
            CONTEXTS.measuring = True
            try:
                graph = measured(model, args, kwargs)
            finally:
                CONTEXTS.measuring = False
            self._forget_the_dead()
            if not self._managed:
                self._planned_for = self.budget_bytes
            held_bytes = sum(each.way.held_bytes for each in self._calls.now)
            way = way_within(graph, self.budget_bytes - held_bytes)
            self._check([type(model).__name__], way.added_bytes)
            if held_bytes and held_bytes + way.added_bytes > self.budget_bytes:
                way = way_beside(graph, way)
            managed = Managed(
                model,
                graph,
                way,
                budget_bytes=self.budget_bytes,
                is_alone=not held_bytes,
                owner=self,
            )
            self._managed.append(managed)
            return managed

    def _plan_anew(self, *, is_changed: bool) -> None:
        """Plan for the budget as it is now, and for all that runs together."""
        self._forget_the_dead()
        budget_bytes = self.budget_bytes
        self._planned_for, self._is_stale = budget_bytes, False
        for managed in self._managed:
            if is_changed or not managed.is_alone:
                way = way_within(managed.measured, budget_bytes)
                managed.run_so(way, managed.measured, budget_bytes=budget_bytes)
                if is_changed:
                    self._check([managed.model_name], way.added_bytes)
        rows = [row for row in self._calls.rows if len(row) > 1]
        if peak_bytes(rows) > budget_bytes:
            plan_together(rows, budget_bytes)
            largest = max(rows, key=lambda row: peak_bytes([row]))
            names = [managed.model_name for managed in dict.fromkeys(largest)]
            self._check(names, peak_bytes([largest]))

    def _forget_the_dead(self) -> None:
        dead = [managed for managed in self._managed if not managed.is_alive]
        for managed in dead:
            self._managed.remove(managed)
            self._calls.forget(managed)

    def _check(self, names: Sequence[str], needed_bytes: int) -> None:
        """Warn if the smallest plan for what a step calls is too large."""
        if needed_bytes <= self.budget_bytes:
            return
        which = f"this {names[0]}" if len(names) == 1 else f"{_listed(names)} together"
        warnings.warn(
            f"a step of {which} does not fit into {print_bytes(self.budget_bytes)} "
            f"(max_memory_mb={self.max_memory_mb}, "
            f"memory_threshold={self.memory_threshold}): the smallest plan takes "
            f"{print_bytes(needed_bytes)}, and is used.",
            stacklevel=2,
        )


def _listed(names: Sequence[str]) -> str:
    """Return some of the names, and how many there are besides."""
    text = ", ".join(names[:_NAMED])
    others = len(names) - _NAMED
    return f"{text} and {others} more" if others > 0 else text


def chosen(sizes: Sequence[int], budget_bytes: int) -> list[int]:
    """Return the fewest numbers whose removal brings the sum within a budget.

    The largest go first; among equally large ones those that are evenly spread.

    Examples:
        >>> chosen([4, 4, 4, 4, 4, 4], 16)
        [1, 4]
        >>> chosen([1, 9, 1, 5], 8)
        [1]
    """
    excess = sum(sizes) - budget_bytes
    order = sorted(sizes, reverse=True)
    count = 0
    while excess > 0 and count < len(order):
        excess -= order[count]
        count += 1
    if not count:
        return []
    least = order[count - 1]
    found = [number for number, size in enumerate(sizes) if size > least]
    equal = [number for number, size in enumerate(sizes) if size == least]
    needed = count - len(found)
    found += [equal[len(equal) * (2 * i + 1) // (2 * needed)] for i in range(needed)]
    return sorted(found)
