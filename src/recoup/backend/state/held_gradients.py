"""Gradients that FSDP2 holds itself until it exchanges them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

_Form = tuple[torch.Size, torch.dtype, torch.device]


class HeldGradients:
    """The gradients that sharded modules hold besides `grad` of their parameters.

    After `set_requires_gradient_sync(False)` backward adds to gradients of whole
    parameters, which the next exchange reduces. They are in no `grad` of a parameter
    of the model.

    Args:
        modules: The modules; those that are not sharded hold none.

    Examples:
        >>> HeldGradients([nn.Linear(1, 1)]).drop()
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [each for each in modules if hasattr(each, "_get_fsdp_state")]
        self._known = {_key(*slot): getattr(*slot) for slot in self._slots()}
        self._received: dict[tuple[int, str], _Form] = {}

    def drop(self) -> None:
        """Drop the gradients that are held now."""
        for holder, name in self._slots():
            gradient = getattr(holder, name)
            if gradient is not None:
                self._received[_key(holder, name)] = (
                    gradient.shape,
                    gradient.dtype,
                    gradient.device,
                )
                setattr(holder, name, None)

    def carry(self) -> None:
        """Hold zeros in place of the gradients that were held since."""
        for holder, name in self._slots():
            known = self._received.get(_key(holder, name))
            if known is not None and getattr(holder, name) is None:
                shape, dtype, device = known
                zeros = torch.zeros(shape, dtype=dtype, device=device)
                setattr(holder, name, zeros)

    def restore(self) -> None:
        """Hold the gradients that were held before."""
        for holder, name in self._slots():
            setattr(holder, name, self._known.get(_key(holder, name)))

    def _slots(self) -> Iterator[tuple[Any, str]]:
        """Yield the objects that may hold a gradient, and the attributes for it."""
        for module in self._modules:
            state: Any = getattr(module, "_get_fsdp_state")()  # noqa: B009 (no stub)
            # Older versions of torch have one group.
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                for each in group.fsdp_params if group is not None else ():
                    if hasattr(each, "_unsharded_param"):
                        yield each._unsharded_param, "grad"
                        if "unsharded_accumulated_grad" in vars(each):
                            yield each, "unsharded_accumulated_grad"


def _key(holder: object, name: str) -> tuple[int, str]:
    return id(holder), name
