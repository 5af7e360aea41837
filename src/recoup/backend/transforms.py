"""The transforms of torch.func that are under way, and how to step out of them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 (no stub names it)
_innermost: Callable[[], Any] = _functorch.peek_interpreter_stack


def outside_transforms() -> AbstractContextManager[object]:
    """Run the block as if no transform of torch.func were under way on this thread.

    Inside one, every operator returns a wrapper that means nothing after its end: a
    `detach` there has a version counter of its own.

    Examples:
        >>> found = []
        >>> def function(x):
        ...     with outside_transforms():
        ...         y = torch.ones(1).detach()
        ...     found.append(torch._C._functorch.is_functorch_wrapped_tensor(y))
        ...     return x.sum()
        >>> _ = torch.func.grad(function)(torch.ones(1))
        >>> found
        [False]
    """
    if _innermost() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def carries_tangents(tensors: Iterable[Tensor]) -> bool:
    """Return whether forward-mode derivatives are being computed here.

    By a transform such as `jvp`, or because one of the tensors is dual.

    Examples:
        >>> x = torch.ones(1)
        >>> carries_tangents([x])
        False
        >>> with forward_ad.dual_level():
        ...     carries_tangents([forward_ad.make_dual(x, x)])
        True
    """
    innermost = _innermost()
    if innermost is not None and innermost.key() == _functorch.TransformType.Jvp:
        return True
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
