"""Steps that are interrupted in recoup's own code, and what must hold afterwards."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from recoup import (
    CheckpointScope,
    apply_plan,
    checkpoint,
    checkpoint_module,
    uncheckpoint_module,
)
from recoup.checkpointing import is_recomputing
from recoup.core.plan import Place, Plan, Span
from recoup.engine.recording.active import open_regions
from tests.support.twin import leftovers

X = torch.linspace(-1, 1, 8).reshape(2, 4)
PLAN = Plan(
    (
        Span(Place("0", 0, entering=True), Place("1", 0, entering=False)),
        Span(Place("2", 0, entering=True), Place("3", 0, entering=False)),
    )
)

Step = Callable[[], Sequence[Tensor]]


def model() -> nn.Sequential:
    parts = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()
    net = nn.Sequential(*parts)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            count = parameter.numel()
            values = torch.linspace(-1, 1 + number, count)
            parameter.copy_(values.reshape(parameter.shape))
    return net


def gradients(net: nn.Module, out: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(out.sum(), list(net.parameters()))


def scope_step() -> Step:
    net = model()

    def step() -> Sequence[Tensor]:
        with CheckpointScope("block", verify="off"):
            out = net(X)
        return gradients(net, out)

    return step


def nested_step() -> Step:
    net = model()

    def step() -> Sequence[Tensor]:
        with CheckpointScope("outer", verify="off"):
            with CheckpointScope("inner", verify="always"):
                hidden = net[1](net[0](X))
            out = net[3](net[2](hidden))
        return gradients(net, out)

    return step


class RandomStep:
    """A step whose replay draws numbers.

    Attributes:
        generator: The state of the generator when the backward began, if it did.
    """

    def __init__(self) -> None:
        self._net = model()
        self.generator: Tensor | None = None

    def __call__(self) -> Sequence[Tensor]:
        net = self._net
        self.generator = None
        torch.manual_seed(3)
        with CheckpointScope("random", verify="off"):
            hidden = net[1](net[0](X))
            # Ones, but a replay has to draw them.
            hidden = hidden * (torch.rand_like(hidden) >= 0).float()
            out = net[3](net[2](hidden))
        torch.rand(1)
        self.generator = torch.get_rng_state()
        return gradients(net, out)


def module_step() -> Step:
    net = checkpoint_module(model(), verify="off")
    return lambda: gradients(net, net(X))


def function_step() -> Step:
    net = model()
    return lambda: gradients(net, checkpoint(net, X))


def planned_step() -> Step:
    net = model()
    apply_plan(net, PLAN, verify="off")
    return lambda: gradients(net, net(X))


def applied_step() -> Step:
    net = model()

    def step() -> Sequence[Tensor]:
        uncheckpoint_module(net)  # of a step that was interrupted
        applied = apply_plan(net, PLAN, verify="off")
        found = gradients(net, net(X))
        applied.remove()
        return found

    return step


STEPS: dict[str, Callable[[], Step]] = {
    "scope": scope_step,
    "nested": nested_step,
    "random": RandomStep,
    "module": module_step,
    "function": function_step,
    "planned": planned_step,
    "applied": applied_step,
}


def write_view(y: Tensor) -> None:
    y[:, 1:].copy_(y[:, :3].detach() * 2)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "all": lambda y: y.mul_(3),
    "view": write_view,
    "random": lambda y: y.detach().normal_(),
    "list": lambda y: torch.ops.aten._foreach_mul_([y], 2.0),
    "copy": lambda y: y.detach().copy_(X),
}


WritePlace = Literal["own", "nested", "outside"]
WRITE_PLACES: tuple[WritePlace, ...] = get_args(WritePlace)


class CaughtStep:
    """A step that goes on after an interrupt of a write inside its region.

    Args:
        write: Writes to a tensor.
        place: Whether that is of the region, and written to in a region inside it.

    Attributes:
        found: The gradient by what was written to, if the step came to an end.
        expected: What that is, by its contents.
    """

    def __init__(self, write: Callable[[Tensor], object], place: WritePlace) -> None:
        self._write = write
        self._place = place
        self.found: Tensor | None = None
        self.expected: Tensor | None = None

    def __call__(self) -> None:
        self.found = self.expected = None
        y = X.clone().requires_grad_() * 1
        with CheckpointScope("outer", verify="off"):
            y = y @ torch.eye(4) if self._place != "outside" else y
            y.detach().sin()
            nested = self._place == "nested"
            with (
                contextlib.suppress(KeyboardInterrupt),
                CheckpointScope("inner", enabled=nested, verify="off"),
            ):
                self._write(y)
            again = y * 1
            z = (again * again).sum()
        expected = 2 * y.detach()
        self.found, self.expected = torch.autograd.grad(z, y)[0], expected

    def is_right(self) -> bool:
        """Return whether the gradient is that of the contents, if there is one."""
        if self.found is None or self.expected is None:
            return True
        return torch.equal(self.found, self.expected)


def faults(step: Step, expected: Sequence[Tensor]) -> list[str]:
    """List what is not whole after an interrupt: a plain step, then the step itself."""
    found: list[str] = []
    before = getattr(step, "generator", None)
    if before is not None and not torch.equal(before, torch.get_rng_state()):
        found.append("backward has moved the generator")
    plain = model()
    if not all(same(gradients(plain, plain(X)), expected) for _ in range(2)):
        found.append("a plain step gives other gradients")
    found += leftovers()
    if is_recomputing():
        found.append("a replay seems to run")
    if not same(step(), expected):
        found.append("the step gives other gradients")
    found += leftovers()
    if open_regions():
        found.append("a region is open")
    return found


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))
