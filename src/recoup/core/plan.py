"""Plans: the values that a model's forward holds and recomputes, as plain data.

A plan names places by modules and values by operators, not by numbers of one measured
step, so it can be stored, read, compared, and applied again without measuring.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from recoup.core.display import as_html
from recoup.core.graph import BEFORE, Boundary, Graph
from recoup.core.readings import plan_file
from recoup.core.segments import Action, Segment
from recoup.core.units import print_bytes, print_seconds
from recoup.errors import PlanError, UsageError

PLANS = plan_file("recoup plan", 2)
"""Files of plans."""

_DEPTH = 64
"""The deepest nesting of spans in a file."""


@dataclass(frozen=True, slots=True)
class Place:
    """A point of forward: a call of a module begins or ends.

    Attributes:
        module: The path of the module in the model; empty for the model itself.
        call: The number of its call in the step, from 0.
        entering: The call begins; False: it ends.
    """

    module: str
    call: int
    entering: bool

    @property
    def label(self) -> str:
        """The place in words."""
        return f"the {'start' if self.entering else 'end'} of {self.call_label}"

    @property
    def call_label(self) -> str:
        """The call of the module, in words."""
        number = f" (call {self.call + 1})" if self.call else ""
        return f"{self.module or 'the model'}{number}"


@dataclass(frozen=True, slots=True)
class Held:
    """A value that a span holds.

    Attributes:
        operator: The operator that makes it, as `aten.mm.default`.
        nth: Its number among the values that this operator makes in the span, from 0.
        bytes: Its size when it was measured.
        action: How it is held.
    """

    operator: str
    nth: int
    bytes: int
    action: Action


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of forward that runs as one region.

    Attributes:
        start: Where it begins.
        stop: Where it ends.
        held: The values made in it that are held; the others are recomputed.
        made: For each operator with a held value, the number of values it made when
            measured.
        inner: Spans inside it, in order.
        by_call: Whether it is one call of a module, recomputed by calling that again.
    """

    start: Place
    stop: Place
    held: tuple[Held, ...] = ()
    made: tuple[tuple[str, int], ...] = ()
    inner: tuple["Span", ...] = ()
    by_call: bool = False

    @property
    def label(self) -> str:
        """The interval in words: a module, or from where to where."""
        whole = replace(self.start, entering=False) == self.stop
        if whole and self.start.entering:
            return self.start.call_label
        return f"{self.start.label} to {self.stop.label}"


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The actions on all values that autograd would save in one step.

    Values outside all spans are kept, as by plain autograd.

    Attributes:
        spans: The regions of forward, in order.
        signature: The step it was made for; see `signature_of`.
        model: The model it was made for, as a digest of its modules; empty: any.
        budget_bytes: The budget it was made for; 0: none.
        peak_bytes: The peak that the simulation predicts.
        seconds: The time of a step that the simulation predicts.
        model_calls: The number of the model's calls before backward.
        roots: The paths of the modules that the step itself calls, in order; an empty
            path is the model itself.
        passes: The plans of the passes of a step that has several, forward and
            backward, which differ; such a step has no spans of its own.
        order: The passes in the order of execution.

    Examples:
        >>> plan = Plan((Span(Place("h.0", 0, True), Place("h.1", 0, True)),))
        >>> Plan.from_json(plan.to_json()) == plan
        True
        >>> Plan.from_json("{}")
        Traceback (most recent call last):
        recoup.errors.PlanError: this is not a plan of recoup: expected ...
    """

    spans: tuple[Span, ...] = ()
    signature: str = ""
    model: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    model_calls: int = 1
    roots: tuple[str, ...] = ("",)
    passes: tuple["Plan", ...] = ()
    order: tuple[int, ...] = ()

    def __repr__(self) -> str:
        held = ", ".join(f"{action} {n}" for action, n in self.count().items())
        budget = print_bytes(self.budget_bytes) if self.budget_bytes else "none"
        return (
            f"Plan({self.regions} regions{f' that {held}' if held else ''}: budget "
            f"{budget}, predicted peak {print_bytes(self.peak_bytes)}, step "
            f"{print_seconds(self.seconds)})"
        )

    def _repr_html_(self) -> str:
        return as_html(repr(self))

    @property
    def parts(self) -> tuple["Plan", ...]:
        """The plans of the passes; a plan of one pass is its only part."""
        return self.passes or (self,)

    @property
    def all_roots(self) -> tuple[str, ...]:
        """The paths of the modules that the step itself calls, each once."""
        return tuple(dict.fromkeys(root for part in self.parts for root in part.roots))

    @property
    def regions(self) -> int:
        """The number of outermost spans."""
        return sum(len(part.spans) for part in self.parts)

    @property
    def repeated_calls(self) -> int:
        """The number of block calls that are repeated in backward."""
        return sum(span.by_call for part in self.parts for span in part.spans)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return PLANS.write(self, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that a JSON text describes; nothing in it is executed.

        Raises:
            PlanError: The text is not a plan, is damaged, or has another version.
        """
        plan = PLANS.read(text, cls)
        check_plan(plan)
        return plan

    def count(self) -> dict[str, int]:
        """Return the number of held values, by action."""
        total: Counter[str] = Counter()
        stack = [span for part in self.parts for span in part.spans]
        while stack:
            span = stack.pop()
            stack.extend(span.inner)
            total.update(held.action.value for held in span.held)
        return dict(total)


def signature_of(graph: Graph) -> str:
    """Return a digest that is equal for steps with the same operators and sizes.

    Examples:
        >>> signature_of(Graph((), 0, (), (), (), (), ()))
        'e3b0c44298fc1c14'
    """
    digest = hashlib.sha256()
    for operation in graph.operations:
        sizes = [graph.bytes_of(value) for value in operation.makes]
        digest.update(f"{operation.name} {sizes};".encode())
    return digest.hexdigest()[:16]


def plan_for(
    graph: Graph,
    segments: Sequence[Segment],
    *,
    model: str = "",
    budget_bytes: int = 0,
    peak_bytes: int = 0,
    seconds: float = 0.0,
) -> Plan:
    """Return segments of a measured step as a plan."""
    return Plan(
        spans=tuple(_span(graph, segment) for segment in segments),
        signature=signature_of(graph),
        model=model,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        seconds=seconds,
        model_calls=graph.model_calls,
        roots=graph.roots,
    )


def plan_for_step(
    graph: Graph,
    plans: Sequence[Sequence[Segment]],
    *,
    model: str = "",
    budget_bytes: int = 0,
    peak_bytes: int = 0,
    seconds: float = 0.0,
) -> Plan:
    """Return the segments of each pass of a measured step as a plan."""
    plan_for_pass = partial(
        plan_for,
        model=model,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        seconds=seconds,
    )
    made = [plan_for_pass(*each) for each in zip(graph.passes, plans, strict=True)]
    if len(made) == 1:
        return made[0]
    return replace(made[0], spans=(), passes=tuple(made), order=graph.order)


def locate(graph: Graph, plan: Plan) -> tuple[Segment, ...]:
    """Return the segments of a measured step that a plan describes.

    The inverse of `plan_for`. Costs time in proportion to the operators.

    Raises:
        PlanError: The step has no such place.

    Examples:
        >>> places = (Boundary(0, 0, "a"), Boundary(0, 0, "b"))
        >>> graph = Graph((), 0, (), (), (), places, ())
        >>> locate(graph, plan_for(graph, [Segment(0, 1)]))
        (Segment(start=0, stop=1, actions={}, inner=(), by_call=False),)
    """
    places = {_place(boundary): n for n, boundary in enumerate(graph.boundaries)}
    for call in graph.calls:
        places.setdefault(Place(call.module, call.call, True), call.start)
        places.setdefault(Place(call.module, call.call, False), call.stop)
    return tuple(_segment(graph, span, places) for span in plan.spans)


def segments_of(graph: Graph, plan: Plan) -> tuple[Segment, ...] | None:
    """Return a plan as segments of a measured step; None if it is for another step."""
    try:
        return locate(graph, plan)
    except (PlanError, UsageError):
        return None


def measured_order(graph: Graph, plan: Plan) -> tuple[Place, ...]:
    """Return the places of a plan in the order of the measured step."""
    places: set[Place] = set()
    stack = list(plan.spans)
    while stack:
        span = stack.pop()
        stack.extend(span.inner)
        places |= {span.start, span.stop}
    return tuple(place for place in _places_in_order(graph) if place in places)


def _places_in_order(graph: Graph) -> Iterator[Place]:
    """Yield the places of a step; at one boundary, ends of calls come first."""
    ends: dict[int, list[Place]] = {}
    begins: dict[int, list[Place]] = {}
    for call in graph.calls:
        ends.setdefault(call.stop, []).append(Place(call.module, call.call, False))
        begins.setdefault(call.start, []).append(Place(call.module, call.call, True))
    for number, boundary in enumerate(graph.boundaries):
        here = [*ends.get(number, ()), _place(boundary), *begins.get(number, ())]
        yield from dict.fromkeys(here)


def displaced(
    plan: Plan, measured: Sequence[Place], reached: Sequence[Place]
) -> list[int] | None:
    """Return the outermost spans of which a part ran outside its region.

    The order of the ends of the step's own calls does not matter: they close any open
    region.

    `measured` and `reached` are the plan's places in the order of the measured step and
    of a call.

    Returns:
        Their numbers; None if the order is the measured one.

    Examples:
        >>> a, b, c = (Place(name, 0, True) for name in "abc")
        >>> plan = Plan((Span(a, b), Span(b, c)))
        >>> displaced(plan, [a, b, c], [a, b, c]), displaced(plan, [a, b, c], [b, a, c])
        (None, [0, 1])
    """
    inside = [p for p in measured if p.entering or p.module not in plan.roots]
    if inside == [p for p in reached if p.entering or p.module not in plan.roots]:
        return None
    planned = _spans_at(plan, measured)
    found = _spans_at(plan, reached)
    wrong = {
        span
        for place in reached
        for span in (planned.get(place), found[place])
        if planned.get(place) != found[place] and span is not None
    }
    return sorted(wrong)


def _spans_at(plan: Plan, places: Sequence[Place]) -> dict[Place, int | None]:
    """Return the outermost span that is open after each place."""
    starts = {span.start: number for number, span in enumerate(plan.spans)}
    open_span: int | None = None
    found: dict[Place, int | None] = {}
    for place in places:
        if open_span is not None and plan.spans[open_span].stop == place:
            open_span = None
        if open_span is None:
            open_span = starts.get(place)
        found[place] = open_span
    return found


def _segment(graph: Graph, span: Span, places: Mapping[Place, int]) -> Segment:
    for place in (span.start, span.stop):
        if place not in places:
            raise PlanError(
                f"expected a plan for this step, got '{place.label}', where it cannot "
                "be cut; make a plan for this model with recoup.fit."
            )
    start, stop = places[span.start], places[span.stop]
    if start >= stop:
        raise PlanError(
            f"expected '{span.start.label}' before '{span.stop.label}' in the "
            "step, as in the plan, got another order; make a plan for this model."
        )
    actions = {(held.operator, held.nth): held.action for held in span.held}
    seen: Counter[str] = Counter()
    found: dict[int, Action] = {}
    for number in graph.operations_between(start, stop) if actions else ():
        operation = graph.operations[number]
        for value in operation.makes if operation.replayable else ():
            action = actions.get((operation.name, seen[operation.name]))
            seen[operation.name] += 1
            if action is not None:
                found[value] = action
    inner = tuple(_segment(graph, each, places) for each in span.inner)
    return Segment(start, stop, found, inner, by_call=span.by_call)


def _span(graph: Graph, segment: Segment) -> Span:
    if segment.by_call:
        call = next(
            call
            for call in graph.calls
            if (call.start, call.stop) == (segment.start, segment.stop)
        )
        start, stop = (Place(call.module, call.call, enter) for enter in (True, False))
        return Span(start, stop, by_call=True)
    held: list[Held] = []
    seen: Counter[str] = Counter()
    for number in graph.operations_between(segment.start, segment.stop):
        operation = graph.operations[number]
        if not operation.replayable:
            continue
        for value in operation.makes:
            nth = seen[operation.name]
            seen[operation.name] += 1
            action = segment.actions.get(value)
            if action is not None and graph.values[value].producer != BEFORE:
                held.append(Held(operation.name, nth, graph.bytes_of(value), action))
    return Span(
        start=_place(graph.boundaries[segment.start]),
        stop=_place(graph.boundaries[segment.stop]),
        held=tuple(held),
        made=tuple((name, seen[name]) for name in sorted({h.operator for h in held})),
        inner=tuple(_span(graph, inner) for inner in segment.inner),
    )


def _place(boundary: Boundary) -> Place:
    return Place(boundary.module, boundary.call, boundary.entering)


def check_plan(plan: Plan) -> None:
    """Raise `PlanError` unless the parts of a plan from a file are consistent."""
    numbers = range(len(plan.passes))
    if plan.passes and not (plan.order and set(plan.order) <= set(numbers)):
        raise PLANS.damaged("the order of passes", plan.order)
    for part in plan.parts:
        if not part.roots or not part.model_calls:
            raise PLANS.damaged("the calls of a pass", (part.roots, part.model_calls))
        if part is not plan and part.passes:
            raise PLANS.damaged("a pass of a pass", part)
        for span in part.spans:
            _check_span(span, 0)


def _check_span(span: Span, depth: int) -> None:
    if depth > _DEPTH:
        raise PlanError(
            f"expected spans nested at most {_DEPTH} deep, got more. {PLANS.advice}"
        )
    if span.by_call and (depth or span.inner or span.held):
        raise PLANS.damaged("a span that is called again", span)
    if any(not count for _, count in span.made):
        raise PLANS.damaged("a count", span.made)
    for inner in span.inner:
        _check_span(inner, depth + 1)
