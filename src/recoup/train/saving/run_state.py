"""The whole state of a run as plain data: collected, written, checked, restored."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.backend.state.rng import RandomStates, random_states, restore_random_states
from recoup.backend.state.trees import map_leaves
from recoup.backend.training.optimizer_steps import parameters_of
from recoup.errors import SnapshotError, SnapshotWriteError
from recoup.precision.scaler import GradientScaler
from recoup.train.data.position import Position, own_position
from recoup.train.processes import Processes, Report, unwrapped
from recoup.train.saving.snapshot import write_snapshot


def whole(tensor: Any) -> Any:
    """Return a sharded tensor gathered on every process; anything else unchanged.

    All processes must call it together for a sharded one.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_tree(tree: Any) -> Any:
    """Return a tree with its tensors detached and gathered, sharded ones on the CPU."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach()
        return whole(leaf).cpu() if hasattr(leaf, "full_tensor") else leaf

    return map_leaves(change, tree)


def shard_like(own: Any, value: Any) -> Any:
    """Return a tensor sharded like another of its shape; anything else unchanged."""
    if not isinstance(value, Tensor) or not hasattr(own, "full_tensor"):
        return value
    if value.shape != own.shape:
        return value
    # Slow to import, and needed only where it is already imported.
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)


Parts = dict[str, Any]
"""Objects with a state besides model and optimizer, by name; None: absent."""

_WITH = {True: "with", False: "without"}


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything of a run that has a state, and the processes that share it.

    Attributes:
        model: The model, perhaps in its wrapper.
        optimizer: The optimizer.
        parts: The other objects with a state.
        position: The position in the data.
        processes: The processes; all take part in saving and loading.
    """

    model: nn.Module
    optimizer: Optimizer
    parts: Parts
    position: Position
    processes: Processes

    def save(self, path: str | Path, own: dict[str, Any]) -> None:
        """Write the run to a file, with its own data; the first process writes.

        Tensors that are sharded over processes are gathered on the CPU, so that the
        state does not depend on the number of processes.

        Raises:
            SnapshotError: The state is not plain data; in every process.
            SnapshotWriteError: The file cannot be written; in every process.
            PeerError: Another process is gone.
        """
        processes = self.processes
        with processes.watching():
            state = {
                **own,
                "processes": processes.count,
                "position": processes.gather(self.position.state_dict()),
                "kinds": _kinds(self._stateful),
                **{
                    name: part and part.state_dict()
                    for name, part in self.parts.items()
                },
                "model": whole_tree(dict(unwrapped(self.model).state_dict())),
                "optimizer": whole_tree(self.optimizer.state_dict()),
                "random": processes.gather(random_states(self._device).plain()),
            }
            _write(path, state, processes)

    def load(
        self, path: str | Path, state: dict[str, Any], needed: frozenset[str]
    ) -> None:
        """Restore the state that `save` wrote to a file, sharded as the model is now.

        Scaler and average keep their own settings. If there are more processes than
        before, each new one gets its own random numbers.

        Raises:
            SnapshotError: The state lacks a needed part, or belongs to another model or
                optimizer, or to other parts. Nothing has been changed.
        """
        missing = sorted(needed - state.keys())
        if missing:
            raise SnapshotError(
                f"expected a whole run in {path}, got one without {missing[0]!r}."
            )
        _check_parts(state, self._stateful)
        inner = unwrapped(self.model)
        own = inner.state_dict()
        _check_model(state["model"], own)
        _check_optimizer(state["optimizer"], self.optimizer)
        saved = state["model"].items()
        inner.load_state_dict({name: shard_like(own[name], v) for name, v in saved})
        self._load_optimizer(state["optimizer"])
        for name, part in self.parts.items():
            if isinstance(part, GradientScaler):
                part.load_progress(state[name])
            elif part is not None:
                part.load_state_dict(state[name])
        rank, count = self.processes.rank, self.processes.count
        _apply_random(state["random"], self._device, rank)
        self.position.load_state_dict(
            own_position(state["position"], rank, count),
            share=state["processes"] / count,
        )

    @property
    def _stateful(self) -> Parts:
        return {**self.parts, "optimizer": self.optimizer}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        parameters = parameters_of(self.optimizer)
        moments = {
            index: {name: shard_like(parameters[index], v) for name, v in each.items()}
            for index, each in saved["state"].items()
        }
        self.optimizer.load_state_dict({**saved, "state": moments})


def _write(path: str | Path, state: dict[str, Any], processes: Processes) -> None:
    """Write a state to a file; the first process writes, and all get the outcome."""
    failure: SnapshotError | None = None
    if processes.is_first:
        try:
            write_snapshot(path, state)
        except SnapshotError as error:
            failure = error
    is_lasting = failure is not None and not isinstance(failure, SnapshotWriteError)
    mine = Report(failed=0 if failure is None else 2 if is_lasting else 1)
    first = processes.exchange(mine)[0]
    if failure is not None:
        raise failure
    if first.failed:
        kind = SnapshotError if first.failed > 1 else SnapshotWriteError
        raise kind(
            f"expected the first process to write {path}, got an error there; see "
            "its log."
        )


def _kinds(parts: Parts) -> dict[str, str]:
    """Return the classes of the existing parts."""
    return {name: _kind(part) for name, part in parts.items() if part is not None}


def _kind(part: Any) -> str:
    members = part.members if hasattr(part, "members") else [part]
    return "+".join(type(member).__name__ for member in members)


def _check_parts(state: dict[str, Any], parts: Parts) -> None:
    """Refuse a state of other parts than this run has, or of parts of other classes.

    Many classes would silently load the state of another class.
    """
    for name, part in parts.items():
        has, had = part is not None, state[name] is not None
        if has != had:
            raise SnapshotError(
                f"expected a snapshot {_WITH[has]} the part {name!r}, as this trainer, "
                f"got one {_WITH[had]} it; make the trainer as it was."
            )
    saved = state["kinds"]
    for name, kind in _kinds(parts).items():
        if saved[name] != kind:
            raise SnapshotError(
                f"the snapshot's {name} is of the class {saved[name]}, this trainer's "
                f"of {kind}; make the trainer as it was."
            )


def _apply_random(states: list[Any], device: torch.device, rank: int) -> None:
    restore_random_states(RandomStates.of_plain(states[rank % len(states)]), device)
    if rank >= len(states):
        # A new process must not repeat the numbers of another.
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
            "expected a snapshot of this model, got one of another model: "
            f"{', '.join(differing[:4])}{' ...' if len(differing) > 4 else ''} differ."
        )


def _check_optimizer(saved: dict[str, Any], optimizer: Optimizer) -> None:
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise SnapshotError(
            f"expected an optimizer state with groups of {own} parameters, got groups "
            f"of {sizes}."
        )
