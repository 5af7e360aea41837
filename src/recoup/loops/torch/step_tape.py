"""Tapes: steps that ran with a graph, and the pull back through them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recoup.backend.autograd.saved_tensors import pull_gradients, recording
from recoup.backend.memory.storages import (
    geometry_of,
    has_storage,
    storage_address,
    version_of,
)
from recoup.loops.state_trees import Structure, unflatten
from recoup.loops.steps import Cotangents, KindError, LoopStep, Place, RecordedSteps
from recoup.loops.torch.captures import CapturedTensors, lost_gradient


@dataclass(slots=True)
class StepTape(RecordedSteps):
    """Steps that ran with a graph.

    Attributes:
        watched: The indices of the leaves before that are leaves of the graph.
    """

    watched: list[int] = field(default_factory=list)


def record(
    step: LoopStep,
    leaves: list[Any],
    structure: Structure,
    span: tuple[int, int],
    captures: CapturedTensors,
    *,
    in_place: bool,
) -> StepTape:
    """Run the steps of a span with a graph.

    A step that writes to its state (`in_place`) must not get the graph's leaves.
    """
    start, stop = span
    before, watched = _watched(leaves)
    passed = copied(before) if in_place else before
    writes = StateWrites(before, passed) if in_place else None
    tape = StepTape(start, stop, before, watched=watched)

    def watch(part: Any, place: Place) -> Any:
        assert step.feed is not None, "the part is of its input"
        if isinstance(part, Tensor) and step.feed.leaves[place[0]].requires_grad:
            return part.detach().requires_grad_()
        return part

    with recording():
        state = unflatten(structure, passed)
        if captures.sources is captures.tensors:
            tape.run(step, state, watch)
        else:
            with captures.replaced():
                tape.run(step, state, watch)
    if writes is not None:
        writes.seen()
    stray = captures.stray(_results(tape), _sources(tape))
    if stray is not None:
        raise lost_gradient(stray, f"the steps {start} to {stop - 1} ({step.name!r})")
    return tape


def pull(
    tape: StepTape, cotangents: Cotangents, captures: CapturedTensors, feed: Any
) -> None:
    """Pull cotangents back through a tape, in place.

    The sums of the captured tensors are fed to autograd as gradients that have already
    arrived. So uses of a tensor are summed in the order of the plain loop, and the
    result is bitwise the plain one, for any number of steps per tape.
    """
    results: list[Tensor] = []
    gradients: list[Tensor] = []
    _ask(tape.after, cotangents.state, results, gradients)
    if cotangents.outputs:
        for row, leaves in enumerate(tape.outputs, tape.start):
            parts = [None if w is None else w[row] for w in cotangents.outputs]
            _ask(leaves, parts, results, gradients)
    if not results:
        cotangents.state = [None] * len(tape.before)
        return
    _ask(captures.sources, cotangents.captures, results, gradients)
    inputs = _sources(tape) + captures.sources
    found = pull_gradients(results, inputs, gradients)
    state: list[Tensor | None] = [None] * len(tape.before)
    for place, gradient in zip(tape.watched, found, strict=False):
        state[place] = gradient
    cotangents.state = state
    rest = found[len(tape.watched) :]
    for (_, place), gradient in zip(tape.given, rest, strict=False):
        cotangents.add_input(
            place, gradient, lambda leaf: torch.zeros_like(feed.leaves[leaf])
        )
    cotangents.captures = list(rest[len(tape.given) :])


def _ask(
    leaves: Sequence[Any],
    cotangents: Sequence[Tensor | None],
    results: list[Tensor],
    gradients: list[Tensor],
) -> None:
    """Add the leaves that have a cotangent to the outputs to pull back."""
    for leaf, gradient in zip(leaves, cotangents, strict=True):
        if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad:
            results.append(leaf)
            gradients.append(gradient)


def _watched(leaves: list[Any]) -> tuple[list[Any], list[int]]:
    """Return the leaves as leaves of a graph, and the indices of those that can be."""
    found: list[Any] = []
    places: list[int] = []
    for leaf in leaves:
        alias = leaf
        if isinstance(leaf, Tensor):
            alias = leaf.detach()
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                alias.requires_grad_()
                places.append(len(found))
        found.append(alias)
    return found, places


def copied(leaves: list[Any]) -> list[Any]:
    """Return the leaves with copies of the tensors, for a step that writes to them.

    Leaves that are the same tensor share a copy: a write to one shows in the other. So
    the gradient of both is found at the first of them.
    """
    copies: dict[Any, Tensor] = {}
    found: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            found.append(leaf)
            continue
        place = (_memory_of(leaf), geometry_of(leaf))
        if place not in copies:
            with torch.enable_grad():
                copies[place] = leaf.clone()
        found.append(copies[place])
    return found


class StateWrites:
    """Detects whether a step writes to copies of a state."""

    def __init__(self, leaves: list[Any], copies: list[Any]) -> None:
        self._copies = [copy for copy in copies if isinstance(copy, Tensor)]
        self._versions = [version_of(copy) for copy in self._copies]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        apart = {id(copy) for copy in self._copies}
        self._overlaps = len({_memory_of(leaf) for leaf in tensors}) < len(apart)

    def seen(self) -> bool:
        """Return whether it did.

        Raises:
            KindError: It did, and parts of the state overlap: each has its own copy.
        """
        has_written = [version_of(copy) for copy in self._copies] != self._versions
        if has_written and self._overlaps:
            raise KindError(
                "expected a state whose parts do not share memory, since the step "
                "writes to its state: a copy of one part would not see writes to the "
                "other; return new tensors from the step, or clones of one of them."
            )
        return has_written


def _memory_of(tensor: Tensor) -> int:
    return storage_address(tensor) if has_storage(tensor) else id(tensor)


def _results(tape: StepTape) -> list[Any]:
    if not tape.outputs:
        return tape.after
    return [*tape.after, *(leaf for leaves in tape.outputs for leaf in leaves)]


def _sources(tape: StepTape) -> list[Tensor]:
    sources: list[Tensor] = [tape.before[place] for place in tape.watched]
    if tape.given:
        sources += [part for part, _ in tape.given]
    return sources
