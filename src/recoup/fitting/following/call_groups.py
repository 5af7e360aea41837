"""Calls of a model, as far as the memory of a step depends on them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt

import torch
from torch import Tensor

from recoup.backend.memory.ledger import tensor_bytes
from recoup.backend.state.model_state import ModelState
from recoup.core.graph import Graph
from recoup.core.growth import Axis, Growth, resized
from recoup.core.plan import Plan
from recoup.core.segments import Segment

CallKey = tuple[tuple[str, torch.Size, torch.dtype], ...]
"""The path, the shape and the type of each input tensor."""


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """One call of the measured step."""

    key: CallKey
    size: dict[Axis, int]
    nbytes: int
    state: ModelState

    def trains_less_than(self, state: ModelState) -> bool:
        """Return whether a call in another state trains parameters that it did not."""
        return any(map(lt, self.state.trained, state.trained))


@dataclass(slots=True)
class CallGroup:
    """Calls that share a plan.

    Attributes:
        size: The largest of them that is planned for.
        plan: The plan; None: it is to be made.
        segments: The same as segments of the measured step.
        is_traced: A call of it was seen.
        is_warned: A warning said that it does not fit.
        excess_bytes: Bytes of its calls beyond the prediction.
        metered_steps: How many steps of it are still to be metered.
        differences: In words, what makes its step another one than the measured one,
            besides sizes.
    """

    size: dict[Axis, int]
    plan: Plan | None = None
    segments: tuple[Segment, ...] | None = None
    is_traced: bool = False
    is_warned: bool = False
    excess_bytes: int = 0
    metered_steps: int = 0
    differences: list[str] = field(default_factory=list[str])

    def add_blocks(
        self, names: Iterable[str], nbytes: int, *, metered_steps: int
    ) -> None:
        """Plan and meter its steps again, with blocks that were not measured."""
        shown = ", ".join(islice(names, 3))
        self.differences.append(f"{shown} ran, which did not in the measured step")
        self.excess_bytes += nbytes
        self.metered_steps = metered_steps
        self.plan = None


@dataclass(slots=True)
class CallCase:
    """Calls with the same shapes, of a model in the same state."""

    group: CallGroup
    size: dict[Axis, int]
    nbytes: int
    measured: int
    state: ModelState


class SizedSteps:
    """A measured step at other sizes."""

    def __init__(self, graph: Graph, measured: Sequence[MeasuredCall]) -> None:
        self._graph = graph
        self._measured = measured
        self._growths: dict[int, Growth] = {}

    def step_of(self, size: Mapping[Axis, int], case: CallCase) -> Graph:
        """Return the step with a call of this size."""
        measured = self._measured[case.measured]
        if size == measured.size:
            return self._graph
        growth = self.growth_of(case.measured)
        added_bytes = max(0, case.nbytes - measured.nbytes)
        return resized(self._graph, growth.predicted(size), added_bytes=added_bytes)

    def growth_of(self, number: int) -> Growth:
        """Return how storages grow with the size of a call."""
        growth = self._growths.get(number)
        if growth is None:
            storages = [storage.bytes for storage in self._graph.storages]
            growth = Growth(self._measured[number].size, storages)
            self._growths[number] = growth
        return growth


def key_of(found: Sequence[tuple[str, Tensor]]) -> CallKey:
    """Return the shapes of input tensors that may say how large a step is."""
    return tuple([(path, t.shape, t.dtype) for path, t in found if _counts(t)])


def _counts(tensor: Tensor) -> bool:
    """Return whether the shape of a tensor may say how large a step is."""
    return tensor.dim() > 0 and tensor.numel() > 1


def size_of(key: CallKey) -> dict[Axis, int]:
    """Return the length of each axis, and the bytes of an element as axis -1."""
    found: dict[Axis, int] = {}
    for path, shape, dtype in key:
        found.update(((path, axis), length) for axis, length in enumerate(shape))
        found[path, -1] = dtype.itemsize
    return found


def bytes_of(found: Sequence[tuple[str, Tensor]]) -> int:
    """Return the bytes of input tensors."""
    return sum(tensor_bytes(tensor) for _, tensor in found)


def _argument(path: str) -> str:
    """Return an input's path as a user writes it: `0.1` is the second argument."""
    kind, _, rest = path.partition(".")
    return f"args.{rest}" if kind == "0" else rest


def describe_size(case: CallCase, measured: MeasuredCall) -> str:
    """Return in words which axes differ from the measured call."""
    changed = [
        f"{_argument(path)} axis {axis}: {measured.size[path, axis]} -> {length}"
        for (path, axis), length in case.size.items()
        if length != measured.size[path, axis]
    ]
    return f"other sizes ({', '.join(changed[:4])})" if changed else "other tensors"
