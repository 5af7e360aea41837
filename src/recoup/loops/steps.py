"""Steps: the user's function in one form, and the inputs of every step."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from recoup.errors import UsageError
from recoup.loops.state_trees import Structure, flatten, unflatten


class Stacked:
    """A tree of arrays whose first axis is the step, as in a scan."""

    def __init__(self, tree: Any) -> None:
        self.leaves, self._structure = flatten(tree)
        lengths = {len(leaf) for leaf in self.leaves}
        if len(lengths) != 1:
            raise UsageError(
                "expected inputs with one length of the first axis, the step, got "
                f"lengths {sorted(lengths)}; stack them to equal length, or list them."
            )
        (self.length,) = lengths

    def whole(self) -> Any:
        """Return the tree of arrays."""
        return unflatten(self._structure, self.leaves)

    def with_leaves(self, leaves: dict[int, Any]) -> "Stacked":
        """Return a feed with some leaves replaced."""
        changed = copy(self)
        changed.leaves = [leaves.get(p, leaf) for p, leaf in enumerate(self.leaves)]
        return changed

    def at(self, index: int) -> Any:
        """Return the input of one step."""
        return unflatten(self._structure, self.parts(index))

    def parts(self, index: int) -> list[Any]:
        """Return the leaves of the input of one step."""
        return [leaf[index] for leaf in self.leaves]

    def tree(self, index: int, parts: list[Any]) -> Any:
        """Return the input of a step with other leaves."""
        del index
        return unflatten(self._structure, parts)

    def places(self, index: int) -> list[tuple[int, int | None]]:
        """Return, for each leaf of a step, its leaf of the feed and its position."""
        return [(place, index) for place in range(len(self.leaves))]


class Listed:
    """One input for every step, each a separate tree."""

    def __init__(self, trees: Sequence[Any]) -> None:
        flat = [flatten(tree) for tree in trees]
        self.length = len(flat)
        self.leaves = [leaf for leaves, _ in flat for leaf in leaves]
        self._structures = [structure for _, structure in flat]
        self._starts = [0, *accumulate(len(leaves) for leaves, _ in flat)]

    def with_leaves(self, leaves: dict[int, Any]) -> "Listed":
        """Return a feed with some leaves replaced."""
        changed = copy(self)
        changed.leaves = [leaves.get(p, leaf) for p, leaf in enumerate(self.leaves)]
        return changed

    def at(self, index: int) -> Any:
        """Return the input of one step."""
        return unflatten(self._structures[index], self.parts(index))

    def parts(self, index: int) -> list[Any]:
        """Return the leaves of the input of one step."""
        return self.leaves[self._starts[index] : self._starts[index + 1]]

    def tree(self, index: int, parts: list[Any]) -> Any:
        """Return the input of a step with other leaves."""
        return unflatten(self._structures[index], parts)

    def places(self, index: int) -> list[tuple[int, int | None]]:
        """Return, for each leaf of a step, its leaf of the feed."""
        return [
            (place, None)
            for place in range(self._starts[index], self._starts[index + 1])
        ]


Feed = Stacked | Listed


Function = Callable[..., Any]


class KindError(UsageError):
    """The pytree structure of a state differs between the ends of the loop."""


class ConcreteError(KindError):
    """A step needs a concrete number where tracing passes a symbol."""


@dataclass(frozen=True, slots=True)
class LoopStep:
    """One step of a loop.

    Attributes:
        function: The user's function: `state -> state`, with the index and the
            step's input as further arguments if requested.
        feed: The inputs of all steps, or None.
        with_index: Whether the function takes the index of the step.
        with_outputs: Whether the function returns the new state and an output.
    """

    function: Function
    feed: Feed | None = None
    with_index: bool = False
    with_outputs: bool = False

    @property
    def name(self) -> str:
        """The step's name in messages."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    @property
    def fed(self) -> list[Any]:
        """The leaves of the inputs of all steps."""
        return [] if self.feed is None else self.feed.leaves

    def require_structure(self, found: Structure, expected: Structure) -> None:
        """Raise `KindError` if a step changed the structure of the state."""
        if found != expected:
            raise KindError(
                f"{self.name!r} returned a state with another pytree structure than "
                "the initial state; return the same structure, as in a scan."
            )

    def run(self, state: Any, index: int) -> tuple[Any, Any]:
        """Run step `index` and return the new state and its output, if it has one."""
        given = None if self.feed is None else self.feed.at(index)
        return self.run_on(state, index, given)

    def run_on(self, state: Any, index: int, given: Any) -> tuple[Any, Any]:
        """Run step `index` on a given input."""
        if self.feed is None:
            arguments = (index,) if self.with_index else ()
        else:
            arguments = (index, given) if self.with_index else (given,)
        result = self.function(state, *arguments)
        if not self.with_outputs:
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise UsageError(
                f"expected a pair (state, output) from {self.name!r}, because of "
                f"with_outputs=True, got {type(result).__name__}."
            )
        return result

    def run_plain(
        self, leaves: list[Any], structure: Structure, fed: dict[int, Any], steps: int
    ) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """Run the whole loop plainly, with other leaves of the inputs.

        Returns:
            The leaves of the final state, and the rows of each leaf of the outputs.
        """
        step, state = self.with_fed(fed), unflatten(structure, leaves)
        rows: list[list[Any]] = []
        for index in range(steps):
            state, output = step.run(state, index)
            rows.append(flatten(output)[0])
        stacked = list(zip(*rows, strict=True)) if self.with_outputs else []
        return flatten(state)[0], stacked

    def with_fed(self, fed: dict[int, Any]) -> "LoopStep":
        """Return the step with other leaves of the inputs, by their places."""
        if self.feed is None:
            return self
        return replace(self, feed=self.feed.with_leaves(fed))

    def advance(self, state: Any, start: int, stop: int) -> Any:
        """Run steps one after the other and return the last state."""
        function = self.function
        if self.feed is None and not self.with_outputs:
            if self.with_index:
                for index in range(start, stop):
                    state = function(state, index)
            else:
                for _ in range(start, stop):
                    state = function(state)
            return state
        for index in range(start, stop):
            state, _ = self.run(state, index)
        return state


Place = tuple[int, int | None]
"""A leaf of the feed, and its row there for one step; None: the whole leaf."""


@dataclass(slots=True)
class RecordedSteps:
    """Steps that ran with a graph, or traced.

    Attributes:
        start: The first step.
        stop: The step after the last.
        before: The leaves of the state before, on the tape if they have derivatives.
        after: The leaves of the state after.
        structure: The structure of the state after.
        given: The leaves of the inputs that are on the tape, and their places.
        outputs: For each step, the leaves of its output; empty without outputs.
        output_structure: The structure of one output.
    """

    start: int
    stop: int
    before: list[Any]
    after: list[Any] = field(default_factory=list)
    structure: Structure = None
    given: list[tuple[Any, Place]] = field(default_factory=list)
    outputs: list[list[Any]] = field(default_factory=list)
    output_structure: Structure = None

    def run(
        self, step: LoopStep, state: Any, watch: Callable[[Any, Place], Any]
    ) -> None:
        """Run the steps; `watch` returns the leaf of an input as it is on the tape."""
        if step.feed is None and not step.with_outputs:
            state = step.advance(state, self.start, self.stop)
            self.after, self.structure = flatten(state)
            return
        for index in range(self.start, self.stop):
            given = None
            if step.feed is not None:
                parts, places = step.feed.parts(index), step.feed.places(index)
                watched = list(map(watch, parts, places))
                found = zip(parts, watched, places, strict=True)
                self.given += [
                    (leaf, place) for part, leaf, place in found if leaf is not part
                ]
                given = step.feed.tree(index, watched)
            state, output = step.run_on(state, index, given)
            if step.with_outputs:
                leaves, self.output_structure = flatten(output)
                self.outputs.append(leaves)
        self.after, self.structure = flatten(state)


@dataclass(slots=True)
class Cotangents:
    """The gradients that backward has found so far; None where it has not.

    Attributes:
        state: Of the leaves of the state.
        captures: Of the captured arrays.
        feed: Of the leaves of the inputs.
        outputs: Of the stacked outputs; given, not found.
    """

    state: list[Any]
    captures: list[Any]
    feed: list[Any]
    outputs: Sequence[Any] = ()

    def add_input(
        self, place: Place, gradient: Any, zeros: Callable[[int], Any]
    ) -> None:
        """Add the gradient of a step's input; `zeros` makes that of a whole leaf."""
        leaf, row = place
        if gradient is None:
            return
        if row is None:
            self.feed[leaf] = gradient
            return
        if self.feed[leaf] is None:
            self.feed[leaf] = zeros(leaf)
        self.feed[leaf][row] = gradient


def require_cotangent(found: Structure, expected: Structure) -> None:
    """Raise `UsageError` unless a cotangent has the structure of the final state."""
    if found != expected:
        raise UsageError(
            "expected a cotangent with the pytree structure of the final state, got "
            "another structure."
        )
