"""The processes that train one model: their ranks, and their agreement."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from recoup.backend.compiler.recognition import eager, is_sharded
from recoup.errors import PeerError, UnsupportedError

_ALONE: AbstractContextManager[None] = nullcontext()
_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe")


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a process to the others before a step, and after a careful one.

    Attributes:
        weight: The weight of its batches.
        batches: The number of its batches; 0 at the end of its data.
        stop: Whether it was requested to stop.
        is_new: Whether batches of these shapes are new to it.
        is_empty: Whether its batches have no samples.
        failed: 0 on success, 1 if it ran out of memory, 2 if it failed otherwise.
    """

    weight: float = 0.0
    batches: int = 0
    stop: bool = False
    is_new: bool = False
    is_empty: bool = False
    failed: int = 0


class Processes:
    """The processes that train a model together, or the one that trains it alone.

    They communicate over their own group on the hosts: this costs the accelerators
    nothing and the hosts a fraction of a millisecond.

    Args:
        model: The model as it is called: plain, wrapped in
            `DistributedDataParallel`, or sharded with `fully_shard`.

    Raises:
        UnsupportedError: It is wrapped in the older `FullyShardedDataParallel`.
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_old_sharding(model)
        self._model = model
        self.is_replicated = isinstance(model, DistributedDataParallel)
        self.is_sharded = is_sharded(type(model))
        shared = self.is_replicated or self.is_sharded
        self.count = distributed.get_world_size() if shared else 1
        self.rank = distributed.get_rank() if shared else 0
        self._group: ref[Any] | None = None
        # torch fails if the first backward of a static graph does not synchronise.
        self._may_accumulate = not getattr(model, "static_graph", False)
        self.may_recover = self.count == 1 or (
            self.is_replicated
            and self._may_accumulate
            and not any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
        )

    def connect(self) -> None:
        """Connect to the others; all must call it together.

        A process must refuse to train before this: one that exits while others connect
        leaves them with an unspecific error.
        """
        if self.count > 1:
            # Torch keeps it until all groups are destroyed. A group that outlives that,
            # held by a trainer, can abort the interpreter at exit.
            self._group = ref(distributed.new_group(backend="gloo"))

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def exchange(self, report: Report) -> list[Report]:
        """Exchange reports with the others; all must call it together.

        Raises:
            PeerError: Another process is gone.
        """
        if self.count == 1:
            return [report]
        numbers = list(map(float, astuple(report)))
        mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        gathered = [torch.empty_like(mine) for _ in range(self.count)]
        with self.watching():
            distributed.all_gather(gathered, mine, group=self._connected())
        return [_as_report(each.tolist()) for each in gathered]

    def gather(self, thing: Any) -> list[Any]:
        """Return the objects of all processes to each of them."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        with self.watching():
            distributed.all_gather_object(things, thing, group=self._connected())
        return things

    def watching(self) -> AbstractContextManager[None]:
        """Raise `PeerError` if another process disappears in the block."""
        return _ALONE if self.count == 1 else _watching()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Exchange gradients in the backward of the last part only."""
        if self.is_sharded:
            model: Any = self._model
            model.set_requires_gradient_sync(last)
        return self._exchanging(last=last) if self.is_replicated else _ALONE

    @contextmanager
    def _exchanging(self, *, last: bool) -> Iterator[None]:
        waits = self._may_accumulate and not last
        with self._model.no_sync() if waits else _ALONE:  # pyright: ignore[reportCallIssue]
            yield
        self._may_accumulate = self._may_accumulate or last

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over processes that were computed without exchange.

        A parameter that no process used keeps no gradient; where only some did, the
        others count as zero.
        """
        model: Any = self._model
        has_gradient = [p.grad is not None for p in parameters]
        used = torch.tensor(has_gradient, dtype=torch.int32, device="cpu")
        distributed.all_reduce(used, group=self._connected())
        for parameter, count in zip(parameters, used.tolist(), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(self.count)
            distributed.all_reduce(parameter.grad, group=model.process_group)

    def _connected(self) -> Any:
        group = None if self._group is None else self._group()
        if group is None:
            raise PeerError(
                "expected the processes of this run to be connected, but their groups "
                "were destroyed; call destroy_process_group after the last step."
            )
        return group


@contextmanager
def _watching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _LOST_PEER):
            raise
        raise PeerError(
            "another process of this run is gone; see its last output. This process "
            "cannot continue without it."
        ) from error


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, without their prefixes in its state."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return eager(model)


def _refuse_old_sharding(model: nn.Module) -> None:
    # Checked only if the module is imported: importing it is slow.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel):
        raise UnsupportedError(
            "expected a model sharded with torch.distributed.fsdp.fully_shard, got "
            "FullyShardedDataParallel, which needs its own scaler and clipping."
        )


def _as_report(numbers: Sequence[float]) -> Report:
    weight, batches, stop, is_new, is_empty, failed = numbers
    flags = bool(stop), bool(is_new), bool(is_empty)
    return Report(weight, int(batches), *flags, int(failed))
