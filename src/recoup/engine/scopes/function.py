"""Functions: a region around one call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from torch import Tensor

from recoup.backend.compiler.recognition import is_compiled
from recoup.engine.recording.active import region
from recoup.engine.recording.region_options import Options
from recoup.engine.replay.rerun import rerun
from recoup.engine.scopes.marks import recompute
from recoup.errors import UsageError


@overload
def checkpoint(function: Tensor, /) -> Tensor: ...
@overload
def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...
def checkpoint(
    function: Callable[..., Any] | Tensor, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function in a region: forget what it saves, replay it in backward.

    Gradients flow to every argument, to parameters and to whatever the function
    captures. Given a tensor instead of a function, this is `recompute(tensor)`.

    A compiled function is not recorded but called again in backward; see `rerun`.

    Args:
        function: What to call, or a tensor.
        *args: Its positional arguments, any nested structure.
        **kwargs: Its keyword arguments.

    Returns:
        What the function returns, or the tensor.

    Raises:
        UsageError: The first argument is neither callable nor a tensor.

    Examples:
        >>> import torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> checkpoint(lambda t: t.exp().sin(), x).sum().backward()
        >>> torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())
        True
    """
    if isinstance(function, Tensor):
        if args or kwargs:
            raise UsageError(
                "checkpoint(tensor) takes the tensor alone: got more arguments. To "
                "checkpoint a call, pass the function first."
            )
        return recompute(function)
    if not callable(function):
        raise UsageError(
            f"checkpoint takes a function or a tensor: got {type(function).__name__}."
        )
    if is_compiled(function):
        return rerun(function, *args, **kwargs)
    return call_in_region(name_of(function), Options(), function, *args, **kwargs)


def checkpoint_segment(
    inputs: Sequence[Tensor], function: Callable[[Sequence[Tensor]], Any]
) -> Any:
    """Call `function(inputs)` in a region.

    Args:
        inputs: Any number of tensors; the function gets them as one sequence.
        function: What to call.

    Returns:
        What the function returns.

    Raises:
        UsageError: The inputs are not a sequence of tensors.

    Examples:
        >>> import torch
        >>> a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> checkpoint_segment([a, b], lambda t: (t[0] * t[1]).sin()).sum().backward()
        >>> torch.equal(a.grad, b.grad)
        True
    """
    if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
        raise UsageError(
            f"a segment takes a list or tuple of tensors: got {type(inputs).__name__}. "
            "Write checkpoint_segment([a, b], function)."
        )
    wrong = [type(given).__name__ for given in inputs if not isinstance(given, Tensor)]
    if wrong:
        raise UsageError(f"a segment takes tensors: got {', '.join(wrong)} among them.")
    if not callable(function):
        raise UsageError(
            f"a segment needs a function to call: got {type(function).__name__}."
        )
    return checkpoint(function, inputs)


checkpoint_segment_flex = checkpoint_segment
"""The seed's second name for `checkpoint_segment`: any number of inputs."""


def call_in_region(
    name: str,
    options: Options,
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the function in a region with these options."""
    with region(name, options, ("function", name, code_of(function))):
        return function(*args, **kwargs)


def name_of(function: Callable[..., Any]) -> str:
    """Return what a function is called."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__name__


def code_of(function: Callable[..., Any]) -> object:
    """Return what tells a function from others of its name: its code.

    Examples:
        >>> code_of(functools.partial(code_of)) is code_of.__code__
        True
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", None)
