"""Torch machine: holds, runs and reverses the steps of one loop; its environment."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recoup.backend.autograd.autocast import autocast_as, autocast_states
from recoup.backend.memory.storages import has_storage, version_of
from recoup.backend.state.rng import default_states, same_state
from recoup.backend.state.walk import reach
from recoup.engine.tiers.protocol import Stored, Tier
from recoup.errors import ChangedTensorError
from recoup.loops.drive import LoopMachine
from recoup.loops.state_digest import StateDigest
from recoup.loops.state_trees import Structure, flatten, unflatten
from recoup.loops.steps import KindError, LoopStep
from recoup.loops.torch.captures import CapturedTensors, Outside
from recoup.loops.torch.step_tape import (
    StateWrites,
    StepTape,
    copied,
    pull,
    record,
)

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class OutputStack:
    """Collects one output per step.

    Args:
        steps: The number of steps, if known: then the whole stack is preallocated, else
            the outputs are stacked at the end.

    Attributes:
        last: The leaves of the last output.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._structure: Structure = None
        self._whole: list[Tensor] = []
        self._rows: list[list[Tensor]] = []
        self._kinds: list[_Kind] = []
        self.last: list[Tensor] = []

    def put(self, index: int, output: Any) -> None:
        """Add the output of the next step."""
        leaves, structure = flatten(output)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise KindError(
                f"expected trees of tensors as outputs of a loop, step {index} gave "
                f"{[type(leaf).__name__ for leaf in leaves]}; return tensors."
            )
        kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        if index == 0:
            self._structure, self._kinds = structure, kinds
            if self._steps is not None:
                self._whole = [x.new_empty((self._steps, *x.shape)) for x in leaves]
        if structure != self._structure:
            raise KindError(
                f"expected the pytree structure of step 0's output, got another one "
                f"from step {index}; return the same structure from every step."
            )
        if kinds != self._kinds:
            raise KindError(
                f"expected outputs like step 0's, {_described(self._kinds)}, but step "
                f"{index} gave tensors of {_described(kinds)}; return the same shapes "
                "and types from every step."
            )
        self.last = [leaf.detach() for leaf in leaves]
        if self._steps is None:
            self._rows.append(self.last)
            return
        for whole, leaf in zip(self._whole, self.last, strict=True):
            whole[index] = leaf

    def leaves(self) -> list[Tensor]:
        """Return the stacked leaves."""
        if self._steps is not None:
            return self._whole
        return [torch.stack(column) for column in zip(*self._rows, strict=True)]

    def tree(self, leaves: list[Tensor]) -> Any:
        """Return the stacked outputs as a tree; None if no step ran."""
        return unflatten(self._structure, leaves) if self._kinds else None


def _described(kinds: list[_Kind]) -> str:
    return ", ".join(
        f"{tuple(shape)} {dtype} on {where}" for shape, dtype, where in kinds
    )


RandomStates = list[tuple[torch.Generator, Tensor]]


class Environment:
    """Random generators and autocast of the loop's forward.

    Args:
        leaves: Leaves of the state, whose devices matter.
        function: The step; generators that it can reach are restored with torch's own.

    Attributes:
        draws: Whether the steps draw random numbers; True while unknown.
    """

    def __init__(self, leaves: list[Any], function: Any = None) -> None:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        self._devices = [d for d in devices if d.type not in ("cpu", "meta")]
        states = autocast_states({device.type for device in self._devices})
        # Each tape casts weights itself; a cache would hold the graph of another tape.
        self._autocast = tuple(replace(state, cache=False) for state in states)
        self._casts = any(state.enabled for state in states)
        self._own: list[torch.Generator] = reach(function, kind=torch.Generator)
        self._begin = self._states()
        self.draws = True

    def settle(self) -> None:
        """Determine, after the first sweep, whether the steps drew random numbers."""
        now = self._states()
        self.draws = not all(
            same_state(before, after)
            for (_, before), (_, after) in zip(self._begin, now, strict=True)
        )
        if not self.draws:
            self._begin = []

    def random_states(self) -> RandomStates | None:
        """Return the present random states, if needed."""
        return self._states() if self.draws else None

    def _states(self) -> RandomStates:
        own = [(generator, generator.get_state()) for generator in self._own]
        return default_states(self._devices) + own

    def rewind(self, states: RandomStates | None) -> None:
        """Restore earlier states; by default those at the start."""
        if self.draws:
            for generator, state in self._begin if states is None else states:
                generator.set_state(state)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Run the block under the autocast of forward."""
        if not self._casts and not torch.is_autocast_enabled("cpu"):
            yield
            return
        with autocast_as(self._autocast):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the block under forward's random states; restore the present ones."""
        before = self.random_states()
        try:
            with self.casting():
                yield
        finally:
            for generator, state in before or ():
                generator.set_state(state)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of a state that is in a tier."""

    stored: Stored
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class HeldState:
    """A state in a slot: its leaves without a graph, with versions and random state."""

    structure: Structure
    leaves: list[Any]
    versions: list[int]
    random: RandomStates | None

    def prefetch(self) -> None:
        """Begin to fetch leaves from their tiers."""
        for leaf in self.leaves:
            if isinstance(leaf, Placed):
                leaf.stored.prefetch()

    def drop(self) -> None:
        """Drop leaves from their tiers."""
        for leaf in self.leaves:
            if isinstance(leaf, Placed):
                leaf.stored.drop()


class TorchMachine(LoopMachine):
    """Runs the steps of one loop on tensors.

    `stores` are the tiers of states, by the tier of the schedule; empty to hold them in
    place.
    """

    def __init__(
        self,
        step: LoopStep,
        captures: CapturedTensors,
        environment: Environment,
        *,
        verify: str = "first",
        tolerance: float | None = None,
        stores: Sequence[Tier] = (),
    ) -> None:
        # A lossy tier does not return the same bits.
        is_exact = all(tier.is_exact for tier in stores)
        super().__init__(step, verify if is_exact else "off", tolerance)
        self.captures = captures
        self.capture_count = len(captures.sources)
        self.environment = environment
        self.stack: OutputStack | None = None
        self.outside: Outside | None = None
        self._stores = stores

    def hold(self, state: Any, step: int, tier: int) -> HeldState:
        """Return a handle for a state: the tensors themselves, or copies of them."""
        leaves, structure = flatten(state)
        kept = [detached(leaf) for leaf in leaves]
        if self.in_place:
            kept = copied(kept)
        if step > 0 and self.sweeping in self.verified_when:
            self.digests[step] = StateDigest(kept, self.tolerance)
            if self.sweeping and self.stack is not None:
                # Outputs too: those just before a held state.
                digest = StateDigest(self.stack.last, self.tolerance)
                self.digests["output", step] = digest
        versions = [version_of(x) if isinstance(x, Tensor) else 0 for x in kept]
        if self._stores and step > 0:
            store = self._stores[min(tier, len(self._stores) - 1)]
            kept = [_placed(leaf, store) for leaf in kept]
        return HeldState(structure, kept, versions, self.environment.random_states())

    def take(self, held: HeldState) -> Any:
        """Return a held state, and restore its random state."""
        self.environment.rewind(held.random)
        return unflatten(held.structure, self.leaves_of(held))

    def leaves_of(self, held: HeldState) -> list[Any]:
        """Return the leaves of a held state."""
        for leaf, version in zip(held.leaves, held.versions, strict=True):
            if isinstance(leaf, Tensor) and version_of(leaf) != version:
                raise ChangedTensorError(
                    f"a state of shape {tuple(leaf.shape)} that the loop over "
                    f"{self.step.name!r} holds was changed in place; return new "
                    "tensors from the step, or write to a clone."
                )
        leaves = held.leaves
        if self._stores:
            leaves = [_fetched(leaf) for leaf in leaves]
        if self.in_place:
            return copied(leaves)
        return leaves

    def advance(self, state: Any, start: int, stop: int) -> Any:
        """Run steps without a graph."""
        if torch.is_grad_enabled():  # a step has switched it on permanently
            with torch.no_grad():
                return self.advance(state, start, stop)
        if not self.sweeping or (start and not self.step.with_outputs):
            return self.step.advance(state, start, stop)  # saves a call per tape
        return self.advance_by(self.step, state, start, stop)

    def put_output(self, index: int, output: Any) -> None:
        """Collect the output of a step."""
        if self.stack is None:
            self.stack = OutputStack(self.expected_steps)
        self.stack.put(index, output)

    def tape(self, state: Any, start: int, stop: int) -> StepTape:
        """Run steps with a graph."""
        leaves, structure = flatten(state)
        span = (start, stop)
        # Whether the step writes to its state is unknown before it has run.
        in_place = self.in_place or (self.sweeping and start == 0)
        return record(
            self.step, leaves, structure, span, self.captures, in_place=in_place
        )

    def pull(self, tape: StepTape) -> None:
        """Pull the cotangents back through a tape."""
        pull(tape, self.cotangents, self.captures, self.step.feed)

    def after(self, tape: StepTape) -> Any:
        """Return the state after a tape of forward, and collect its outputs."""
        if self.step.with_outputs:
            for row, leaves in enumerate(tape.outputs, tape.start):
                self.put_output(row, unflatten(tape.output_structure, leaves))
        return unflatten(tape.structure, tape.after)

    def compare(self, tape: StepTape) -> None:
        """Compare the end of a tape with forward; on a device, evaluate later."""
        claims: list[Any] = []
        known = self.digests.pop(tape.stop, None)
        if known is not None:
            claims += known.differs([detached(leaf) for leaf in tape.after])
        known = self.digests.pop(("output", tape.stop), None)
        if known is not None:
            claims += known.differs([detached(leaf) for leaf in tape.outputs[-1]])
        for claim in claims:
            if claim is not False:  # known to be wrong, or still unknown
                self.claims.append((tape.start, tape.stop, claim))
        if any(claim is True for claim in claims):
            self.conclude()

    def run_first(self, step: LoopStep, state: Any) -> tuple[Any, Any]:
        """Run the first step on a copy; detect whether it writes to it."""
        leaves, structure = flatten(state)
        copies = copied(leaves)
        writes = StateWrites(leaves, copies)
        result = step.run(unflatten(structure, copies), 0)
        self.in_place = writes.seen()
        if self.outside is not None and self.verify != "off":
            self.outside.settle()
        return result


def _placed(leaf: Any, store: Tier) -> Any:
    """Put a tensor into a tier, if it is large enough."""
    if not is_tensor(leaf) or not has_storage(leaf) or not store.takes(leaf.nbytes):
        return leaf
    return Placed(store.put(leaf.contiguous().reshape(-1)), leaf.shape)


def _fetched(leaf: Any) -> Any:
    return leaf.stored.get().view(leaf.shape) if isinstance(leaf, Placed) else leaf


def is_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a tensor."""
    return isinstance(leaf, Tensor)


def detached(leaf: Any) -> Any:
    """Return a tensor without its graph, and anything else unchanged."""
    return leaf.detach() if is_tensor(leaf) else leaf
