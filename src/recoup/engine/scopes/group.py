"""Groups: calls with any inputs and outputs, accounted for together."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from recoup.engine.recording.active import region
from recoup.engine.recording.region_options import Options
from recoup.engine.scopes.checkpoint_node import CheckpointNode, held_bytes
from recoup.engine.scopes.statistics import NamedAccount, Statistics
from recoup.errors import UsageError


class CheckpointGroup:
    """Calls in regions that are counted and accounted for together.

    Each call is one region: all its outputs, and every gradient path through them, are
    served by one replay. What several calls take in is held once.

    Args:
        name: What statistics and error messages call it.

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
            raise UsageError(f"a group needs a name: got {name!r}.")
        self.name = name
        self.call_count = 0
        self._nodes: list[CheckpointNode] = []
        self._account = NamedAccount(name)

    @property
    def nodes(self) -> list[CheckpointNode]:
        """The group's regions whose graph is alive, oldest first."""
        self._nodes = [node for node in self._nodes if node.is_alive]
        return list(self._nodes)

    @property
    def memory_bytes(self) -> int:
        """The bytes that the group's living regions hold."""
        return held_bytes(self.nodes)

    @property
    def replay_count(self) -> int:
        """How many times the group's regions have been replayed."""
        return self._account.replays

    @property
    def statistics(self) -> Statistics:
        """What all calls of the group did, also those whose graph is gone."""
        for node in self.nodes:
            node.count_bytes()
        return self._account.snapshot()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: the name and the counts, but no regions."""
        return {**self.__dict__, "_nodes": []}

    def checkpoint_fn(self, inputs: Any, function: Callable[[Any], Any]) -> Any:
        """Call `function(inputs)` in a region of the group.

        Args:
            inputs: Any nested structure.
            function: What to call; it may return any nested structure.

        Returns:
            What the function returns.

        Raises:
            UsageError: The function is not callable.
        """
        if not callable(function):
            raise UsageError(
                f"a group needs a function to call: got {type(function).__name__}."
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
                f"this takes a list of tensors: got {type(inputs).__name__}. For other "
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
