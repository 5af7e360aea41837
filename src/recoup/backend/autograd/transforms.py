"""The active transforms of torch.func, and how to step out of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 (no stub names it)
_innermost: Callable[[], Any] = _functorch.peek_interpreter_stack
_is_included: Callable[[torch._C.DispatchKey], bool] = (
    torch._C._dispatch_tls_is_dispatch_key_included
)

_BATCHED_GRADIENTS = torch._C._dispatch_key_parse("VmapMode")
"""Active while autograd runs with `is_grads_batched`, which uses the older vmap and
none of the transforms of torch.func."""


_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Run the block as if no transform of torch.func were active on this thread.

    Inside one, every operator returns a wrapper that is invalid after the transform
    ends, and `detach` gives it a separate version counter. Also leaves batched
    gradients (`is_grads_batched`), where random operators are forbidden.

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
    return _outside() if is_transformed() else _NOTHING


def is_transformed() -> bool:
    """Return whether a transform of torch.func or batched gradients are active."""
    return _innermost() is not None or _is_included(_BATCHED_GRADIENTS)


@contextmanager
def _outside() -> Iterator[None]:
    with ExitStack() as left:
        if _innermost() is not None:
            left.enter_context(temporarily_clear_interpreter_stack())
        if _is_included(_BATCHED_GRADIENTS):
            keys = torch._C.DispatchKeySet(_BATCHED_GRADIENTS)
            left.enter_context(torch._C._ExcludeDispatchKeyGuard(keys))
        yield


def carries_tangents(tensors: Iterable[Tensor]) -> bool:
    """Return whether forward-mode derivatives are active.

    That is, a transform such as `jvp` is innermost, or one of the tensors is dual.

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
