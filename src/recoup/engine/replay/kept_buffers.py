"""Kept buffers: those of modules as a call found them, for the call that repeats it."""

import weakref
from collections.abc import Hashable, Iterator, MutableMapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from recoup.backend.memory.storages import (
    has_storage,
    storage_address,
    version_of,
    writes_hidden,
)
from recoup.backend.state.snapshots import BufferSlot, buffer_slots, put_in_place
from recoup.core.restoring import restoring
from recoup.engine.recording.region import STATE_BYTES
from recoup.errors import ChangedTensorError, MismatchError

_STEADY: MutableMapping[Tensor, set[Hashable]] = WeakIdKeyDictionary()
"""Large buffers, each with the calls by which it was not written to."""

_COPIES: MutableMapping[Tensor, tuple[int, weakref.ref[Tensor]]] = WeakIdKeyDictionary()
"""Large buffers, each with a version and a weak reference to a copy of it."""


class KeptBuffers:
    """The buffers of modules as they were when a call began.

    Small ones are copied: kernels such as those of batch normalization change running
    statistics without a new version. Large ones are copied too until the first
    backward finds them as they were. From then on their versions are compared instead.

    Args:
        modules: The modules.
        key: Identifies the call.
        small_bytes: How large a buffer is at most that counts as small.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        key: Hashable,
        *,
        small_bytes: int = STATE_BYTES,
    ) -> None:
        self._modules = modules
        # What is written to in training may be steady in evaluation.
        self._key = (key, tuple(module.training for module in modules))
        self._slots = buffer_slots(modules)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._versions: list[tuple[str, Tensor, int]] = []
        for name, buffer in _named(self._slots):
            if buffer.nbytes <= small_bytes:
                self._copies.append((buffer, buffer.detach().clone()))
                continue
            self._versions.append((name, buffer, version_of(buffer)))
            if not self._is_steady(buffer):
                self._copies.append((buffer, _shared_copy(buffer)))
        copied = (buffer for buffer, _ in self._copies)
        self._addresses = {storage_address(b) for b in copied if has_storage(b)}

    @contextmanager
    def as_before(self, caller: str) -> Iterator[None]:
        """Run the block with buffers as they were, then put them back as they are.

        Args:
            caller: The name of the recomputed function, for messages.

        Raises:
            ChangedTensorError: A buffer has changed of which there is no copy.
            MismatchError: The block has changed one that was not changed before.
        """
        self._classify(caller)
        slots = buffer_slots(self._modules)
        contents = [(b, b.detach().clone()) for b, _ in self._copies]
        # Hidden: what autograd saved of a buffer is there again once it is put back.
        with writes_hidden(buffer for buffer, _ in self._copies):

            def restore() -> None:
                put_in_place(slots)
                _set_all(contents)

            with restoring(restore):
                put_in_place(self._slots)
                _set_all(self._copies)
                yield
        written = self._written_uncopied()
        if written is not None:
            raise MismatchError(
                f"{caller!r} wrote to the buffer {written!r} when it was called again "
                "in backward, but not in forward. A recomputed function must do "
                "the same both times."
            )

    def are_behind(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with a buffer that is put back."""
        return has_storage(tensor) and storage_address(tensor) in self._addresses

    def _classify(self, caller: str) -> None:
        """Learn which large buffers stay as they are, and need no copy next time."""
        written = self._written_uncopied()
        for _, buffer, version in self._versions:
            calls = _STEADY.setdefault(buffer, set())
            if version_of(buffer) == version >= 0:
                calls.add(self._key)
            else:
                calls.discard(self._key)
        if written is not None:
            raise ChangedTensorError(
                f"{caller!r} is recomputed in backward, but the buffer {written!r} is "
                "no longer what it was when it was called: it was written to, by the "
                "call or after it. It is large and was not written to before, so there "
                "is no copy. From now on it is copied: run this step again. To do "
                "without, write to the buffer outside of what is recomputed, after "
                "backward."
            )

    def _written_uncopied(self) -> str | None:
        """Return the name of a buffer that has changed and was not copied."""
        copied = {id(buffer) for buffer, _ in self._copies}
        for name, buffer, version in self._versions:
            if id(buffer) not in copied and version_of(buffer) != version:
                return name
        return None

    def _is_steady(self, buffer: Tensor) -> bool:
        return self._key in _STEADY.get(buffer, set())


def _named(slots: list[BufferSlot]) -> list[tuple[str, Tensor]]:
    """Return the buffers in their places, each once, with a name."""
    found = {id(buffer): (name, buffer) for _, name, buffer in slots}
    return [(name, buffer) for name, buffer in found.values() if buffer is not None]


def _shared_copy(buffer: Tensor) -> Tensor:
    """Return a copy of a buffer: the same for all calls that found the same version."""
    version = version_of(buffer)
    known = _COPIES.get(buffer)
    copy = known[1]() if known is not None and known[0] == version >= 0 else None
    if copy is None:
        copy = buffer.detach().clone()
        _COPIES[buffer] = (version, weakref.ref(copy))
    return copy


def _set_all(contents: list[tuple[Tensor, Tensor]]) -> None:
    # Through `.data`: putting a buffer back is no change that autograd must notice.
    with torch.no_grad():
        for buffer, content in contents:
            buffer.data.copy_(content)
