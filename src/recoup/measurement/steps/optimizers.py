"""The bytes of an optimizer's state, predicted before it exists."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recoup.backend.memory.ledger import storages_in
from recoup.backend.memory.meters import device_meter
from recoup.backend.operators.fakes import NEEDS_CONTENTS, without_memory
from recoup.backend.state.trees import tensors
from recoup.backend.training.optimizer_steps import members_of
from recoup.errors import UsageError


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's current state."""
    found = {id(s): s.nbytes() for s in storages_in(state_tensors(optimizer))}
    return sum(found.values())


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state, including those in containers.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight])
        >>> optimizer.state[weight] = {"pair": [torch.zeros(2), {"a": torch.ones(2)}]}
        >>> state_tensors(optimizer)
        [tensor([0., 0.]), tensor([1., 1.])]
    """
    # An optimizer may also have state under a name instead of a parameter.
    states = optimizer.state.values()
    return tensors([dict(s) if isinstance(s, Mapping) else s for s in states])


def missing_state_bytes(optimizer: Optimizer, device: torch.device) -> int:
    """Return the bytes of state that the optimizer's next step will add on a device.

    That is the state of the parameters that have none yet. It is measured by a step of
    a copy of the optimizer, on fake tensors if possible, without hooks.

    An optimizer whose copy cannot step, such as LBFGS, which needs a closure, is
    assumed to have all its state once it has some.

    Raises:
        UsageError: The copy cannot step, and there is no state yet.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(100))
        >>> missing_state_bytes(torch.optim.Adam([weight]), torch.device("cpu"))
        804
    """
    members = members_of(optimizer)
    if len(members) > 1:
        return sum(missing_state_bytes(member, device) for member in members)
    groups = [
        {**group, "params": [p for p in group["params"] if not optimizer.state.get(p)]}
        for group in optimizer.param_groups
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return 0
    try:
        return _bytes_of_steps(optimizer, groups, device)
    except Exception as error:
        if any(optimizer.state.values()):
            return 0
        name = type(optimizer).__name__
        raise UsageError(
            f"expected {name} to step on a copy of the parameters, which shows the "
            f"bytes of its state, got {type(error).__name__}: {error}. Call "
            f"{name}.step before fit, so that its state exists (LBFGS's grows for "
            "history_size steps), or leave out optimizer= and lower the budget by the "
            "bytes of its state."
        ) from error


def _bytes_of_steps(
    optimizer: Optimizer, groups: list[dict[str, Any]], device: torch.device
) -> int:
    stand_in = _without_state(optimizer, groups)
    try:
        with without_memory():
            return _bytes_of_step(stand_in, device, _stand_in_for)
    except NEEDS_CONTENTS:
        # It reads tensor contents: use real tensors, one parameter at a time.
        singles = [
            {**group, "params": [p]} for group in groups for p in group["params"]
        ]
        return sum(
            _bytes_of_step(_without_state(optimizer, [single]), device, _copy_of)
            for single in singles
        )


def _bytes_of_step(
    stand_in: Optimizer, device: torch.device, stand_in_for: Callable[[Tensor], Tensor]
) -> int:
    for group in stand_in.param_groups:
        group["params"] = [stand_in_for(p) for p in group["params"]]
    _step_without_hooks(stand_in)
    counted_bytes = device_meter(device).counted_bytes
    found = {
        id(storage): storage
        for tensor in state_tensors(stand_in)
        if tensor.device.type == device.type
        for storage in storages_in(tensor)
    }
    return sum(counted_bytes(storage.nbytes()) for storage in found.values())


def _without_state(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return a copy of an optimizer with these groups and the same parameters.

    Not `copy.copy`, which copies only some attributes of an optimizer.
    """
    stand_in = object.__new__(type(optimizer))
    shared = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    attributes: dict[str, Any] = {
        name: {} if name.startswith("_optimizer_") else value  # hooks
        for name, value in vars(optimizer).items()
    }
    attributes |= {"state": {}, "param_groups": groups}
    vars(stand_in).update(
        copy.deepcopy(attributes, {**shared, id(optimizer): stand_in})
    )
    stand_in.state = type(optimizer.state)(dict)
    return stand_in


def _step_without_hooks(optimizer: Optimizer) -> None:
    """Make a step without the optimizer's own and global hooks.

    Calls the class's method, because a scheduler counts calls of the instance's.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def _stand_in_for(parameter: Tensor) -> Tensor:
    stand_in = torch.empty_like(parameter, requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        stand_in.grad = torch.empty_like(stand_in)
    return stand_in


def _copy_of(parameter: Tensor) -> Tensor:
    stand_in = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    if parameter.requires_grad:
        stand_in.grad = torch.zeros_like(stand_in)
    return stand_in
