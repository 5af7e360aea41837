"""Outside: what a step sees besides its state, watched for what it leaves there.

A step that keeps a tensor in a list, a variable or an attribute keeps one without its
graph, because steps are run without one and run again. Its gradient would be lost.
"""

import types
from typing import Any

from torch import Tensor, nn

from recoup.backend.autograd.module_hooks import forward_pre_hooks
from recoup.backend.memory.storages import version_of
from recoup.backend.state.walk import reach
from recoup.errors import CaptureError

_ADVICE = (
    "Return it as a part of the state, or as an output with with_outputs=True; keep "
    "numbers, such as float(tensor), for a log."
)


class Outside:
    """The tensors a function sees, as they are when this is made.

    Costs some microseconds for each object the function sees, each time.

    Args:
        function: The step.

    Examples:
        >>> import torch
        >>> kept, weight = [], torch.ones(2, requires_grad=True)
        >>> def step(state):
        ...     kept.append(state * weight)
        ...     return kept[-1]
        >>> outside = Outside(step)
        >>> _ = step(torch.ones(2))
        >>> try:
        ...     outside.check("step")
        ... except CaptureError as error:
        ...     print(str(error)[:60])
        'step' keeps a tensor of shape (2,) outside of the state: it
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._strict = False
        self._seen = {
            id(tensor): (tensor, version_of(tensor), tensor.requires_grad)
            for tensor in reach(function, kind=Tensor)
        }

    def settle(self) -> None:
        """Take it that what the first step has made is a cache of its own.

        From now on any further tensor is one too many, also one without a graph.
        """
        self._strict = True
        for tensor in reach(self._function, kind=Tensor):
            if not tensor.requires_grad and id(tensor) not in self._seen:
                self._seen[id(tensor)] = (tensor, version_of(tensor), False)

    def check(self, name: str) -> None:
        """Raise if the function has left tensors behind.

        Args:
            name: The function's name, for the message.

        Raises:
            CaptureError: A gradient would be lost.
        """
        made = _made_by_hooks(self._function)
        now = reach(self._function, kind=Tensor)
        for tensor in now:
            if id(tensor) not in made:
                self._check(tensor, name)
        left = {id(tensor) for tensor in now}
        for address, (tensor, _, required) in self._seen.items():
            if required and address not in left and not made:
                raise CaptureError(
                    f"{name!r} puts another tensor in the place of one of shape "
                    f"{tuple(tensor.shape)} that it captures: the gradient of that one "
                    f"would be lost. {_ADVICE}"
                )

    def _check(self, tensor: Tensor, name: str) -> None:
        if id(tensor) not in self._seen:
            if tensor.requires_grad or self._strict:
                raise CaptureError(
                    f"{name!r} keeps a tensor of shape {tuple(tensor.shape)} outside "
                    "of the state: it is made without a graph, and made again in "
                    f"backward, so its gradient would be lost. {_ADVICE}"
                )
            return
        _, version, required = self._seen[id(tensor)]
        if tensor.requires_grad and (not required or version_of(tensor) != version):
            raise CaptureError(
                f"{name!r} writes to a tensor of shape {tuple(tensor.shape)} that it "
                f"captures: the gradient of what is written would be lost. {_ADVICE}"
            )


def holds_other_tensors(leaves: list[Any], known: list[Any]) -> Any:
    """Return an object among the leaves with tensors inside that are not known.

    Tensors in tuples, lists and dictionaries are leaves themselves; in an object of
    another kind they cannot be told from the outside, and gradients would pass by.

    Args:
        leaves: The leaves of a state.
        known: Tensors, and objects whose tensors are known.

    Returns:
        The first such object, or None.
    """
    addresses = {id(tensor) for tensor in reach(known, kind=Tensor)}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            continue
        if isinstance(leaf, (types.GeneratorType, map, filter, zip)):
            return leaf
        if any(id(tensor) not in addresses for tensor in reach(leaf, kind=Tensor)):
            return leaf
    return None


def _made_by_hooks(function: Any) -> set[int]:
    """Return the tensors that hooks such as weight normalization put into modules."""
    return {
        id(value)
        for top in reach(function, kind=nn.Module)
        for module in top.modules()
        if any(True for _ in forward_pre_hooks(module))
        for value in vars(module).values()
        if isinstance(value, Tensor)
    }
