"""Kinds of steps that a manager has observed, each with its graph and plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from recoup.backend.operators.fingerprints import fingerprint_bytes
from recoup.core.graph import Graph
from recoup.core.plan import Place, Plan, Span, plan_for
from recoup.core.segments import Action, Segment
from recoup.core.simulation import Simulation
from recoup.core.units import print_bytes
from recoup.errors import InfeasibleError
from recoup.fitting.decision import Accept, Outcome, Try, decide
from recoup.planners.planner import frontier_with, plan_with
from recoup.planners.search import Search

_POINTS = 9
"""The number of budgets to plan for if the best plan recomputes too much."""

_Costed = tuple[tuple[Segment, ...], Simulation]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a manager's plans.

    Attributes:
        is_on: Whether the manager chooses plans.
        budget_bytes: Bytes that a step may add.
        max_ratio: The most to recompute, as a share of forward's time; None: no limit.
        options: The options of the manager that set the budget, as text.
    """

    is_on: bool
    budget_bytes: int
    max_ratio: float | None
    options: str


@dataclass(frozen=True, slots=True)
class CallKind:
    """The properties of a model call that its memory depends on.

    Attributes:
        model: The identity of the model.
        mode: The state of the model, and which arguments require gradients.
        shapes: The shapes of its argument tensors.
    """

    model: object
    mode: object
    shapes: tuple[tuple[int, ...], ...]

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
            and [*map(len, self.shapes)] == [*map(len, other.shapes)]
            and all(
                size <= limit
                for shape, limits in zip(other.shapes, self.shapes, strict=True)
                for size, limit in zip(shape, limits, strict=True)
            )
        )

    @property
    def elements(self) -> int:
        """The number of elements of its tensors."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, slots=True)
class ManagedStep:
    """One kind of step, as reported by a manager; bytes are added memory.

    Attributes:
        models: The classes of the models it calls, in order.
        budget_bytes: Bytes that it may add.
        plain_bytes: Predicted bytes without recomputation.
        planned_bytes: Predicted bytes with its plan.
        measured_bytes: Bytes added in the last measured step.
        recompute_ratio: The share of forward's time that backward recomputes.

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
        """Whether prediction and measurement are within the budget."""
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


@dataclass(eq=False)
class KnownStep:
    """One kind of step: the calls it makes, its graph, its plan and its measurements.

    Attributes:
        calls: The calls it makes, in order.
        names: The classes of the models.
        graph: The observed step.
        start_bytes: Bytes in use before it.
        fixed_calls: Calls that no plan may change, such as those whose backward comes
            in a later step: they are always cut by block.
        fixed_bytes: Bytes that these would hold without recomputation.
        left_bytes: Bytes of earlier steps that are in memory while it runs.
        history: The measured steps with a plan, without `left_bytes`.
        measured_bytes: Bytes added in the last measured step.
        expected: The prediction for a step with the current plan.
        needs_check: Whether no step with the current plan was measured yet.
    """

    calls: tuple[CallKind, ...]
    names: tuple[str, ...]
    graph: Graph
    start_bytes: int
    fixed_calls: frozenset[int] = frozenset()
    fixed_bytes: int = 0
    left_bytes: int = 0
    history: list[Outcome] = field(default_factory=list[Outcome])
    measured_bytes: int | None = None
    needs_check: bool = True

    def __post_init__(self) -> None:
        self.expected = Outcome(0, None)
        self._search = Search(self.graph, frozenset({Action.KEEP}))
        self._costs = self._plain = self._search.known[0].costs
        made = (value for each in self.graph.operations for value in each.makes)
        # The first step of a plan is verified, which takes memory.
        self._verification_bytes = fingerprint_bytes(
            max(map(self.graph.bytes_of, made), default=0)
        )
        self._planned_for: object = None
        self._plans: dict[int, Plan] = {}

    @property
    def plain_bytes(self) -> int:
        """The bytes that the step adds without recomputation."""
        return self._taken(self._plain)

    @property
    def planned_bytes(self) -> int:
        """The bytes that the step adds with its plan."""
        return self._taken(self._costs)

    @property
    def recompute_ratio(self) -> float:
        """The share of forward's time that the plan recomputes."""
        return self._ratio(self._costs)

    def report(self, limits: Limits) -> ManagedStep:
        """Return a report as plain data."""
        return ManagedStep(
            models=self.names,
            budget_bytes=limits.budget_bytes,
            plain_bytes=self.plain_bytes,
            planned_bytes=self.planned_bytes,
            measured_bytes=self.measured_bytes,
            recompute_ratio=self.recompute_ratio,
        )

    def is_made_of(self, calls: Sequence[CallKind]) -> bool:
        """Return whether calls are those of this kind of step, or smaller ones."""
        return len(calls) == len(self.calls) and all(
            mine.covers(other) for mine, other in zip(self.calls, calls, strict=True)
        )

    def plan_of(self, call: int) -> Plan | None:
        """Return the plan of one call, or None if nothing is recomputed."""
        return self._plans.get(call)

    def replan(self, limits: Limits) -> bool:
        """Update the plan by the measurements so far; return whether it is new."""
        decision = decide(self.history, limits.budget_bytes - self.left_bytes)
        target = None
        if isinstance(decision, Try):
            target = decision.target_bytes
        elif isinstance(decision, Accept):
            target = self.history[decision.number].target_bytes
        wanted = (limits.budget_bytes - self.left_bytes, target, limits.max_ratio)
        if wanted == self._planned_for:
            return False
        self._planned_for = wanted
        room_bytes = self.start_bytes + (target or 0)
        segments, self._costs = self._choose(room_bytes, limits.max_ratio)
        self.expected = Outcome(wanted[0], target, self._added(self._costs))
        self._plans = _by_call(self.graph, segments)
        self.needs_check = True
        return True

    def checked(self, expected: Outcome, measured_bytes: int) -> None:
        """Record a measured step that ran with the plan of an expected outcome."""
        added_bytes = measured_bytes - self.left_bytes
        self.history.append(replace(expected, measured_bytes=added_bytes))
        self.measured_bytes = measured_bytes
        self.needs_check = False

    def _taken(self, costs: Simulation) -> int:
        """Return the bytes that the step adds, plus the largest error so far."""
        errors = (each.error_bytes for each in self.history)
        return self._added(costs) + self.left_bytes + max([0, *errors])

    def _added(self, costs: Simulation) -> int:
        verified_bytes = self._verification_bytes if costs.replays else 0
        return max(0, costs.peak_bytes - self.start_bytes + verified_bytes)

    def _ratio(self, costs: Simulation) -> float:
        return costs.replay_seconds / max(self.graph.forward_seconds, 1e-12)

    def _choose(self, room_bytes: int, max_ratio: float | None) -> _Costed:
        """Return the fastest plan within the bytes, or else the smallest allowed.

        With a limit on recomputation no operator is recomputed more than once; without
        one only if nothing else fits.
        """
        search = self._search
        if self._plain.peak_bytes <= room_bytes:
            return (), self._plain
        room_bytes -= self._verification_bytes

        def is_allowed(plan: _Costed) -> bool:
            is_nested = any(segment.inner for segment in plan[0])
            return not is_nested and (
                max_ratio is None or self._ratio(plan[1]) <= max_ratio
            )

        try:
            best = plan_with(search, room_bytes)
        except InfeasibleError:
            search.known.append(search.floor)
        else:
            if is_allowed((best.segments, best.simulation)):
                return best.segments, best.simulation
            frontier_with(search, points=_POINTS)
        known = [(segments, costs) for segments, costs, _ in search.known]
        allowed = [plan for plan in known if is_allowed(plan)]
        usable = allowed if max_ratio is not None else known
        for plans in (allowed, usable):
            fitting = [plan for plan in plans if plan[1].peak_bytes <= room_bytes]
            if fitting:
                return min(fitting, key=lambda plan: plan[1].seconds)
        return min(usable, key=lambda plan: self._added(plan[1]))


def _by_call(graph: Graph, segments: Sequence[Segment]) -> dict[int, Plan]:
    """Return the plan of each call, with paths as the model knows them."""
    found: dict[int, list[Segment]] = {}
    for segment in segments:
        call = graph.boundaries[segment.start].model_call
        found.setdefault(call, []).append(segment)
    plans = {call: plan_for(graph, mine) for call, mine in found.items()}
    return {
        call: Plan(tuple(map(_local_span, plan.spans)), plan.signature)
        for call, plan in plans.items()
    }


def _local_span(span: Span) -> Span:
    return replace(
        span,
        start=_local(span.start),
        stop=_local(span.stop),
        inner=tuple(map(_local_span, span.inner)),
    )


def _local(place: Place) -> Place:
    return replace(place, module=place.module.partition(".")[2])
