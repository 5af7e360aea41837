"""How many bytes an optimizer's state will take, before it exists."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recoup.backend.fakes import NEEDS_CONTENTS, without_memory
from recoup.backend.ledger import storages_in
from recoup.backend.memory import device_meter


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the state that an optimizer has now."""
    found = {id(s): s.nbytes() for s in storages_in(_state_tensors(optimizer))}
    return sum(found.values())


def missing_state_bytes(optimizer: Optimizer, device: torch.device) -> int:
    """Return the bytes of state that the optimizer's first step will add on a device.

    The step is made by a copy of the optimizer, on tensors without memory if it can.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(100))
        >>> missing_state_bytes(torch.optim.Adam([weight]), torch.device("cpu"))
        804
    """
    if optimizer.state:
        return 0
    try:
        with without_memory():
            return _bytes_of_step(optimizer, optimizer.param_groups, device, _twin_of)
    except NEEDS_CONTENTS:
        # It looks at numbers: then for real, one parameter after the other.
        return sum(
            _bytes_of_step(optimizer, [{**group, "params": [p]}], device, _copy_of)
            for group in optimizer.param_groups
            for p in group["params"]
        )


def _bytes_of_step(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    device: torch.device,
    twin_of: Callable[[Tensor], Tensor],
) -> int:
    twin = copy.copy(optimizer)
    twin.state = type(optimizer.state)(dict)
    twin.param_groups = [
        {**group, "params": [twin_of(p) for p in group["params"]]} for group in groups
    ]
    type(optimizer).step(twin)
    counted_bytes = device_meter(device).counted_bytes
    return sum(
        counted_bytes(storage.nbytes())
        for tensor in _state_tensors(twin)
        if tensor.device.type == device.type
        for storage in storages_in(tensor)
    )


def _twin_of(parameter: Tensor) -> Tensor:
    twin = torch.empty_like(parameter, requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        twin.grad = torch.empty_like(twin)
    return twin


def _copy_of(parameter: Tensor) -> Tensor:
    twin = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    if parameter.requires_grad:
        twin.grad = torch.zeros_like(twin)
    return twin


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
