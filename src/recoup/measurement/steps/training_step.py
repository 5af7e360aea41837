"""A training step (model, batch, loss) that can be repeated without lasting changes."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recoup.backend.autograd.hook_stacks import StacksSnapshot
from recoup.backend.state.attributes import Numbers
from recoup.backend.state.held_gradients import HeldGradients
from recoup.backend.state.snapshots import (
    Buffers,
    Gradients,
    StateSnapshot,
    WrittenTensors,
    carry_gradients,
    takes_gradient,
)
from recoup.backend.state.trees import tensors_within
from recoup.backend.state.walk import hooks_of, reach
from recoup.core.callers import calls_user
from recoup.core.restoring import removing, restoring
from recoup.engine.applied.applied_plan import refuse_scripted
from recoup.engine.recording.active import abandon_above, depth
from recoup.engine.recording.observers import observers, unsubscribe
from recoup.errors import UsageError


class Repetition:
    """The state in which every run of one step begins, restored at the end.

    A plan is made for one step and checked on another, so both must do the same. That
    may depend on random numbers (blocks that are skipped), buffers (experts chosen by a
    bias) and counters (warm-up).

    Buffers and counters start as the first run left them, because it may have
    initialised something. Copies of buffers are on the CPU, so as not to take memory of
    the step. Other tensors are copied only if the first run writes to them.

    Examples:
        >>> drop = nn.Dropout()
        >>> repetition = Repetition(drop, lambda: None)
        >>> drops = []
        >>> for _ in range(3):
        ...     repetition.begin()
        ...     drops.append(drop(torch.ones(100)))
        >>> torch.equal(drops[0], drops[1]), torch.equal(drops[0], drops[2])
        (True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], object],
        batch: Any = None,
        devices: Iterable[torch.device] = (),
    ) -> None:
        self._things = (model, run, batch)
        known: list[Tensor] = reach(*self._things, kind=Tensor)
        hooks = [hooks for tensor in known for hooks in hooks_of(tensor)]
        known += reach(*hooks, kind=Tensor)
        self._gradients = Gradients(filter(takes_gradient, known))
        self._before = StateSnapshot(
            *self._things, devices=devices, with_attributes=True, on_cpu=True
        )
        self._held = HeldGradients(self._before.modules)
        copied = set(map(id, self._before.buffers.tensors))
        self._written = WrittenTensors(t for t in known if id(t) not in copied)
        self._set_up: tuple[Buffers, Numbers] | None = None
        self._runs = 0

    def take_gradients(self) -> None:
        """Remove the gradients until `restore`."""
        self._gradients.take_off()
        self._held.drop()

    def watched(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return the step as a function that observes the writes of its first run."""

        def watched_run() -> object:
            with self._written.watched():
                return run()

        return watched_run

    def begin(self, *, waiting: bool = True) -> None:
        """Restore the state for the next run, without gradients.

        Args:
            waiting: Whether to restore buffers and written tensors, for which the host
                waits for an accelerator.
        """
        self.drop_gradients()
        if waiting:
            if self._runs == 1:
                modules = self._before.modules
                buffers = Buffers(modules, on_cpu=True)
                self._set_up = buffers, Numbers(*self._things, *modules)
            elif self._set_up is not None:
                self._set_up[0].restore()
            self._runs += 1
            self._written.restore()
        if self._set_up is not None:
            self._set_up[1].restore()
        self._before.generators.restore()

    def drop_gradients(self) -> None:
        """Drop the gradients of a run."""
        self._gradients.drop()
        self._held.drop()

    def carry_gradients(self) -> None:
        """Set zero gradients for the next run on leaves that got gradients before."""
        self._gradients.carry()
        self._held.carry()

    def restore(self) -> None:
        """Restore the state from before the first run."""
        self._gradients.restore()
        self._held.restore()
        self._before.restore()
        self._written.restore()


_DEFAULTS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One training step that can be repeated.

    Attributes:
        model: The model that is trained.
        run: Function that runs forward and backward once.
        batch: The tensors it runs on, as a pytree; they count as resident.
        device: The device it runs on.
        captured: Other modules and tensors that the step refers to; they count as
            resident.
        accumulate: Whether gradients of earlier steps exist when it begins.
        repetition: The state in which its runs begin, inside `untouched`.
    """

    model: nn.Module
    run: Callable[[], object]
    batch: Any
    device: torch.device
    captured: tuple[nn.Module | Tensor, ...] = ()
    accumulate: bool = False
    repetition: Repetition | None = None

    def begin(self, *, waiting: bool = True) -> None:
        """Restore the state for the next run, so that it repeats the same step.

        Removes gradients, or with `accumulate` sets zero gradients for the model's
        parameters and all other leaves that got gradients in earlier runs.

        Args:
            waiting: Whether the host may wait for the device; False leaves buffers as
                they are.
        """
        if self.repetition is not None:
            self.repetition.begin(waiting=waiting)
        else:
            self.model.zero_grad(set_to_none=True)
        if self.accumulate:
            carry_gradients(self.model.parameters())
            if self.repetition is not None:
                self.repetition.carry_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients of a run."""
        if self.repetition is not None:
            self.repetition.drop_gradients()
        else:
            self.model.zero_grad(set_to_none=True)

    def resident(self) -> list[Tensor | nn.Module]:
        """Return the known tensors and modules that are in memory before the step."""
        return [self.model, *tensors_within(self.batch), *self.captured]


def training_step(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    device: torch.device | str | None = None,
    accumulate: bool = False,
) -> TrainingStep:
    """Return the step that the arguments of `fit` and `measure` describe; see `fit`.

    Raises:
        UnsupportedError: A part of the model cannot have hooks.
        UsageError: The arguments describe no step.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model, got {type(model).__name__}.")
    refuse_scripted(model.named_modules())
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise UsageError(
            f"expected a {type(model).__name__} whose parameters have shapes, got "
            "lazy ones, which get theirs at its first call; call it on a batch first."
        )
    for name, function in (("loss", loss), ("step", step)):
        if function is not None and not callable(function):
            raise UsageError(
                f"expected a function for {name}=, got {function!r} of type "
                f"{type(function).__name__}."
            )
    where = usable_device(device) if device is not None else device_of(model)
    if step is not None:
        if batch is not None or loss is not None:
            raise UsageError("expected a step, or a batch with a loss, got both.")
        captured = tuple(reach(step, kind=(nn.Module, Tensor)))
        return TrainingStep(model, step, None, where, captured, accumulate)
    if batch is None:
        raise UsageError(
            "expected batch=, or step= with a function that runs forward and "
            "backward, got neither."
        )
    loss_of_a_call = loss_function(model, batch, loss)

    @calls_user
    def run() -> None:
        loss_of_a_call().backward()

    found = tensors_within(batch)
    captured = tuple(reach(loss, kind=(nn.Module, Tensor)))
    return TrainingStep(model, run, found, where, captured, accumulate)


def loss_function(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None
) -> Callable[[], Tensor]:
    """Return a function that calls the model and returns only the loss.

    As in a training loop, the model's output is released before backward.

    Raises:
        UsageError: The batch is no pair, but the loss takes a target.
    """
    inputs, target = batch, None
    with_target = loss is not None and takes_target(loss)
    if with_target:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(
                "expected batch= as a pair (inputs, target) for a loss of two "
                f"arguments, the output and the target, got {type(batch).__name__}."
            )
        inputs, target = batch

    @calls_user
    def call() -> Tensor:
        output = call_model(model, inputs)
        if loss is None:
            return _check_loss(loss_in(output))
        return _check_loss(loss(output, target) if with_target else loss(output))

    return call


@contextmanager
def untouched(step: TrainingStep) -> Iterator[TrainingStep]:
    """Yield a step that can be repeated; restore all state at the end.

    Covers parameters, gradients, buffers, Python attributes and generators of the
    model, the batch, and everything else that the step reaches; see `Repetition`.

    After each `TrainingStep.begin` it is the same step again, with the same random
    numbers. The user's gradients are removed as by `zero_grad`; those on an accelerator
    move to the CPU, to make room for a step's new ones. Replicas of the model exchange
    neither gradients nor buffers.

    Raises:
        UsageError: A run calls an optimizer of the model.
    """
    repetition = Repetition(step.model, step.run, step.batch, _devices_of(step))
    stacks, opened, known = StacksSnapshot(), depth(), observers()

    def restore() -> None:
        abandon_above(opened)
        stacks.restore()
        for observer in observers():
            if observer not in known:
                unsubscribe(observer)
        repetition.restore()

    with restoring(restore), _optimizers_refused(step.model), _unsynchronised(step):
        repetition.take_gradients()
        yield replace(step, run=repetition.watched(step.run), repetition=repetition)


@contextmanager
def _unsynchronised(step: TrainingStep) -> Iterator[None]:
    """Let replicas of a model exchange nothing: each process runs as often as it needs.

    An exchange that only some take part in would meet one of their training steps. Not
    for a static graph, whose first backward must synchronise.
    """
    modules = [each for each in step.resident() if isinstance(each, nn.Module)]
    parts = dict.fromkeys(part for each in modules for part in each.modules())
    with ExitStack() as stack:
        for part in parts:
            if isinstance(part, DistributedDataParallel) and not part.static_graph:
                synchronises = part.require_forward_param_sync
                stack.callback(
                    setattr, part, "require_forward_param_sync", synchronises
                )
                stack.enter_context(part.no_sync())
                part.require_forward_param_sync = False
        yield


@contextmanager
def _optimizers_refused(model: nn.Module) -> Iterator[None]:
    """Raise if an optimizer steps on the model, which every run would train."""
    mine = {id(parameter) for parameter in model.parameters()}

    def refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        groups = optimizer.param_groups
        if any(id(each) in mine for group in groups for each in group["params"]):
            raise UsageError(
                "expected a step of forward and backward, got one that calls "
                f"{type(optimizer).__name__}.step, which would train the model while "
                "it is measured; move that call out of the step, and give the "
                "optimizer as optimizer=."
            )

    with removing() as handles:
        handles.append(register_optimizer_step_pre_hook(refuse))
        yield


@contextmanager
def gradients_followed(
    parameters: Mapping[str, nn.Parameter], note: Callable[[str], object]
) -> Iterator[None]:
    """Call `note` with a parameter's path whenever backward adds to its gradient."""

    def added(name: str, parameter: Tensor) -> None:  # a hook must return None
        del parameter
        note(name)

    with removing() as handles:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                hook = partial(added, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        yield


def _devices_of(step: TrainingStep) -> list[torch.device]:
    model = step.model
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return [device for device in {*found, step.device} if device.type != "meta"]


def usable_device(device: torch.device | str) -> torch.device:
    """Return the named device, after checking that it can be used.

    Raises:
        UsageError: It does not exist, or is the meta device.

    Examples:
        >>> usable_device("cpu")
        device(type='cpu')
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {device!r} cannot be used here: {reason}.") from error
    if found.type == "meta":
        raise UsageError(
            "expected a device that computes, got the meta device; name a real one, or "
            "measure dry: recoup.measure(..., dry=True)."
        )
    return found


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer, or the CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


@calls_user
def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a tuple as positional or a mapping as keyword arguments."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def takes_target(loss: Callable[..., Any]) -> bool:
    """Return whether a loss takes the output and a target."""
    target = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.kind in _DEFAULTS and p.default is p.empty]
    return len(needed) >= 2


def loss_in(output: Any) -> Any:
    """Return the loss in a model's output: the output itself or its `loss`."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def _check_loss(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and not loss.requires_grad:
        raise UsageError(
            "expected a loss that depends on trained parameters, got one that requires "
            "no gradient; compute it outside `torch.no_grad`, with parameters that "
            "require gradients."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(
            f"expected a loss of one element, got {shape}; give loss= with a function "
            "that computes it from the model's output."
        )
    return loss
