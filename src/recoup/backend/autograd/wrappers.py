"""Wrapper subclasses: tensors without a storage that are made of inner tensors.

Examples: DTensor, jagged nested tensors, quantized tensors of other libraries. An
operator on one runs operators on its inner tensors and rebuilds the wrapper.
"""

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal import nested_tensor as _nested
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup.backend.state.trees import tensors


@functools.cache
def are_taken_apart(kinds: tuple[type, ...]) -> bool:
    """Return whether all types are plain tensors or define `__tensor_flatten__`.

    Examples:
        >>> are_taken_apart((Tensor,)), are_taken_apart((type("Other", (Tensor,), {}),))
        (True, False)
    """
    plain = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return all(kind in plain or hasattr(kind, "__tensor_flatten__") for kind in kinds)


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is a traceable wrapper subclass."""
    return type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor)


def wrappers_in(tree: Any) -> list[Tensor]:
    """Return the wrappers in a pytree."""
    return [each for each in tensors(tree) if is_wrapper(each)]


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain inner tensors of a wrapper, recursively."""
    if not is_wrapper(tensor):
        return [tensor]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    parts = (getattr(tensor, name) for name in names)
    return [
        inner
        for part in parts
        if isinstance(part, Tensor)
        for inner in inner_tensors(part)
    ]


def unwrapped_now(inner: Tensor, below: dict[str, Any]) -> Tensor | None:
    """Return the DTensor whose inner tensor is being returned, or None.

    `to_local` and `full_tensor` return a view of the inner tensor, which has no
    reference to its wrapper. The wrapper is found in the callers' local variables.

    Args:
        inner: The tensor of which a view is made.
        below: The globals of the calling module, whose frames are skipped.
    """
    frame = sys._getframe(1)
    while frame.f_globals is below and frame.f_back is not None:
        frame = frame.f_back
    if (
        frame.f_code.co_name != "forward"
        or frame.f_globals.get("__name__") != "torch.distributed.tensor._api"
    ):
        return None
    found: Tensor | None = None
    caller: FrameType | None = frame
    for _ in range(_CALLERS):
        if caller is None:
            break
        for name in ("input", "self"):
            named = caller.f_locals.get(name)
            if isinstance(named, Tensor) and is_wrapper(named):
                # The outermost is the user's: the others may be temporaries.
                found = named if _is_in(inner, named) else found
        caller = caller.f_back
    return found


_CALLERS = 3
"""Frames searched: the autograd function, torch's call of it, DTensor's method."""


def _is_in(inner: Tensor, wrapper: Tensor) -> bool:
    return any(each is inner for each in inner_tensors(wrapper))


class Shell:
    """A wrapper's metadata, from which it can be rebuilt around other inner tensors.

    Attributes:
        parts: The wrapper's components by name, inner tensors and others.
    """

    __slots__ = ("_kind", "_meta", "_size", "_stride", "parts")

    def __init__(self, tensor: Tensor) -> None:
        wrapper: Any = tensor
        names, self._meta = wrapper.__tensor_flatten__()
        self._kind: Any = type(tensor)
        self._size = tensor.size()
        self._stride = tensor.stride()
        self.parts: dict[str, Any] = {name: getattr(tensor, name) for name in names}

    def around(self, parts: dict[str, Any]) -> Tensor:
        """Return the wrapper, rebuilt around other inner tensors."""
        if self._kind is _nested.NestedTensor:
            # Torch looks the ragged size up by the offsets tensor, which is a new one.
            source = parts.get("_lengths")
            source = parts["_offsets"] if source is None else source
            _nested._tensor_symint_registry[source] = self._size[
                self._meta["ragged_idx"]
            ]
        unflatten: Callable[..., Tensor] = self._kind.__tensor_unflatten__
        return unflatten(parts, self._meta, self._size, self._stride)


class Wrapped:
    """A saved wrapper subclass, represented by its packed inner tensors."""

    __slots__ = ("__weakref__", "_names", "_shell")

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> None:
        self._shell = Shell(tensor)
        parts = self._shell.parts
        self._names = [name for name, part in parts.items() if isinstance(part, Tensor)]
        for name in self._names:
            parts[name] = pack(parts[name])

    def unpack(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Return the wrapper, rebuilt from its unpacked inner tensors."""
        parts = self._shell.parts
        found = {name: unpack(parts[name]) for name in self._names}
        return self._shell.around({**parts, **found})
