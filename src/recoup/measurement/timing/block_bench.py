"""Measure one block in isolation: bytes and time of its options and kernels."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from recoup.backend.autograd.autocast import AutocastState, autocast_as, autocast_states
from recoup.backend.compiler.joint_graphs import JointGraph, KernelCall, TensorSpec
from recoup.backend.compiler.stored_numbers import StoredNumbers
from recoup.backend.memory.ledger import storages_in
from recoup.backend.memory.meters import interval_meter
from recoup.backend.state.trees import leaves, map_leaves, tensors
from recoup.core.compiled_plan import BlockOption, JointForward
from recoup.engine.applied.compiled_blocks import signature_of
from recoup.measurement.steps.training_step import TrainingStep
from recoup.measurement.timing.pace import seconds_of

Forward = Callable[..., Any]
Result = TypeVar("Result")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class SampleCall:
    """A call of a block: detached copies of its arguments.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        autocast: The autocast settings.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[AutocastState, ...] = ()

    def run(self, function: Callable[..., Result]) -> Result:
        """Call a function with the arguments, under the same autocast."""
        with autocast_as(self.autocast):
            return function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class BlockKinds:
    """The blocks of a step, grouped so that each kind can share compiled code.

    Attributes:
        kinds: The kind's number of each block, by path.
        samples: A call of the first block of each kind.
        refused: Reasons for the blocks that are not compiled.
    """

    kinds: Mapping[str, int]
    samples: Sequence[tuple[str, SampleCall]]
    refused: Mapping[str, str]


def sample_calls(step: TrainingStep, blocks: Mapping[str, nn.Module]) -> BlockKinds:
    """Run a step once; return its blocks by kind, with a sample call of each kind."""
    kinds: dict[str, int] = {}
    numbers: dict[Hashable, int] = {}
    samples: list[tuple[str, SampleCall]] = []
    refused: dict[str, str] = {}

    def note(
        name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.is_grad_enabled() or name in kinds or name in refused:
            return
        foreign = [
            leaf
            for leaf in leaves((args, kwargs))
            if not isinstance(leaf, (*_PLAIN, Tensor))
        ]
        if foreign:
            refused[name] = _why_refused(foreign[0])
            return
        if not any(
            t.requires_grad for t in (*tensors((args, kwargs)), *block.parameters())
        ):
            refused[name] = "nothing in it gets a gradient"
            return
        autocast = autocast_states([step.device.type])
        if not any(state.enabled for state in autocast):
            autocast = ()
        signature = _signature((args, kwargs))
        key = (type(block), tuple(signature_of(block)), signature, autocast)
        if key not in numbers:
            numbers[key] = len(numbers)
            args, kwargs = map_leaves(_copied, (args, kwargs))
            samples.append((name, SampleCall(args, kwargs, autocast)))
        kinds[name] = numbers[key]

    with ExitStack() as stack:
        for name, block in blocks.items():
            handle = block.register_forward_pre_hook(
                lambda block, args, kwargs, name=name: note(name, block, args, kwargs),
                with_kwargs=True,
            )
            stack.callback(handle.remove)
        step.begin()
        step.run()
    for name in blocks:
        if name not in kinds:
            refused.setdefault(name, "the step does not call it with gradients")
    return BlockKinds(kinds, samples, refused)


def _why_refused(argument: object) -> str:
    kind = type(argument).__name__
    advice = ""
    if kind.endswith("Cache"):
        advice = "; training needs none: set model.config.use_cache = False"
    return (
        f"it is called with a {kind}, whose state a compiled block may change{advice}"
    )


def _signature(tree: Any) -> Hashable:
    def described(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            flags = (leaf.dtype, leaf.device, leaf.requires_grad)
            return (tuple(leaf.shape), leaf.stride(), *flags)
        return leaf

    return repr(map_leaves(described, tree))


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copy = leaf.detach().clone(memory_format=torch.preserve_format)
    return copy.requires_grad_(leaf.requires_grad)


_IN_A_ROW = 10


def _seconds_in_a_row(call: Callable[[], object], device: torch.device) -> float:
    """Return the time per call in a row of calls, as in training.

    On an accelerator a single call might measure launch latency only. A CPU runs one.
    """
    calls = 1 if device.type == "cpu" else _IN_A_ROW

    def row() -> None:
        for _ in range(calls):
            call()

    return seconds_of(row, device) / calls


class BlockBench:
    """A block with a sample call, to measure its options.

    Between measurements the call's tensors are on the CPU: on an accelerator they would
    count in the peaks of whole steps.
    """

    def __init__(
        self, block: nn.Module, call: SampleCall, device: torch.device
    ) -> None:
        self._block = block
        self._call = call
        self._device = device
        self._gradients: list[Tensor] = []
        self.park()

    def park(self) -> None:
        """Move the call to the CPU."""
        self._move(torch.device("cpu"))

    def unpark(self) -> None:
        """Move the call to the device."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        given = (self._call.args, self._call.kwargs)
        args, kwargs = map_leaves(lambda leaf: _moved(leaf, device), given)
        self._call = SampleCall(args, kwargs, self._call.autocast)
        self._gradients = [gradient.to(device) for gradient in self._gradients]

    def run(self, forward: Forward) -> list[Tensor]:
        """Run forward and backward once; return the gradients of all leaves."""
        self._clear()
        outputs = _differentiable(self._call.run(forward))
        if not self._gradients:
            self._gradients = [torch.randn_like(output) for output in outputs]
        end = _End.apply(self._gradients, *outputs)
        del outputs
        end.backward()
        found = [t.grad for t in self._leaves() if t.grad is not None]
        self._clear()
        return found

    def seconds(self, forwards: Sequence[Forward], *, rounds: int) -> list[float]:
        """Return the shortest time of each option, measured in turns."""
        times: list[list[float]] = [[] for _ in forwards]
        for _ in range(rounds):
            for forward, found in zip(forwards, times, strict=True):
                self.run(forward)
                call = partial(self.run, forward)
                found.append(_seconds_in_a_row(call, self._device))
        return [min(found) for found in times]

    def measure(self, forward: Forward) -> BlockOption:
        """Return the bytes of an option of the block, without its time.

        The inputs stay alive until backward ends, as if other blocks also held them.
        """
        self.run(forward)
        with interval_meter(self._device) as meter:
            args, kwargs = map_leaves(_fresh, (self._call.args, self._call.kwargs))
            call = SampleCall(args, kwargs, self._call.autocast)
            meter.mark("forward")
            outputs = _differentiable(call.run(forward))
            given = {id(tensor) for tensor in tensors((args, kwargs))}
            new = [output for output in outputs if id(output) not in given]
            storages = storages_in(new)
            output_bytes = sum(storage.nbytes() for storage in storages)
            made = [StorageWeakRef(storage) for storage in storages]
            for place in range(len(new)):
                new[place].register_hook(lambda _: meter.mark("backward"))
            end = _End.apply(self._gradients, *outputs)
            del outputs, new, storages
            saves_output = not all(ref.expired() for ref in made)
            meter.mark("held")
            end.backward()
            del end
        self._clear()
        # Each output marks the start of backward when its gradient arrives.
        backward = [i for i in meter.intervals if i.mark == "backward"]
        marks = {interval.mark: interval for interval in meter.intervals}
        begin, held = marks["forward"], marks["held"]
        held_bytes = held.live_bytes - begin.live_bytes
        return BlockOption(
            held_bytes=held_bytes - (output_bytes if saves_output else 0),
            saves_output=saves_output,
            forward_bytes=begin.peak_bytes - begin.live_bytes,
            backward_bytes=max(interval.peak_bytes for interval in backward)
            - backward[-1].live_bytes,
            seconds=0.0,
        )

    def _leaves(self) -> list[Tensor]:
        given = tensors((self._call.args, self._call.kwargs))
        return [*(t for t in given if t.requires_grad), *self._block.parameters()]

    def _clear(self) -> None:
        for leaf in self._leaves():
            leaf.grad = None


def _moved(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor) or leaf.device == device:
        return leaf
    moved = torch.empty_strided(
        leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device
    )
    return moved.copy_(leaf.detach()).requires_grad_(leaf.requires_grad)


def _fresh(leaf: Any) -> Any:
    """Return an input as an earlier block would pass it: not as a leaf."""
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return leaf.clone(memory_format=torch.preserve_format)
    return leaf


def _differentiable(outputs: Any) -> list[Tensor]:
    return [t for t in tensors(outputs) if t.requires_grad]


class _End(torch.autograd.Function):
    """Ends a graph: passes gradients to outputs without keeping the outputs alive."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients[: len(outputs)]
        return torch.zeros((), device="cpu", requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(gradient.clone() for gradient in ctx.gradients))


_FUSED = 0.02
"""The cost of a fused operator, as a share of its memory traffic's time: it runs in
registers, in a kernel that runs anyway."""

_COPY_BYTES = 1 << 26
_REPEATS = 3
_COPY_REPEATS = 10
"""The copy's time is a part of all costs, and one disturbed by others would stay."""


class KernelTimes:
    """Times kernels on tensors of the same geometry.

    Args:
        device: The device.
        stored: What is known about kernels.
    """

    def __init__(
        self, device: torch.device, stored: StoredNumbers | None = None
    ) -> None:
        self._device = device
        self._stored = stored or StoredNumbers(None)
        seconds = self._stored.number("copy", self._copy_seconds)
        self.bytes_per_second = 2 * _COPY_BYTES / seconds

    def _copy_seconds(self) -> float:
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return self._timed(lambda: target.copy_(source), _COPY_REPEATS)

    def seconds(self, call: KernelCall, traffic_bytes: int) -> float:
        """Return a kernel's time, estimated from traffic if it cannot run alone."""

        def measured() -> float:
            try:
                return self._run(call)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return traffic_bytes / self.bytes_per_second

        key = f"{call.target}{call.args}{call.kwargs}"
        return self._stored.number(key, measured)

    @torch.no_grad()
    def _run(self, call: KernelCall) -> float:
        args = _made(call.args, self._device)
        return self._timed(lambda: call.target(*args, **call.kwargs))

    def _timed(self, function: Callable[[], object], repeats: int = _REPEATS) -> float:
        function()
        return min(_seconds_in_a_row(function, self._device) for _ in range(repeats))


def costed(joint: JointGraph, times: KernelTimes) -> JointForward:
    """Return a block's forward with the costs of recomputing and saving each value."""
    speed = times.bytes_per_second
    operations = []
    for number, operation in enumerate(joint.graph.operations):
        call, traffic = joint.calls[number], joint.traffic[number]
        if number in joint.once:
            seconds = 0.0
        elif call is not None:
            seconds = times.seconds(call, traffic)
        else:
            written = sum(
                joint.graph.bytes_of(v) for v in operation.makes if v in joint.whole
            )
            seconds = (_FUSED * traffic + 2 * written) / speed
        operations.append(replace(operation, seconds=seconds))
    graph = replace(joint.graph, operations=tuple(operations))
    save_seconds = []
    for value in range(len(graph.values)):
        producer = graph.values[value].producer
        is_written = value in joint.materialized or producer in joint.once
        passes = 1 if is_written else 2
        nbytes = 0 if value in joint.resident else graph.bytes_of(value)
        save_seconds.append(passes * nbytes / speed)
    return JointForward(
        joint.digest,
        graph,
        joint.names,
        joint.demanded,
        joint.resident,
        tuple(save_seconds),
    )


def _made(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, TensorSpec):
        made: Tensor = argument.make(device)
        return made
    if isinstance(argument, list | tuple):
        return type(argument)(_made(item, device) for item in argument)
    return argument
