"""Tensors compared bit by bit, and copied with their geometry."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def tree_differences(expected: Any, actual: Any, *, where: str) -> Iterator[str]:
    """Compare two trees of tensors and plain values bit by bit."""
    expected_leaves, expected_shape = pytree.tree_flatten(expected)
    actual_leaves, actual_shape = pytree.tree_flatten(actual)
    if expected_shape != actual_shape:
        yield f"{where}structure {actual_shape} instead of {expected_shape}"
        return
    pairs = zip(expected_leaves, actual_leaves, strict=True)
    for place, (left, right) in enumerate(pairs):
        are_tensors = isinstance(left, Tensor) and isinstance(right, Tensor)
        if are_tensors:
            is_same = next(tensor_differences(left, right, name=""), None) is None
        else:
            is_same = _same_object(left, right)
        if is_same:
            continue
        # Asked for here only: it takes longer than to compare small tensors.
        path, _ = pytree.tree_flatten_with_path(expected)[0][place]
        name = where + pytree.keystr(path)
        if are_tensors:
            yield from tensor_differences(left, right, name=name)
        else:
            yield f"{name}: {right!r} instead of {left!r}"


def tensor_differences(expected: Tensor, actual: Tensor, *, name: str) -> Iterator[str]:
    """Compare two tensors: kind, geometry, and every bit."""
    for attribute in ("dtype", "layout", "device", "shape", "requires_grad"):
        left, right = getattr(expected, attribute), getattr(actual, attribute)
        if left != right:
            yield f"{name}: {attribute} {right} instead of {left}"
            if attribute != "requires_grad":
                return
    with torch.no_grad():
        left_parts, right_parts = dense_parts(expected), dense_parts(actual)
        for part, left in left_parts.items():
            yield from _dense_differences(left, right_parts[part], name=name + part)


def dense_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Split a tensor of any layout into the dense tensors that define it."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return {f" component {i}": part for i, part in enumerate(tensor.unbind())}
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return {" indices": tensor.indices(), " values": tensor.values()}
    if tensor.layout in _COMPRESSED:
        # The parts are views that still ask their sparse base for strides: copy them.
        names = (*_COMPRESSED[tensor.layout], "values")
        return {f" {name}": getattr(tensor, name)().clone() for name in names}
    if tensor.layout != torch.strided:
        return {"": tensor.to_dense()}
    return {"": tensor}


def bits(tensor: Tensor) -> Tensor:
    """View a dense tensor as integers: NaN equals itself, 0 differs from -0."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def duplicate(tree: Any) -> Any:
    """Copy every tensor of a tree as a new leaf of the autograd graph.

    Geometry (strides and offset) and sharing of memory between the tensors stay
    as they are, which `Tensor.clone` does not promise.
    """
    return pytree.tree_map_only(Tensor, _Duplicator().copy, tree)


@dataclass(slots=True)
class _Duplicator:
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.tensors:
            made = self._copy_data(tensor).requires_grad_(tensor.requires_grad)
            self.tensors[id(tensor)] = made
        return self.tensors[id(tensor)]

    def _copy_data(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if type(source) is not Tensor or source.layout != torch.strided:
            return source.clone()
        storage = source.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage.clone()
        made = torch.empty(0, dtype=source.dtype, device=source.device)
        made.set_(
            self.storages[storage._cdata],
            source.storage_offset(),
            source.size(),
            source.stride(),
        )
        made = torch.conj(made) if source.is_conj() else made
        return torch.ops.aten._neg_view(made) if source.is_neg() else made


def _dense_differences(expected: Tensor, actual: Tensor, *, name: str) -> Iterator[str]:
    if expected.shape != actual.shape:
        yield f"{name}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        return
    if _strides(expected) != _strides(actual):
        yield f"{name}: strides {actual.stride()} instead of {expected.stride()}"
    left, right = bits(expected), bits(actual)
    if torch.equal(left, right):
        return
    unequal = left != right
    where = tuple(int(i) for i in unequal.nonzero()[0])[: expected.dim()]
    yield (
        f"{name}: {int(unequal.sum())} of {unequal.numel()} elements differ, the first "
        f"at {where}: {actual[where].item()!r} instead of {expected[where].item()!r}"
    )


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides that mean something: those of dimensions longer than one."""
    if tensor.numel() == 0:
        return []
    sizes = zip(tensor.stride(), tensor.size(), strict=True)
    return [stride for stride, size in sizes if size > 1]


def _same_object(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and bool(left == right)
