"""Storage identity and geometry: a tensor's storage, and its layout in it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad_mode
from torch.utils.weak import WeakIdKeyDictionary

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (no stub names it)

storage_address: Callable[[Tensor], int] = getattr(  # noqa: B009 (no stub names it)
    torch._C, "_storage_address"
)
"""Return the address of the tensor's storage object, which identifies the storage.

In C, for the recorder's inner loop. Raises NotImplementedError if the tensor has no
storage (sparse, wrapper subclass).
"""

version_counter: Callable[[Tensor], int] = attrgetter("_version")
"""Return the tensor's version counter.

In C, because it runs for every tensor. Raises RuntimeError for inference tensors, which
have none: `version_of` returns `NO_VERSION` for them.
"""

NO_VERSION = -1

take_weak_reference: Callable[[torch.UntypedStorage], int] = (
    torch.UntypedStorage._weak_ref
)  # pyright: ignore[reportAssignmentType]
"""Return a storage's address and reserve the address, not the memory behind it.

While the weak reference exists, no other storage gets the same address, so the address
identifies the storage. Release it with `free_weak_reference`.
"""

free_weak_reference = torch.UntypedStorage._free_weak_ref
"""Release one weak reference taken with `take_weak_reference`, by address."""


_VIEW_TRACKING = torch._C.DispatchKey.ADInplaceOrView
_is_switched_off: Callable[[torch._C.DispatchKey], bool] = (
    torch._C._dispatch_tls_is_dispatch_key_excluded
)

QUANTIZED = frozenset(
    {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)
"""Dtypes whose tensors have state besides their storage (scale, zero point)."""


Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, int]
"""A tensor's layout in its storage: shape, strides, offset, dtype and lazy bits (1 if
lazily conjugated, 2 if lazily negated, 3 if both). A plain tuple, because two are made
for every recorded operator."""


class StorageWatch:
    """Reports whether a tensor's memory still exists, without keeping it alive.

    Attributes:
        nbytes: The bytes of its storage.
        address: The address of its storage, which no other gets while it is watched.

    Examples:
        >>> t = torch.ones(3)
        >>> watch = StorageWatch(t)
        >>> alias = t.detach()
        >>> del t
        >>> watch.nbytes, watch.is_alive, watch.is_referenced
        (12, True, False)
        >>> del alias
        >>> watch.is_alive
        False
    """

    __slots__ = ("__weakref__", "_tensor", "address", "nbytes")

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes: int = tensor.untyped_storage().nbytes()
        self._tensor = weakref.ref(tensor)
        self.address: int = take_weak_reference(tensor.untyped_storage())

    @property
    def is_alive(self) -> bool:
        """Whether anything refers to the memory."""
        return not torch.UntypedStorage._expired(self.address)

    @property
    def is_referenced(self) -> bool:
        """Whether anything refers to the tensor itself, not only to its memory."""
        return self._tensor() is not None

    def __del__(self) -> None:
        """Release the address."""
        free_weak_reference(self.address)


def watches_of(tensors: Iterable[Tensor]) -> list[StorageWatch]:
    """Return a watch for each storage of tensors with more than one element.

    Examples:
        >>> t = torch.ones(3)
        >>> len(watches_of([t, t[1:], t.sum()]))
        1
    """
    found: dict[int, StorageWatch] = {}
    for tensor in tensors:
        if tensor.numel() > 1 and has_storage(tensor):
            address = storage_address(tensor)
            if address not in found:
                found[address] = StorageWatch(tensor)
    return list(found.values())


def has_storage(tensor: Tensor) -> bool:
    """Return whether the tensor is backed by one plain storage."""
    return (
        torch._C._has_storage(tensor)
        and tensor.layout is torch.strided
        and tensor.dtype not in QUANTIZED
        and not tensor.is_nested
    )


def has_contents(tensor: Tensor) -> bool:
    """Return whether a tensor has data.

    Tensors on the meta device and fake tensors, whose storages are on it, have none.

    Examples:
        >>> has_contents(torch.ones(1)), has_contents(torch.ones(1, device="meta"))
        (True, False)
    """
    if not torch._C._has_storage(tensor):
        return tensor.device.type != "meta"
    return tensor.untyped_storage().device.type != "meta"


def version_of(tensor: Tensor) -> int:
    """Return the tensor's version counter, or `NO_VERSION` if it has none."""
    try:
        return version_counter(tensor)
    except RuntimeError:
        return NO_VERSION


def writes_hidden(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Restore the version counters of tensors at the end of the block.

    For a block that leaves their contents unchanged, so autograd need not know.

    Examples:
        >>> t = torch.ones(1)
        >>> with writes_hidden([t]):
        ...     _ = t.add_(1).sub_(1)
        >>> version_of(t)
        0
    """
    counted = tuple(tensor for tensor in tensors if version_of(tensor) >= 0)
    return grad_mode._unsafe_preserve_version_counter(counted)


@contextmanager
def uncounted(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Set the version counters of tensors back by one during the block.

    For an operator that counted its writes to them before it runs.

    Examples:
        >>> t = torch.ones(1).add_(1)
        >>> with uncounted([t]):
        ...     version_of(t)
        0
        >>> version_of(t)
        1
    """
    counted = tuple(tensor for tensor in tensors if version_of(tensor) > 0)
    known = tuple(map(version_of, counted))
    try:
        for tensor in counted:  # one by one: views of one tensor share a counter
            earlier = (version_of(tensor) - 1,)
            _autograd._unsafe_set_version_counter((tensor,), earlier)
        yield
    finally:
        _autograd._unsafe_set_version_counter(counted, known)


def alias(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, sharing memory and version counter.

    Parameters, which cannot get a graph, and views of parameters, whose graph consists
    of views only, are returned unchanged. A view of any other tensor may get a graph
    when its base is written to. Inside a dispatch mode a plain `detach` gets a new
    version counter, because the dispatch key that shares it is excluded there. Dispatch
    modes do not see the call, which would cost three times as much. Guards are entered
    only where needed, since each costs as much as the call.
    """
    if tensor.requires_grad:
        base = tensor._base
        if tensor.is_leaf if base is None else base.is_leaf and base.requires_grad:
            return tensor
    if _is_switched_off(_VIEW_TRACKING):
        with torch._C._SetExcludeDispatchKeyGuard(_VIEW_TRACKING, False):
            return _detached(tensor)
    return _detached(tensor)


def sharing_versions() -> AbstractContextManager[object]:
    """Make views in the block share version counters, even in a dispatch mode."""
    return torch._C._SetExcludeDispatchKeyGuard(_VIEW_TRACKING, False)


def _detached(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def geometry_of(tensor: Tensor) -> Geometry:
    """Return the tensor's layout in its storage."""
    return (
        tensor.shape,
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        lazy_bits(tensor),
    )


def lazy_bits(tensor: Tensor) -> int:
    """Return the tensor's lazy conjugation and negation as bits."""
    return int(tensor.is_conj()) | int(tensor.is_neg()) << 1


def shaped(tensor: Tensor, geometry: Geometry) -> Tensor:
    """Return a view of the tensor's storage with another geometry."""
    shape, stride, offset, dtype, bits = geometry
    if tensor.dtype is dtype and bits == 0 and lazy_bits(tensor) == 0:
        return tensor.as_strided(shape, stride, offset)
    plain = torch.empty(0, dtype=dtype, device=tensor.device)
    plain.set_(tensor.untyped_storage(), offset, shape, stride)
    if bits & 1:
        plain = plain.conj()
    return torch.ops.aten._neg_view(plain) if bits & 2 else plain


def fitted(tensor: Tensor, geometry: Geometry) -> Tensor:
    """Return the tensor if it has this geometry, else a view that has it."""
    shape, stride, offset, dtype, bits = geometry
    if (
        tensor.stride() == stride
        and tensor.shape == shape
        and tensor.dtype is dtype
        and tensor.storage_offset() == offset
        and lazy_bits(tensor) == bits
    ):
        return tensor
    return shaped(tensor, geometry)


def flat(tensor: Tensor) -> Tensor:
    """Return the whole storage as a one-dimensional tensor of the same dtype.

    As bytes, if its size is not a multiple of the tensor's element size.

    Examples:
        >>> flat(torch.zeros(10, dtype=torch.uint8)[:8].view(torch.int32)).shape
        torch.Size([10])
    """
    length, rest = divmod(tensor.untyped_storage().nbytes(), tensor.element_size())
    dtype = tensor.dtype
    if rest:
        length, dtype = length * tensor.element_size() + rest, torch.uint8
    return shaped(tensor, (torch.Size((length,)), (1,), 0, dtype, 0))


def copy_storage(tensor: Tensor) -> Tensor:
    """Return a tensor of the same geometry on a copy of the whole storage."""
    geometry = geometry_of(tensor)
    return shaped(flat(tensor.detach()).clone(), geometry)


def without_repeats(tensor: Tensor) -> Tensor:
    """Return a view with each element of an expanded tensor once.

    Examples:
        >>> without_repeats(torch.ones(3, 1).expand(3, 4)).shape
        torch.Size([3, 1])
    """
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one memory interval without gaps or overlaps.

    Examples:
        >>> is_dense(torch.zeros(2, 3).T), is_dense(torch.zeros(2, 3)[:, 1:])
        (True, False)
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class TensorSet:
    """A set of tensor objects; a tensor leaves it when it dies.

    Examples:
        >>> import torch
        >>> marked = TensorSet()
        >>> t = torch.ones(1)
        >>> marked.add(t)
        >>> t in marked, torch.ones(1) in marked, len(marked)
        (True, False, 1)
        >>> del t
        >>> len(marked)
        0
    """

    def __init__(self) -> None:
        self._members = WeakIdKeyDictionary()

    def add(self, tensor: Tensor) -> None:
        """Add a tensor."""
        self._members[tensor] = None

    def discard(self, tensor: Tensor) -> None:
        """Remove a tensor if it is a member."""
        self._members.pop(tensor, None)

    def clear(self) -> None:
        """Remove all tensors."""
        self._members.clear()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._members

    def __len__(self) -> int:
        return len(self._members)
