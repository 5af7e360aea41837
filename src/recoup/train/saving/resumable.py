"""Exact resume for any training loop: position in the data, state, one file."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from recoup.errors import SnapshotError
from recoup.train.compatibility import as_schedulers, check_parts, joined_schedulers
from recoup.train.data.position import Position
from recoup.train.processes import Processes
from recoup.train.saving.run_state import RunState
from recoup.train.saving.snapshot import check_folder, read_snapshot

_VERSION = "resumable 1"
_NEEDED = frozenset({"processes", "position", "model", "optimizer", "random", "kinds"})


class ResumableRun:
    """Makes your own training loop resume bitwise where it was saved.

    A file has the model, the optimizer, schedule and scaler, all random generators, and
    the position in the data: the epoch, the number of its batches that were taken, and
    the states of the generators from which its order was drawn. A resumed run draws the
    same order and skips the batches that were taken.

    Under several processes all must call `save` and `load` together.

    Args:
        model: The model; it may be wrapped in `DistributedDataParallel` or sharded with
            `fully_shard`.
        optimizer: The optimizer, or several as a list.
        scheduler: A schedule whose state is saved too, or several as a list.
        scaler: A scaler of gradients whose state is saved too.

    Examples:
        >>> import tempfile, torch
        >>> model = nn.Linear(1, 1)
        >>> run = ResumableRun(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for batch in run.batches([torch.ones(1), torch.zeros(1)]):
        ...         run.save(f"{folder}/run")
        ...         break
        ...     run.load(f"{folder}/run")
        >>> list(run.batches([torch.ones(1), torch.zeros(1)]))
        [tensor([0.])]
        >>> run.epoch
        1
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: Any = None,
        scaler: GradScaler | None = None,
    ) -> None:
        joint = check_parts(model, optimizer, ())
        schedules = joined_schedulers(as_schedulers(scheduler))
        parts = {"scheduler": schedules, "scaler": scaler}
        processes = Processes(model)
        self._position = Position(next(iter(model.parameters())).device)
        self._state = RunState(model, joint, parts, self._position, processes)
        processes.connect()

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return self._position.epoch

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, or its remaining ones after `load`.

        A batch counts as taken when it is yielded: save after the optimizer's step.

        Raises:
            SnapshotError: The loader has fewer batches than were taken, or batches of
                other sizes.
            UsageError: The loader has no batch.
        """
        for batch in self._position.open(loader):
            self._position.advance([batch])
            yield batch
        self._position.close()

    def save(self, path: str | Path) -> None:
        """Write everything needed to resume from here to a file, atomically.

        Gradients are not saved: call it between two steps of the optimizer.

        Raises:
            SnapshotError: A state is not plain data, or the file cannot be written.
            PeerError: Another process is gone.
            UsageError: The folder does not exist.
        """
        check_folder(path)
        self._state.save(path, {"version": _VERSION})

    def load(self, path: str | Path) -> None:
        """Restore the state in a file. Nothing in it is executed.

        Raises:
            SnapshotError: The file is damaged, or from another model or optimizer.
        """
        state = read_snapshot(path)
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise SnapshotError(
                f"expected a file that ResumableRun.save wrote, got {path}; read a "
                "snapshot of recoup.Trainer with its own load."
            )
        self._state.load(path, state, _NEEDED)
