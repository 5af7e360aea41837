"""The transforms of torch.func that are under way, and how to step out of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

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
