"""Functions and groups: regions around single calls, or around counted calls."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from torch import Tensor

from recoup.backend.compiler.recognition import is_compiled
from recoup.engine.recording.active import region
from recoup.engine.recording.region_options import Options
from recoup.engine.replay.rerun import rerun
from recoup.engine.scopes.checkpoint_node import CheckpointNode, NodeKeeper
from recoup.engine.scopes.marks import recompute
from recoup.engine.scopes.statistics import NamedAccount
from recoup.errors import UsageError


@overload
def checkpoint(function: Tensor, /) -> Tensor: ...
@overload
def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...
def checkpoint(
    function: Callable[..., Any] | Tensor, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function in a region: drop what it saves, replay it in backward.

    Gradients flow to every argument, to parameters and to captured variables. Given a
    tensor instead of a function, this is `recompute(tensor)`.

    A compiled function is not recorded but called again in backward; see `rerun`.

    Args:
        function: The function to call, or a tensor.
        *args: Its positional arguments, any pytrees.
        **kwargs: Its keyword arguments.

    Returns:
        The function's result, or the tensor.

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
                "expected the tensor alone, as in checkpoint(tensor), got more "
                "arguments; to checkpoint a call, pass the function first."
            )
        return recompute(function)
    if not callable(function):
        raise UsageError(
            f"expected a function or a tensor, got {type(function).__name__}."
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
        function: The function to call.

    Returns:
        The function's result.

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
            f"expected a list or tuple of tensors, got {type(inputs).__name__}; write "
            "checkpoint_segment([a, b], function)."
        )
    wrong = [type(given).__name__ for given in inputs if not isinstance(given, Tensor)]
    if wrong:
        raise UsageError(f"expected tensors, got {', '.join(wrong)} among them.")
    if not callable(function):
        raise UsageError(f"expected a function to call, got {type(function).__name__}.")
    return checkpoint(function, inputs)


checkpoint_segment_flex = checkpoint_segment
"""SciRS2's second name for `checkpoint_segment`: any number of inputs."""


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
    """Return a function's qualified name, or its class's name."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__name__


def code_of(function: Callable[..., Any]) -> object:
    """Return a function's code object, to distinguish functions of one name.

    Examples:
        >>> code_of(functools.partial(code_of)) is code_of.__code__
        True
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", None)


class CheckpointGroup(NodeKeeper):
    """Calls in regions with common statistics.

    Each call is one region: one replay serves all its outputs and every gradient path
    through them. Inputs shared by several calls are held once.

    Args:
        name: Its name in statistics and error messages.

    Examples:
        >>> import torch
        >>> group = CheckpointGroup()
        >>> a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> total, product = group.checkpoint_fn(
        ...     (a, b), lambda inputs: (inputs[0] + inputs[1], inputs[0] * inputs[1])
        ... )
        >>> (total.exp() + product.sin()).sum().backward()
        >>> group.call_count
        1
    """

    def __init__(self, name: str = "group") -> None:
        if not isinstance(name, str) or not name.strip():
            raise UsageError(f"expected a name for the group, got {name!r}.")
        self.name = name
        self.call_count = 0
        self._nodes: list[CheckpointNode] = []
        self._account = NamedAccount(name)

    @property
    def replay_count(self) -> int:
        """The number of replays of the group's regions."""
        return self._account.replays

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: the name and the counts, but no regions."""
        return {**self.__dict__, "_nodes": []}

    def checkpoint_fn(self, inputs: Any, function: Callable[[Any], Any]) -> Any:
        """Call `function(inputs)` in a region of the group.

        Args:
            inputs: Any pytree.
            function: The function to call; it may return any pytree.

        Returns:
            The function's result.

        Raises:
            UsageError: The function is not callable.
        """
        if not callable(function):
            raise UsageError(
                f"expected a function to call, got {type(function).__name__}."
            )
        self.call_count += 1
        key = ("group", self.name, getattr(function, "__code__", None))
        with region(self.name, Options(), key, (self._account,)) as opened:
            if opened is not None:
                node = CheckpointNode(region=opened)
                self._nodes = self.nodes
                self._nodes.append(node)
                opened.accounts = (*opened.accounts, node)
            return function(inputs)

    def checkpoint_fn_flex(
        self, inputs: Sequence[Tensor], function: Callable[[Sequence[Tensor]], Tensor]
    ) -> Tensor:
        """Call a function of a list of tensors that returns one tensor."""
        return self._with_arity(1, inputs, function)[0]

    def checkpoint_fn_flex2(
        self,
        inputs: Sequence[Tensor],
        function: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Call a function of a list of tensors that returns two tensors."""
        first, second = self._with_arity(2, inputs, function)
        return first, second

    def checkpoint_fn_flex3(
        self,
        inputs: Sequence[Tensor],
        function: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call a function of a list of tensors that returns three tensors."""
        first, second, third = self._with_arity(3, inputs, function)
        return first, second, third

    def _with_arity(
        self, arity: int, inputs: Sequence[Tensor], function: Callable[..., Any]
    ) -> tuple[Any, ...]:
        if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
            raise UsageError(
                f"expected a list of tensors, got {type(inputs).__name__}; for other "
                "structures use checkpoint_fn."
            )
        outputs = self.checkpoint_fn(inputs, function)
        found = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        if len(found) != arity or not all(isinstance(t, Tensor) for t in found):
            raise UsageError(
                f"the function must return {arity} tensor{'s' * (arity > 1)}: it "
                f"returned {len(found)} "
                f"({', '.join(type(t).__name__ for t in found)}). Use the method for "
                "that number, or checkpoint_fn for any structure."
            )
        return tuple(found)
