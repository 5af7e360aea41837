"""The position of a run in its data, and how to restore it."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from recoup.backend.state.rng import (
    AnyGenerator,
    RandomStates,
    draw_as_if_new,
    generator_states,
    generators_of,
    random_states,
    restore_generators,
    restore_random_states,
)
from recoup.errors import SnapshotError, UsageError
from recoup.train.data.batches import batch_size

_log = logging.getLogger(__name__)


class Position:
    """The epoch of a run, the number of batches it has seen, and their order.

    A shuffling loader draws its order from random generators when an epoch begins: the
    global ones, and those that are attributes of the loader, its samplers and its
    dataset, of torch, NumPy or Python. Their states are saved, so that a resumed run
    can draw the same order and skip the batches that were already seen. Between two
    epochs there is nothing to skip, but a loader's own generators have advanced by
    then, and the next order is drawn from their current states.

    A loader with `state_dict` and `load_state_dict`, such as torchdata's
    `StatefulDataLoader`, resumes an epoch by itself: its state is saved too, and no
    batch is skipped. Between two epochs it starts afresh, like other loaders.

    Attributes:
        epoch: The number of finished epochs.
        batches: The number of finished batches of this epoch.
        samples: Samples in them.
        first_epoch: The first epoch of the current call of `fit`.
    """

    def __init__(self, device: torch.device) -> None:
        self.epoch = 0
        self.batches = 0
        self.samples = 0
        self.first_epoch = 0
        self._device = device
        self._beginning: dict[str, Any] | None = None
        self._generators: Sequence[AnyGenerator] = ()
        self._left_at: list[Any] = []
        self._seen_elsewhere = 0
        self._loader: Any = None
        self._yielded = 0
        self._continuation: dict[str, Any] | None = None

    def open(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin the epoch, or continue it where it was interrupted.

        Raises:
            SnapshotError: The loader has fewer batches than were seen, or batches of
                other sizes.
        """
        _set_epoch(loader, self.epoch)
        # Before the generators of this loader replace the earlier ones.
        continuation = self._continuation or self._loader_state()
        self._continuation = None
        self._generators = generators_of(_sources(loader))
        self._loader = loader if _is_stateful(loader) else None
        if self._loader is None:
            return self._open(loader, None)
        iterator = self._open(loader, continuation)
        self._yielded = self.batches
        return self._counted(iterator)

    def _open(self, loader: Any, continuation: dict[str, Any] | None) -> Iterator[Any]:
        left_at, self._left_at = self._left_at, []
        if self._beginning is None:
            restore_generators(self._generators, left_at)
            self._beginning = {
                "random": random_states(self._device).plain(),
                "generators": generator_states(self._generators),
            }
            draw_as_if_new(loader)
            return iter(loader)
        now = random_states(self._device)
        restore_random_states(
            RandomStates.of_plain(self._beginning["random"]), self._device
        )
        restore_generators(self._generators, self._beginning["generators"])
        draw_as_if_new(loader)
        if continuation is not None and not self._seen_elsewhere:
            loader.load_state_dict(continuation["loader"])
            iterator = iter(loader)
            restore_generators(self._generators, continuation["generators"])
            restore_random_states(now, self._device)
            return iterator
        iterator = iter(loader)
        if not self.batches:
            # Most loaders draw their order with the first batch.
            return iterator
        try:
            if self._seen_elsewhere:
                self._read_over_samples(iterator)
            else:
                self._read_over_batches(iterator)
        finally:
            restore_random_states(now, self._device)
        return iterator

    def advance(self, batches: Sequence[Any]) -> None:
        """Count finished batches."""
        self.batches += len(batches)
        self.samples += sum(batch_size(batch) for batch in batches)

    def close(self) -> None:
        """End the epoch."""
        if not self.batches:
            raise UsageError(
                f"expected data to train on, got no batch: epoch {self.epoch + 1} has "
                "no batch. An iterator is exhausted after one epoch; a loader with "
                "drop_last drops its only batch."
            )
        self.epoch += 1
        self.batches = self.samples = 0
        self._beginning = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "samples": self.samples,
            "first_epoch": self.first_epoch,
            "beginning": self._beginning,
            "generators": self._between_epochs(),
            "continuation": self._continuation or self._loader_state(),
        }

    def load_state_dict(self, state: dict[str, Any], *, share: float = 1.0) -> None:
        """Restore the position of another run.

        Args:
            state: Its position.
            share: Its number of processes divided by the present one: with fewer now,
                each has seen more samples.
        """
        self.epoch = state["epoch"]
        self.first_epoch = state["first_epoch"]
        self._beginning = state["beginning"]
        # Files before version 3 lack them.
        self._generators, self._left_at = (), list(state.get("generators", ()))
        self.batches, self.samples = state["batches"], state["samples"]
        self._seen_elsewhere = 0 if share == 1.0 else int(self.samples * share)
        self._loader, self._continuation = None, state.get("continuation")

    def _between_epochs(self) -> list[Any]:
        """Return the states of the loader's own generators between two epochs."""
        if self._beginning is not None:
            return []
        return self._left_at or generator_states(self._generators)

    def _loader_state(self) -> dict[str, Any] | None:
        """Return the state of a stateful loader within an epoch.

        A failed step leaves the loader ahead of the run; then batches are skipped, as
        with other loaders.
        """
        is_between = self._beginning is None
        if self._loader is None or is_between or self._yielded != self.batches:
            return None
        try:
            state = self._loader.state_dict()
        except AttributeError:  # accelerate's loaders have the method without a state
            return None
        return {"loader": state, "generators": generator_states(self._generators)}

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._yielded += 1
            yield batch

    def _read_over_batches(self, iterator: Iterator[Any]) -> None:
        samples = 0
        for seen in range(self.batches):
            batch = next(iterator, _NOTHING)
            if batch is _NOTHING:
                raise SnapshotError(
                    f"expected a loader with the {self.batches} batches of this epoch "
                    f"that the run has seen, got one where the loader has {seen}; "
                    "resume with the same data and batch size."
                )
            samples += batch_size(batch)
        if samples != self.samples:
            raise SnapshotError(
                f"expected a loader with the same batches; the run has seen "
                f"{self.samples} samples in {self.batches} batches of this epoch, here "
                f"they have {samples}; resume with the same data and batch size."
            )

    def _read_over_samples(self, iterator: Iterator[Any]) -> None:
        """Skip whole batches that cover the samples seen by other processes."""
        wanted, self._seen_elsewhere = self._seen_elsewhere, 0
        self.batches = self.samples = 0
        while self.samples < wanted:
            batch = next(iterator, _NOTHING)
            if batch is _NOTHING:
                break
            self.advance([batch])
        if self.samples != wanted:
            _log.warning(
                "the number of processes changed within an epoch, and its batches do "
                "not divide evenly: %d samples will not be seen in this epoch",
                self.samples - wanted,
            )


def _is_stateful(loader: Any) -> bool:
    """Return whether a loader has the protocol of torchdata's `StatefulDataLoader`."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(loader, name, None)) for name in names)


def own_position(positions: Any, rank: int, count: int) -> dict[str, Any]:
    """Return the position of a process; that of the first if their number changed.

    Files of version 2 have only the position of the first process.

    Examples:
        >>> own_position([{"samples": 3}, {"samples": 4}], 1, 2)
        {'samples': 4}
        >>> own_position([{"samples": 3}, {"samples": 4}], 0, 1)
        {'samples': 3}
    """
    if isinstance(positions, dict):
        return positions
    return positions[rank if len(positions) == count else 0]


_NOTHING = object()
"""The end of an iterator."""


def make_loader(data: Any, batch_size: int | None) -> Iterable[Any]:
    """Return batches that can be iterated repeatedly.

    Args:
        data: A loader, a list of batches, or a dataset, which is shuffled unless it is
            an `IterableDataset`.
        batch_size: For a dataset.

    Raises:
        UsageError: The data can be iterated only once, is a dataset without a batch
            size, or is a loader with another one.

    Examples:
        >>> pairs = [(torch.ones(2), torch.ones(1)) for _ in range(6)]
        >>> loader = make_loader(torch.utils.data.StackDataset(*zip(*pairs)), 3)
        >>> [inputs.shape[0] for inputs, targets in loader]
        [3, 3]
    """
    if isinstance(data, Dataset) and not isinstance(data, DataLoader):
        if batch_size is None:
            raise UsageError(
                "expected batch_size with a dataset, got no batch_size; set it in the "
                "settings, or give a DataLoader."
            )
        shuffle = not isinstance(data, IterableDataset)
        return DataLoader(data, batch_size=batch_size, shuffle=shuffle)
    if isinstance(data, DataLoader) and batch_size not in (None, data.batch_size):
        raise UsageError(
            f"expected the loader's batch size, got batch_size={batch_size}, but the "
            f"loader has {data.batch_size}; leave batch_size out, or give the dataset."
        )
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        raise UsageError(
            f"expected data for several epochs, got a {type(data).__name__}, which "
            "cannot be iterated again; give a DataLoader, a dataset or a list of "
            "batches."
        )
    return data


def _samplers(loader: Any) -> list[Any]:
    found = [loader]
    for name in ("batch_sampler", "sampler"):
        found += [getattr(each, name) for each in list(found) if hasattr(each, name)]
    return found


def _sources(loader: Any) -> list[Any]:
    """Return the objects that may draw from their own generators in this process.

    These are the loader, its samplers, its nested datasets, and `collate_fn`.
    """
    found = _samplers(loader)
    for each in found:  # grows: a dataset may be part of another
        for name in ("dataset", "data_source", "collate_fn"):
            inner = getattr(each, name, None)
            if inner is not None and all(inner is not other for other in found):
                found.append(inner)
    return found


def _set_epoch(loader: Any, epoch: int) -> None:
    called: set[int] = set()
    for each in _samplers(loader):
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch) and id(each) not in called:
            called.add(id(each))
            set_epoch(epoch)
