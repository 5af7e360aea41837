"""Advice: where a checkpoint saves most memory for the least recomputation."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recoup.backend.autograd.saved_tensors import is_parameter
from recoup.backend.memory.ledger import StorageLedger
from recoup.core.display import table
from recoup.core.restoring import restoring
from recoup.core.units import print_bytes
from recoup.engine.recording.observers import Watched, subscribe, unsubscribe
from recoup.engine.scopes.module import checkpoint_module, uncheckpoint_module
from recoup.errors import UsageError


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The effect of a checkpoint around one module on one step.

    Parameters are always in memory and are not counted.

    Attributes:
        name: The module's path in the model.
        plain_bytes: The activations that autograd keeps without a checkpoint.
        kept_bytes: The activations and random states that are kept with one.
        replay_flops: The FLOPs to recompute it in backward.
    """

    name: str
    plain_bytes: int
    kept_bytes: int
    replay_flops: int

    @property
    def saved_bytes(self) -> int:
        """The bytes that this checkpoint alone saves."""
        return self.plain_bytes - self.kept_bytes


@dataclass(frozen=True, slots=True)
class Advice:
    """Places for checkpoints, sorted by bytes saved per recomputed FLOP.

    Prints as a table.
    """

    suggestions: tuple[Suggestion, ...]

    def __str__(self) -> str:
        rows = [
            (s.name, print_bytes(s.saved_bytes), f"{s.replay_flops / 1e6:.1f} MFLOP")
            for s in self.suggestions
        ]
        return table(("module", "saves", "recomputes"), rows, ruled=False)


def suggest(model: nn.Module, *args: Any, **kwargs: Any) -> Advice:
    """Measure where checkpoints in a model are worth most.

    Runs one forward on the given batch with a region around every block (each member
    of an outermost `ModuleList` or `Sequential`; else each child), and replays each
    region once. The model, its gradients and the graph are unchanged; its buffers and
    the random state advance as in any forward.

    Args:
        model: The model, in training mode if it is trained so.
        *args: The model's positional arguments.
        **kwargs: The model's keyword arguments.

    Returns:
        The blocks that save anything, best first.

    Raises:
        UsageError: `model` is no module, or autograd saves nothing in its blocks.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        >>> advice = suggest(model, torch.ones(32, 8))
        >>> [suggestion.name for suggestion in advice.suggestions]
        []
        >>> blocks = nn.Sequential(model, nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        >>> [s.name for s in suggest(blocks, torch.ones(32, 8)).suggestions]
        ['0', '1']
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model, got {type(model).__name__}.")
    watcher, blocks = _Watcher(), blocks_of(model)

    def take_off() -> None:
        for block in blocks.values():
            uncheckpoint_module(block)

    with restoring(take_off), restoring(partial(unsubscribe, watcher)):
        for name, block in blocks.items():
            checkpoint_module(block, name=name, verify="off")
        subscribe(watcher)
        outputs = model(*args, **kwargs)
    if not watcher.found:
        raise UsageError(
            "expected a model that saves tensors for backward, got none in any block; "
            "enable gradients, and give parameters or inputs that require them."
        )
    suggestions = [watcher.measure(region) for region in watcher.found]
    del outputs
    worth = [s for s in suggestions if s.saved_bytes > 0]
    worth.sort(key=lambda s: s.saved_bytes / (s.replay_flops + 1), reverse=True)
    return Advice(tuple(worth))


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks by path: members of containers, else its children."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name == n or name.startswith(f"{n}.") for n in found)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not inside:
            prefix = f"{name}." if name else ""
            found |= {f"{prefix}{n}": m for n, m in module.named_children()}
    return found or dict(model.named_children())


class _Watcher:
    """Counts the bytes that autograd would have saved in each region."""

    def __init__(self) -> None:
        self.found: list[Watched] = []
        self._plain: dict[int, StorageLedger] = {}

    def began(self, region: Watched) -> None:
        ledger = self._plain[id(region)] = StorageLedger()

        def listen(tensor: Tensor) -> None:
            if not is_parameter(tensor):
                ledger.add_all(tensor)

        region.listeners = (*region.listeners, listen)

    def ended(self, region: Watched) -> None:
        self.found.append(region)

    def measure(self, region: Watched) -> Suggestion:
        held = StorageLedger()
        for hold in region.holds():
            if hold.tensor is not None and not hold.is_parameter:
                held.add_all(hold.tensor)
        with FlopCounterMode(display=False) as counter:
            region.recompute()
        return Suggestion(
            name=region.name,
            plain_bytes=self._plain[id(region)].total_bytes,
            kept_bytes=held.total_bytes + region.random_bytes(),
            replay_flops=counter.get_total_flops(),
        )
