"""Measure a step of compiled blocks: the bytes in use around each of them."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from recoup.backend.memory.ledger import StorageLedger, storages_in
from recoup.backend.memory.meters import Interval, interval_meter
from recoup.backend.state.trees import tensors
from recoup.core.compiled_plan import BlockFrame, BlockOption, BlockStep
from recoup.core.graph import BEFORE, Boundary, Graph, Operation, Storage
from recoup.errors import UnsupportedError
from recoup.measurement.steps.training_step import TrainingStep, gradients_followed

Event = Literal["enter", "leave", "backward", "after"]


@dataclass(frozen=True)
class StepMarks:
    """The marks of a step.

    Attributes:
        intervals: The bytes between marks; a mark is an event of a block.
        names: The blocks, in the order in which forward entered them.
        unheld_bytes: For each block, the bytes of outputs that were already freed when
            backward began.
        passes: For each pass its first interval, and, by parameter path, the interval
            in which the gradient was created, or `BEFORE` if it existed before the
            pass.
    """

    intervals: Sequence[Interval]
    names: tuple[str, ...]
    unheld_bytes: Mapping[str, int]
    passes: Sequence[tuple[int, Mapping[str, int]]]

    @property
    def peak_bytes(self) -> int:
        """The peak of the step."""
        return max(interval.peak_bytes for interval in self.intervals)


def resident_bytes(step: TrainingStep, resident: Sequence[object]) -> int:
    """Return the resident bytes that a meter starting from zero does not count."""
    if step.device.type != "cpu":
        return 0
    ledger = StorageLedger()
    ledger.add_all([*step.resident(), list(resident)])
    return ledger.live_bytes


def run_marked(
    step: TrainingStep,
    blocks: Mapping[str, nn.Module],
    *,
    resident: Sequence[object] = (),
) -> StepMarks:
    """Run a step once, and return the bytes in use around each block."""
    order: dict[str, None] = {}
    outputs: dict[str, list[tuple[StorageWeakRef, int]]] = {}
    unheld: dict[str, int] = {}
    made_by_blocks: list[weakref.ref[Tensor]] = []
    with ExitStack() as stack:
        step.begin()
        base = resident_bytes(step, resident)
        meter = interval_meter(step.device)

        parameters = dict(step.model.named_parameters())
        passes = _Passes(parameters)
        stack.enter_context(gradients_followed(parameters, passes.note_gradient))

        def mark(event: Event, name: str) -> None:
            passes.note(event)
            meter.mark((event, name))

        def enter(name: str, inputs: Any) -> None:
            order[name] = None
            mark("enter", name)
            first = next((t for t in tensors(inputs) if t.requires_grad), None)
            # The gradient of a block's output starts that block's backward instead.
            if first is not None and all(ref() is not first for ref in made_by_blocks):
                first.register_hook(lambda _: mark("after", name))

        def leave(name: str, inputs: Any, output: Any) -> None:
            passed = {id(tensor) for tensor in tensors(inputs)}
            made = [
                t for t in tensors(output) if t.requires_grad and id(t) not in passed
            ]
            made_by_blocks.extend(map(weakref.ref, made))
            storages = storages_in(made)
            outputs[name] = [(StorageWeakRef(s), s.nbytes()) for s in storages]
            for tensor in made:
                tensor.register_hook(lambda _: backward(name))
            mark("leave", name)

        def backward(name: str) -> None:
            if not unheld:
                for block, refs in outputs.items():
                    dead = (nbytes for ref, nbytes in refs if ref.expired())
                    unheld[block] = sum(dead)
            mark("backward", name)

        for name, block in blocks.items():
            for handle in (
                block.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: (
                        enter(name, (args, kwargs)) if torch.is_grad_enabled() else None
                    ),
                    with_kwargs=True,
                ),
                block.register_forward_hook(
                    lambda _, args, kwargs, output, name=name: (
                        leave(name, (args, kwargs), output)
                        if torch.is_grad_enabled()
                        else None
                    ),
                    with_kwargs=True,
                ),
            ):
                stack.callback(handle.remove)
        with meter:
            step.run()
    intervals = [
        Interval(i.mark, i.live_bytes + base, i.peak_bytes + base)
        for i in meter.intervals
    ]
    return StepMarks(intervals, tuple(order), unheld, passes.found)


class _Passes:
    """Collects the passes of a step for `StepMarks`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._interval = 0
        self._has_backward = False
        self.found: list[tuple[int, dict[str, int]]] = []
        self._begin()

    def note(self, event: Event) -> None:
        """Begin an interval, and a new pass if forward follows a backward."""
        self._interval += 1
        if event == "enter" and self._has_backward:
            self._begin()
        self._has_backward = self._has_backward or event == "backward"

    def _begin(self) -> None:
        self._has_backward = False
        carried = [n for n, p in self._parameters.items() if p.grad is not None]
        self.found.append((self._interval, dict.fromkeys(carried, BEFORE)))

    def note_gradient(self, name: str) -> None:
        """Record that a parameter gets its gradient."""
        self.found[-1][1].setdefault(name, self._interval)


def marked_graph(marks: StepMarks, step: Graph) -> Graph | None:
    """Return a marked step as a graph without anything to plan.

    Args:
        marks: The marks.
        step: The same step, measured without a compiler. One of its passes may
            represent several equal ones.

    Returns:
        The graph, with the passes of the measured step; None if they do not match.
    """
    starts = [first for first, _ in marks.passes]
    ends = [*starts[1:], len(marks.intervals)]
    found = [
        _pass_graph(marks.intervals[first:end], first, gradients)
        for (first, gradients), end in zip(marks.passes, ends, strict=True)
    ]
    order = step.order if len(step.order) > 1 else (0,) * len(found)
    if len(order) != len(found):
        return None
    passes = [
        replace(
            max(
                (graph for n, graph in zip(order, found, strict=True) if n == number),
                key=lambda graph: max(graph.other_bytes),
            ),
            roots=known.roots,
            order=(),
        )
        for number, known in enumerate(step.passes)
    ]
    return replace(passes[0], others=tuple(passes[1:]), order=step.order)


def _pass_graph(
    intervals: Sequence[Interval], first: int, gradients: Mapping[str, int]
) -> Graph:
    """Return the graph of one pass, with a moment for each interval.

    A gradient counts from the interval after its creation, because the peak of that
    interval may have been earlier.
    """
    events: list[Any] = [interval.mark for interval in intervals]
    half = next(
        (n for n, mark in enumerate(events) if mark and mark[0] == "backward"),
        len(events),
    )
    start_bytes = intervals[0].live_bytes
    held_bytes = 0
    if half < len(events):
        held_bytes = max(0, intervals[half].live_bytes - start_bytes)
    other_bytes = [interval.peak_bytes for interval in intervals]
    for moment in range(half - 1, min(half + 1, len(events))):
        other_bytes[moment] -= held_bytes
    return Graph(
        operations=(Operation("block", 0.0, (), ()),) * half,
        backward=len(events) - half,
        storages=(Storage(held_bytes, half - 1, half),),
        values=(),
        saves=(),
        boundaries=(Boundary(0, 0), Boundary(half, 0, entering=False)),
        other_bytes=tuple(other_bytes),
        gradients=tuple(
            (path, made if made == BEFORE else made - first + 1)
            for path, made in gradients.items()
        ),
    )


def block_step(
    marks: StepMarks,
    kinds: Mapping[str, int],
    references: Sequence[BlockOption],
    seconds: float,
) -> BlockStep:
    """Return the step of a marked run with the reference options.

    Raises:
        UnsupportedError: A block ran again before its backward.
    """
    names = marks.names
    numbers = {name: number for number, name in enumerate(names)}
    forward_peak = [0] * len(names)
    backward_peak = [0] * len(names)
    outside = [0] * (len(names) + 1)
    outstanding: set[int] = set()
    running: int | None = None
    for interval in marks.intervals:
        mark: Any = interval.mark or ("leave", "")
        event, name = mark
        number = numbers.get(name, -1)
        if running is not None:
            outstanding.discard(running)
            running = None
        if event == "enter":
            if number in outstanding:
                raise UnsupportedError(
                    f"the block {name!r} runs a second time before its backward. Use "
                    "compile=False for this step."
                )
            forward_peak[number] = max(forward_peak[number], interval.peak_bytes)
            continue
        if event == "backward":
            backward_peak[number] = max(backward_peak[number], interval.peak_bytes)
            running = number
            continue
        if event == "leave" and number >= 0:
            outstanding.add(number)
        # Blocks are counted as a prefix of forward's order: the bytes of a later block
        # also count for earlier ones that are done.
        count = max(outstanding, default=-1) + 1
        outside[count] = max(outside[count], interval.peak_bytes)
    return BlockStep(
        tuple(
            BlockFrame(
                kinds[name],
                references[kinds[name]],
                forward_peak[number],
                backward_peak[number],
                marks.unheld_bytes.get(name, 0),
            )
            for name, number in numbers.items()
        ),
        tuple(outside),
        seconds,
    )
