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
    """Which epoch a run is in, how many batches it has seen, and in which order.

    The order of a shuffling loader is drawn from random generators when an epoch
    begins: the global ones, and those that the loader, its samplers and its dataset
    have as attributes, torch's, NumPy's or Python's. Their states are kept, so that the
    order can be drawn again: resuming means drawing it again and reading over the
    batches that were seen already. Between two epochs there is nothing to read over,
    but a loader's own generators have moved on by then, and the next order is drawn
    from where they are.

    A loader with `state_dict` and `load_state_dict`, such as torchdata's
    `StatefulDataLoader`, continues an epoch by itself: its state is kept too, and no
    batch is read over. Between two epochs it begins anew, as other loaders do.

    Attributes:
        epoch: Epochs that are finished.
        batches: Batches of this epoch that are finished.
        samples: Samples in them.
        first_epoch: The epoch that the current run of `fit` began with.
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
        """Begin the epoch, or go on with it where it was left.

        Raises:
            SnapshotError: The loader has fewer batches than were seen, or of other
                sizes.
        """
        _tell_epoch(loader, self.epoch)
        # Before the generators of this loader take the place of the earlier ones.
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
            # Most loaders draw their order when the first batch is asked for.
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
        """Count batches that are finished."""
        self.batches += len(batches)
        self.samples += sum(batch_size(batch) for batch in batches)

    def close(self) -> None:
        """End the epoch."""
        if not self.batches:
            raise UsageError(
                f"there is nothing to train on: epoch {self.epoch + 1} has no batch. "
                "Data that can be gone through only once is at its end; so is a loader "
                "that drops a last batch which is its first."
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
        """Stand where another run stood.

        Args:
            state: Its position.
            share: How many processes there were for each one now: with fewer now,
                each has gone through more samples.
        """
        self.epoch = state["epoch"]
        self.first_epoch = state["first_epoch"]
        self._beginning = state["beginning"]
        # Files of before version 3 do not have them.
        self._generators, self._left_at = (), list(state.get("generators", ()))
        self.batches, self.samples = state["batches"], state["samples"]
        self._seen_elsewhere = 0 if share == 1.0 else int(self.samples * share)
        self._loader, self._continuation = None, state.get("continuation")

    def _between_epochs(self) -> list[Any]:
        """Return where the loader's own generators stand, if no epoch is begun."""
        if self._beginning is not None:
            return []
        return self._left_at or generator_states(self._generators)

    def _loader_state(self) -> dict[str, Any] | None:
        """Return the state of a loader that has one, in the middle of an epoch.

        A step that failed leaves the loader ahead of the run; then batches are read
        over, as with other loaders.
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
                    f"the run has seen {self.batches} batches of this epoch, the "
                    f"loader has {seen}. Resume with the same data and batch size."
                )
            samples += batch_size(batch)
        if samples != self.samples:
            raise SnapshotError(
                f"the run has seen {self.samples} samples in {self.batches} batches of "
                f"this epoch, here they have {samples}. Resume with the same data and "
                "batch size."
            )

    def _read_over_samples(self, iterator: Iterator[Any]) -> None:
        """Read over what other processes than these have seen, whole batches of it."""
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
    """Return where a process stood; the first, if there were more or fewer than now.

    Args:
        positions: Those of all processes; in files of version 2 the first one's.
        rank: Which process asks.
        count: How many there are now.

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
"""Stands for the end of an iterator."""


def make_loader(data: Any, batch_size: int | None) -> Iterable[Any]:
    """Return batches to iterate over, any number of times.

    Args:
        data: A loader, a list of batches, or a dataset, which is shuffled unless it
            is one to iterate over.
        batch_size: For a dataset.

    Raises:
        UsageError: The data can be gone through only once, or is a dataset and has
            no batch size, or is a loader and has another.

    Examples:
        >>> pairs = [(torch.ones(2), torch.ones(1)) for _ in range(6)]
        >>> loader = make_loader(torch.utils.data.StackDataset(*zip(*pairs)), 3)
        >>> [inputs.shape[0] for inputs, targets in loader]
        [3, 3]
    """
    if isinstance(data, Dataset) and not isinstance(data, DataLoader):
        if batch_size is None:
            raise UsageError(
                "a dataset was given, and no batch_size. Set it in the settings, or "
                "give a DataLoader."
            )
        shuffle = not isinstance(data, IterableDataset)
        return DataLoader(data, batch_size=batch_size, shuffle=shuffle)
    if isinstance(data, DataLoader) and batch_size not in (None, data.batch_size):
        raise UsageError(
            f"batch_size={batch_size} was set, the loader has {data.batch_size}. Leave "
            "batch_size out, or give the dataset."
        )
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        raise UsageError(
            f"fit goes through the data once per epoch: a {type(data).__name__} cannot "
            "be gone through again. Give a DataLoader, a dataset or a list of batches."
        )
    return data


def _samplers(loader: Any) -> list[Any]:
    found = [loader]
    for name in ("batch_sampler", "sampler"):
        found += [getattr(each, name) for each in list(found) if hasattr(each, name)]
    return found


def _sources(loader: Any) -> list[Any]:
    """Return what may draw from generators of its own in this process.

    The loader, its samplers, the dataset and those inside it, and what puts batches
    together.
    """
    found = _samplers(loader)
    for each in found:  # which grows: a dataset may be a part of another
        for name in ("dataset", "data_source", "collate_fn"):
            inner = getattr(each, name, None)
            if inner is not None and all(inner is not other for other in found):
                found.append(inner)
    return found


def _tell_epoch(loader: Any, epoch: int) -> None:
    called: set[int] = set()
    for each in _samplers(loader):
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch) and id(each) not in called:
            called.add(id(each))
            set_epoch(epoch)
