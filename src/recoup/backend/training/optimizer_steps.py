"""Joint optimizers, and optimizer steps that bypass version counters."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recoup.backend.autograd.wrappers import inner_tensors, is_wrapper
from recoup.backend.memory.storages import version_of


class JointOptimizer(Optimizer):
    """Step several optimizers as one, as for Muon and AdamW in one model.

    Its groups and state are the members' own dictionaries, in order. A gradient scaler
    decides for all members at once whether to skip a step.

    Args:
        members: The optimizers; no parameter may be in two of them.

    Raises:
        ValueError: A parameter is in two of them.

    Examples:
        >>> import torch
        >>> weight, bias = torch.nn.Linear(2, 1).parameters()
        >>> sgd = torch.optim.SGD([weight], lr=0.1)
        >>> joint = JointOptimizer([sgd, torch.optim.Adam([bias], lr=0.2)])
        >>> [group["lr"] for group in joint.param_groups]
        [0.1, 0.2]
    """

    # Not `super().__init__`: it would create separate groups, state and hooks.
    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = list(members)
        self.defaults: dict[str, Any] = {}
        parameters = parameters_of(self)
        if len({id(parameter) for parameter in parameters}) < len(parameters):
            raise ValueError("a parameter is in two optimizers")

    @property
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> list[dict[str, Any]]:
        """The groups of all members, including groups added later."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> "defaultdict[Tensor, Any]":
        """The current state of all members."""
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for member in self.members:
            found.update(member.state)
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member, in order."""
        loss = None if closure is None else closure()
        for member in self.members:
            member.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 (torch's)
        """Clear the gradients of every member's parameters."""
        for member in self.members:
            member.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one optimizer would, parameters numbered in order."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in self.members:
            first = sum(len(group["params"]) for group in groups)
            own = member.state_dict()
            state |= {first + number: each for number, each in own["state"].items()}
            groups += [
                {**group, "params": [first + number for number in group["params"]]}
                for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of a joint optimizer with equal members."""
        groups, first = list(state_dict["param_groups"]), 0
        for member in self.members:
            count, has = len(parameters_of(member)), len(member.param_groups)
            own, groups = groups[:has], groups[has:]
            state = {
                number - first: each
                for number, each in state_dict["state"].items()
                if first <= number < first + count
            }
            numbered = [
                {**group, "params": [number - first for number in group["params"]]}
                for group in own
            ]
            member.load_state_dict({"state": state, "param_groups": numbered})
            first += count

    def __repr__(self) -> str:
        return " and ".join(map(repr, self.members))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def joined(optimizers: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return the given optimizer, or a joint one for several."""
    if isinstance(optimizers, Optimizer):
        return optimizers
    members = list(optimizers)
    return members[0] if len(members) == 1 else JointOptimizer(members)


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return a joint optimizer's members, or the optimizer itself."""
    return optimizer.members if isinstance(optimizer, JointOptimizer) else [optimizer]


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return what a framework has wrapped, or the optimizer itself.

    Lightning, Fabric and accelerate return wrappers that are optimizers too.
    """
    inner = getattr(optimizer, "optimizer", None)
    return inner_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


class StepWatch:
    """Counts optimizer steps as writes while any region waits for its backward.

    Fused optimizers, and those of other libraries, bypass the version counters of
    parameters, and a step on a DTensor bypasses that of its local tensor. Plain
    autograd then silently uses the new weights, and so would a replay.

    Free while no region waits. Otherwise a step reads each parameter's version twice,
    about a tenth of a microsecond each.
    """

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self._versions: dict[int, list[int]] = {}
        self._is_on = False

    def begin(self, waiter: object) -> None:
        """Watch until `end` is called with this object; its id must stay unique."""
        self._waiting.add(id(waiter))
        if not self._is_on:
            self._is_on = True
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)

    def end(self, waiter: object) -> None:
        """Stop watching for this object. Takes no lock: finalizers call it."""
        self._waiting.discard(id(waiter))

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._waiting and not is_compiling():
            versions = [version_of(each) for _, each in _watched(optimizer)]
            self._versions[id(optimizer)] = versions

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if is_compiling():
            return
        before = self._versions.pop(id(optimizer), None)
        if before is None:
            return
        watched = _watched(optimizer)
        if len(before) != len(watched):
            return
        uncounted = [
            tensor
            for (parameter, tensor), version in zip(watched, before, strict=True)
            if parameter.grad is not None and version_of(tensor) == version >= 0
        ]
        if uncounted and self._waiting:
            increment_version(uncounted)


def _watched(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a parameter and a tensor that a step on it writes to.

    A step on a wrapper such as DTensor increments the wrapper's version, but not those
    of its inner tensors, which `to_local()` returns.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for parameter in parameters_of(optimizer):
        found.append((parameter, parameter))
        if type(parameter) is not Parameter and is_wrapper(parameter):
            found += [(parameter, each) for each in inner_tensors(parameter)]
    return found


STEPS = StepWatch()
