"""The whole state of a run as plain data: collected, checked, and put back."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.backend.randomness import (
    RandomStates,
    random_states,
    restore_random_states,
)
from recoup.core.errors import SnapshotError
from recoup.train.processes import Processes, unwrapped
from recoup.train.sharding import shard_like, whole_tree

_WITH = {True: "with", False: "without"}


def collect_state(
    model: nn.Module, optimizer: Optimizer, processes: Processes
) -> dict[str, Any]:
    """Return the state of model, optimizer and generators; all processes take part.

    Tensors that are sharded over processes come back whole, so that the state does
    not depend on how many there are. Their memory is on the CPU.
    """
    device = next(iter(model.parameters())).device
    return {
        "model": whole_tree(dict(unwrapped(model).state_dict())),
        "optimizer": whole_tree(optimizer.state_dict()),
        "random": processes.gather(random_states(device).plain()),
    }


def apply_state(
    state: dict[str, Any], model: nn.Module, optimizer: Optimizer, processes: Processes
) -> None:
    """Put the state back, sharded as the model is now.

    With other processes than before, each that is new begins with random numbers of
    its own.

    Raises:
        SnapshotError: It is the state of another model or optimizer. Nothing has been
            changed.
    """
    inner = unwrapped(model)
    own = inner.state_dict()
    _check_model(state["model"], own)
    _check_optimizer(state["optimizer"], optimizer)
    inner.load_state_dict(
        {name: shard_like(own[name], value) for name, value in state["model"].items()}
    )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.load_state_dict(
        {
            **state["optimizer"],
            "state": {
                index: {
                    name: shard_like(parameters[index], value)
                    for name, value in moments.items()
                }
                for index, moments in state["optimizer"]["state"].items()
            },
        }
    )
    device = next(iter(model.parameters())).device
    _apply_random(state["random"], device, processes.rank)


def check_part(name: str, *, has: bool, had: bool) -> None:
    """Refuse a state with a part that this run has not, or without one that it has.

    Raises:
        SnapshotError: It is one of these.
    """
    if has != had:
        raise SnapshotError(
            f"the snapshot was written {_WITH[had]} the part {name!r}, this trainer is "
            f"made {_WITH[has]} it. Make the trainer as it was."
        )


def _apply_random(states: list[Any], device: torch.device, rank: int) -> None:
    restore_random_states(RandomStates.of_plain(states[rank % len(states)]), device)
    if rank >= len(states):
        # A new process must not repeat what another draws.
        torch.manual_seed(torch.initial_seed() + rank)


def _check_model(saved: dict[str, Any], own: dict[str, Any]) -> None:
    differing = sorted(set(saved) ^ set(own))
    differing += [
        name
        for name, value in own.items()
        if isinstance(value, Tensor)
        and isinstance(saved.get(name), Tensor)
        and saved[name].shape != value.shape
    ]
    if differing:
        raise SnapshotError(
            "the snapshot is of another model: "
            f"{', '.join(differing[:4])}{' ...' if len(differing) > 4 else ''} differ."
        )


def _check_optimizer(saved: dict[str, Any], optimizer: Optimizer) -> None:
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise SnapshotError(
            f"the snapshot's optimizer has groups of {sizes} parameters, this one has "
            f"{own}."
        )
