"""Tensors without memory, on which operators compute shapes and nothing else."""

from contextlib import AbstractContextManager

from torch._subclasses.fake_tensor import DataDependentOutputException as _DataDependent
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

NEEDS_CONTENTS = (
    _DataDependent,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""Raised by an operator whose result cannot be told without the contents."""


def without_memory() -> AbstractContextManager[object]:
    """Make every tensor that is made inside the block one without memory.

    Examples:
        >>> import torch
        >>> with without_memory():
        ...     huge = torch.empty(1 << 40) + 1
        >>> huge.nbytes == 1 << 42
        True
    """
    return FakeTensorMode(allow_non_fake_inputs=True)
