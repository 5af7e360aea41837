"""The manager that chooses by itself what to checkpoint, within a budget."""

import threading
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from recoup.api.adaptation import Adapted
from recoup.backend.compiled import leave_uncompiled
from recoup.backend.hooks import keywords_of_call
from recoup.backend.trees import map_leaves, tensors
from recoup.core.errors import InfeasibleError, UsageError
from recoup.core.plan import plan_for
from recoup.core.segments import Action
from recoup.core.units import print_bytes
from recoup.engine.manager import ScopeManager
from recoup.engine.node import CheckpointNode, held_bytes
from recoup.measure.floor import measure_floor
from recoup.measure.training import TrainingStep, untouched
from recoup.planners.plan import floor, plan

_MEBIBYTE = 1 << 20
_KEEP = frozenset({Action.KEEP})


class CheckpointManager(ScopeManager):
    """Accounts for scopes, and chooses by itself what to checkpoint if asked to.

    Scopes are registered one by one, or all that run inside `with manager:`.

    With `auto_checkpoint=True` the first forward of a model, inside `with manager:` or
    after `apply`, is measured, and a plan is put in force: of all that a step has in
    memory beside what was there before it (activations, gradients), as much is
    recomputed as it takes to stay within `memory_threshold` of the budget. Scopes and
    marks inside the model stay as they are. If no plan fits, the smallest is taken,
    with a warning that names the budget it needs.

    Models that other threads call inside `with manager:` run as they are.

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
        self.planned_bytes = 0
        self._adapted: list[Adapted] = []
        self._waiting: list[RemovableHandle] = []
        self._watching: list[RemovableHandle] = []
        self._managed: list[nn.Module] = []
        self._depth = 0
        self._busy = False
        self._thread = 0

    @property
    def budget_bytes(self) -> int:
        """What a step may add to memory: the threshold's share of the budget."""
        return int(self.max_memory_mb * _MEBIBYTE * self.memory_threshold)

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
            elif not self._busy and torch.is_grad_enabled():
                adapted = self._choose(model, args, kwargs)
                handle.remove()
                # Its hooks come too late for the call that is under way.
                adapted.begin(model, args, kwargs)

        handle = model.register_forward_pre_hook(first, with_kwargs=True, prepend=True)
        self._waiting.append(handle)
        return model

    def remove(self) -> None:
        """Take everything that was chosen off the models again."""
        for adapted in self._adapted:
            adapted.remove()
        for handle in (*self._waiting, *self._watching):
            handle.remove()
        self._adapted, self._waiting, self._watching, self._managed = [], [], [], []

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

    def __enter__(self) -> Self:
        super().__enter__()
        if self.auto_checkpoint:
            self._thread = threading.get_ident()
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
        for handle in self._watching:
            handle.remove()
        self._watching = []
        self._depth = 0
        super().__exit__(kind, error, traceback)

    def _entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        chooses = self._depth == 1 and not self._busy and torch.is_grad_enabled()
        if not chooses or self._knows(module):
            return
        kwargs = keywords_of_call()
        adapted = self._choose(module, args, kwargs)
        # Its hooks come too late for the call that is under way.
        adapted.begin(module, args, kwargs)

    def _knows(self, model: nn.Module) -> bool:
        return any(model is other for other in self._managed)

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del module, args, output
        if threading.get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)

    def _chosen(self, nodes: Sequence[CheckpointNode]) -> list[CheckpointNode]:
        sizes = [held_bytes([node]) for node in nodes]
        return [nodes[number] for number in chosen(sizes, self.budget_bytes)]

    def _choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Adapted:
        """Measure a step of the model on these arguments, and put a plan in force."""
        self._busy = True
        depth = self._depth
        try:
            described = _step(model, args, kwargs)
            with torch.enable_grad(), untouched(described) as repeated:
                graph = measure_floor(repeated)
        finally:
            self._busy = False
            self._depth = depth
        before = min(graph.other_bytes)
        try:
            solution = plan(graph, before + self.budget_bytes, allow=_KEEP)
        except InfeasibleError:
            solution = floor(graph, allow=_KEEP)
            needed = solution.simulation.peak_bytes - before
            warnings.warn(
                f"a step of this {type(model).__name__} does not fit into "
                f"{print_bytes(self.budget_bytes)} (max_memory_mb="
                f"{self.max_memory_mb}, memory_threshold={self.memory_threshold}): the "
                f"smallest plan takes {print_bytes(needed)}, and is used.",
                stacklevel=2,
            )
        self.planned_bytes = solution.simulation.peak_bytes - before
        made = plan_for(
            graph, solution.segments, budget_bytes=before + self.budget_bytes
        )
        adapted = Adapted(model, graph, made, _KEEP, verify="first")
        self._adapted.append(adapted)
        self._managed.append(model)
        return adapted


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


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TrainingStep:
    # Cut off from what computed them: backward would go on there, and free its graph.
    args, kwargs = map_leaves(_cut_off, (args, kwargs))
    given = tensors((args, kwargs))

    def run() -> None:
        output = model(*args, **kwargs)
        floats = [t for t in tensors(output) if t.requires_grad]
        if floats:
            torch.autograd.backward(floats, [torch.ones_like(t) for t in floats])

    found = [*model.parameters(), *given]
    device = found[0].device if found else torch.device("cpu")
    return TrainingStep(model, run, given, device)


def _cut_off(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
