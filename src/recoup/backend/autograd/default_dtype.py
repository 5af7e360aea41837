"""The default type of floating-point numbers, and operators that go by it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from recoup.backend.state.trees import tensors
from recoup.core.restoring import restoring

default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
"""Return the type that floating-point numbers get where nothing says another."""


def run_in_default(
    dtype: torch.dtype, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run an operator as it was run while another default type was in force.

    Only those that are given no floating-point tensor go by the default: those that
    make tensors, and those that turn integers into fractions. The default is one for
    all threads, so it is left alone for the others.

    Examples:
        >>> run_in_default(torch.float64, torch.ones, 1).dtype
        torch.float64
        >>> run_in_default(torch.float64, torch.sin, torch.ones(1)).dtype
        torch.float32
    """
    if any(t.is_floating_point() or t.is_complex() for t in tensors((args, kwargs))):
        return run(*args, **kwargs)
    with in_default(dtype):
        return run(*args, **kwargs)


class in_default(restoring):  # noqa: N801 (used as a verb)
    """Run the block with another default type, on all threads.

    Examples:
        >>> with in_default(torch.float64):
        ...     torch.ones(1).dtype
        torch.float64
    """

    __slots__ = ("_dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(partial(torch.set_default_dtype, default_dtype()))
        self._dtype = dtype

    def __enter__(self) -> None:
        super().__enter__()
        torch.set_default_dtype(self._dtype)
