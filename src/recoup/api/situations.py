"""Kinds of steps that a manager has observed, each with its graph and its plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recoup.backend.fingerprints import fingerprint_bytes
from recoup.core.errors import InfeasibleError
from recoup.core.graph import Graph
from recoup.core.plan import Place, Plan, Span, plan_for
from recoup.core.segments import Action, Segment
from recoup.core.simulation import Simulation
from recoup.core.units import print_bytes
from recoup.planners.plan import frontier_with, plan_with
from recoup.planners.search import Search

KEEP = frozenset({Action.KEEP})

_POINTS = 9
"""For how many budgets plans are looked for where the best one recomputes too much."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CallKind:
    """A call of a model, as far as its memory depends on it.

    Attributes:
        model: What tells the model from others.
        mode: Training flags, parameters that require gradients, autocast.
        shapes: The shapes of the tensors it is called with.
    """

    model: object
    mode: object
    shapes: Shapes

    def covers(self, other: "CallKind") -> bool:
        """Return whether a call of the other kind takes no more memory.

        Examples:
            >>> large, small = (
            ...     CallKind(0, None, ((8, 4),)),
            ...     CallKind(0, None, ((6, 4),)),
            ... )
            >>> large.covers(small), small.covers(large)
            (True, False)
        """
        return (
            (self.model, self.mode) == (other.model, other.mode)
            and len(self.shapes) == len(other.shapes)
            and all(map(_is_within, other.shapes, self.shapes))
        )

    @property
    def elements(self) -> int:
        """How many elements its tensors have."""
        total = 0
        for shape in self.shapes:
            count = 1
            for size in shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True, slots=True)
class ManagedStep:
    """What a manager knows of one kind of step; bytes are what the step adds to memory.

    Attributes:
        models: The classes of the models it calls, in order.
        budget_bytes: What it may add.
        plain_bytes: What it would add if nothing were recomputed, as predicted.
        planned_bytes: What it adds with its plan, as predicted.
        measured_bytes: What it added in the last step that was measured.
        recompute_ratio: The share of forward's time that is run again in backward.

    Examples:
        >>> print(ManagedStep(("GPT",), 8 << 20, 12 << 20, 7 << 20, None, 0.25))
        GPT: planned 7 MiB of 8 MiB, not measured yet, plain 12 MiB; recomputes 25%
    """

    models: tuple[str, ...]
    budget_bytes: int
    plain_bytes: int
    planned_bytes: int
    measured_bytes: int | None
    recompute_ratio: float

    @property
    def fits(self) -> bool:
        """Whether neither plan nor measurement is above the budget."""
        return max(self.planned_bytes, self.measured_bytes or 0) <= self.budget_bytes

    def __str__(self) -> str:
        names = ", ".join(self.models)
        measured = "not measured yet"
        if self.measured_bytes is not None:
            measured = f"measured {print_bytes(self.measured_bytes)}"
        return (
            f"{names}: planned {print_bytes(self.planned_bytes)} of "
            f"{print_bytes(self.budget_bytes)}, {measured}, plain "
            f"{print_bytes(self.plain_bytes)}; recomputes {self.recompute_ratio:.0%}"
        )


class Situation:
    """One kind of step: the calls it makes, its graph, and its plan.

    Args:
        calls: What it calls, in order.
        names: The classes of the models.
        graph: The step as it was observed.
        start_bytes: What is in use before it.
        fixed_calls: Calls that no plan may change, as those whose backward comes in a
            later step: they are always cut by block.
        fixed_bytes: What these would hold if nothing of them were recomputed.

    Attributes:
        left_bytes: What earlier steps leave in memory that is there while it runs.
        measured_bytes: What it added in the last step that was measured.
        needs_check: The plan has not run under a meter.
    """

    def __init__(
        self,
        calls: tuple[CallKind, ...],
        names: tuple[str, ...],
        graph: Graph,
        start_bytes: int,
        fixed_calls: frozenset[int] = frozenset(),
        fixed_bytes: int = 0,
    ) -> None:
        self.calls = calls
        self.names = names
        self.graph = graph
        self.fixed_calls = fixed_calls
        self.fixed_bytes = fixed_bytes
        self.left_bytes = 0
        self.measured_bytes: int | None = None
        self.needs_check = True
        self._start_bytes = start_bytes
        self._error_bytes = 0
        self._planned_for: object = None
        self._verification_bytes = _verification_bytes(graph)
        self._search = Search(graph, KEEP)
        self._costs = self._search.known[0][1]
        self._plans: dict[int, Plan] = {}

    @property
    def plain_bytes(self) -> int:
        """What the step adds if nothing is recomputed."""
        return self._added(self._search.known[0][1])

    @property
    def planned_bytes(self) -> int:
        """What the step adds with its plan."""
        return self._added(self._costs)

    @property
    def recompute_ratio(self) -> float:
        """The share of forward's time that the plan runs again."""
        return _ratio(self.graph, self._costs)

    def is_made_of(self, calls: Sequence[CallKind]) -> bool:
        """Return whether calls are those of this kind of step, or smaller ones."""
        return len(calls) == len(self.calls) and all(
            mine.covers(other) for mine, other in zip(self.calls, calls, strict=True)
        )

    def plan_of(self, call: int) -> Plan | None:
        """Return the plan of one call; None: nothing is recomputed."""
        return self._plans.get(call)

    def replan(self, budget_bytes: int, max_ratio: float | None) -> bool:
        """Plan for a budget; return whether that was due."""
        wanted = (budget_bytes, max_ratio, self.left_bytes, self._error_bytes)
        if wanted == self._planned_for:
            return False
        self._planned_for = wanted
        target = budget_bytes - self.left_bytes - self._error_bytes
        target -= self._verification_bytes
        segments, self._costs = self._choose(self._start_bytes + target, max_ratio)
        self._plans = _by_call(self.graph, segments)
        self.needs_check = True
        return True

    def checked(self, measured_bytes: int, planned_bytes: int) -> None:
        """Take a measurement of a step that was planned to take so many bytes.

        What it took beyond that is left free by the next plan.
        """
        self.measured_bytes = measured_bytes
        self.needs_check = False
        self._error_bytes += max(0, measured_bytes - planned_bytes)

    def _added(self, costs: Simulation) -> int:
        added = costs.peak_bytes - self._start_bytes
        if costs.replays:
            added += self._verification_bytes
        return max(0, added) + self.left_bytes + self._error_bytes

    def _choose(
        self, target_bytes: int, max_ratio: float | None
    ) -> tuple[tuple[Segment, ...], Simulation]:
        """Return the fastest plan within the bytes, or else the smallest allowed.

        With a cap on recomputation no operator is run again more than once. Without
        one that is so as well, unless nothing else fits.
        """
        search = self._search
        plain = search.known[0][1]
        if plain.peak_bytes <= target_bytes + self._verification_bytes:
            return (), plain  # where nothing is recomputed nothing is verified
        if plain.peak_bytes > target_bytes:
            try:
                found = plan_with(search, target_bytes)
            except InfeasibleError:
                search.known.append(search.floor)
            else:
                if _is_allowed(self.graph, found.segments, found.simulation, max_ratio):
                    return found.segments, found.simulation
                frontier_with(search, points=_POINTS)
        allowed = [
            (segments, costs)
            for segments, costs, _ in search.known
            if _is_allowed(self.graph, segments, costs, max_ratio)
        ]
        fitting = [plan for plan in allowed if plan[1].peak_bytes <= target_bytes]
        if fitting:
            return min(fitting, key=lambda plan: plan[1].seconds)
        if max_ratio is None:
            fitting = [
                (s, c) for s, c, _ in search.known if c.peak_bytes <= target_bytes
            ]
            allowed = [(s, c) for s, c, _ in search.known]
        if fitting:
            return min(fitting, key=lambda plan: plan[1].seconds)
        return min(allowed, key=lambda plan: self._added(plan[1]))


def _verification_bytes(graph: Graph) -> int:
    """Return what the first step of a plan takes to verify what it recomputes."""
    made = (value for each in graph.operations for value in each.makes)
    return fingerprint_bytes(max(map(graph.bytes_of, made), default=0))


def _is_allowed(
    graph: Graph,
    segments: Sequence[Segment],
    costs: Simulation,
    max_ratio: float | None,
) -> bool:
    if any(segment.inner for segment in segments):
        return False
    return max_ratio is None or _ratio(graph, costs) <= max_ratio


def _ratio(graph: Graph, costs: Simulation) -> float:
    return costs.replay_seconds / max(graph.forward_seconds, 1e-12)


def _is_within(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and all(map(int.__le__, shape, other))


def _by_call(graph: Graph, segments: Sequence[Segment]) -> dict[int, Plan]:
    """Return the plan of each call, with paths as the model knows them."""
    found: dict[int, list[Segment]] = {}
    for segment in segments:
        call = graph.boundaries[segment.start].model_call
        found.setdefault(call, []).append(segment)
    plans: dict[int, Plan] = {}
    for call, mine in found.items():
        plan = plan_for(graph, mine)
        plans[call] = replace(
            plan, spans=tuple(map(_local_span, plan.spans)), model_calls=1
        )
    return plans


def _local_span(span: Span) -> Span:
    return replace(
        span,
        start=_local(span.start),
        stop=_local(span.stop),
        inner=tuple(map(_local_span, span.inner)),
    )


def _local(place: Place) -> Place:
    return replace(place, module=place.module.partition(".")[2])
