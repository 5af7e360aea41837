"""From a measured step and plans for it to findings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from recoup.core.footprint import Footprint, total_footprint
from recoup.core.graph import Graph, module_paths, next_needed
from recoup.core.memory_use import REMADE, SPIKE, MemoryUse
from recoup.core.plan import plan_for_step
from recoup.core.segments import Segment
from recoup.core.simulation import Simulation, simulate
from recoup.core.units import print_bytes
from recoup.planners.baselines import every_kth, greedy, recompute_all, square_root
from recoup.planners.solution import Solution
from recoup.report.findings import (
    CATEGORIES,
    Allocation,
    Baseline,
    Findings,
    Moment,
    Part,
    PartCost,
    PlanView,
    RecomputedOperator,
    Signed,
    Step,
)
from recoup.report.modules import NamedBlock, block_of, named_blocks

Plans = Sequence[Sequence[Segment]]
"""The segments of each pass of a step; empty: plain."""


@dataclass(frozen=True, slots=True)
class Known:
    """Data about a step besides its graph.

    Attributes:
        title: The name of the measured step.
        budget_bytes: The budget; 0: none.
        floor_bytes: The smallest budget that can be met; 0: the smallest peak shown.
        plain_seconds: The measured time of the plain step; 0: it did not run.
        measured_peak_bytes: The peak of a real step with the plan; 0: none ran.
        measured_seconds: The time of a real step with the plan; 0: none ran.
        resident: Names and bytes of memory in use during the whole step.
        reserved_bytes: Memory to keep free.
        environment: Names and values to show.
        checks: The verified properties, and how.
        model: The model, as a digest; empty: unknown.
    """

    title: str = "a training step"
    budget_bytes: int = 0
    floor_bytes: int = 0
    plain_seconds: float = 0.0
    measured_peak_bytes: int = 0
    measured_seconds: float = 0.0
    resident: tuple[tuple[str, int], ...] = ()
    reserved_bytes: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    model: str = ""


NOTHING = Known()


def compose(
    graph: Graph,
    chosen: Plans = (),
    others: Sequence[Solution] = (),
    known: Known = NOTHING,
) -> Findings:
    """Return the findings about a step: the active plan among others, and baselines.

    Costs a simulation for each plan.

    Args:
        graph: The step, as measured.
        chosen: The active plan: the segments of each pass; empty: plain.
        others: Other plans to show, as the time-memory frontier.
        known: Further data.

    Examples:
        >>> found = compose(Graph((), 0, (), (), (), (), ()))
        >>> found.plan.name, found.plan.peak_bytes
        ('plain', 0)
    """
    composer = _Composer(graph, known)
    active = composer.view(chosen)
    rules = _rules(graph, known)
    front = {_costs(active): active}
    for plans in ((), *(other.plans for other in others)):
        view = composer.view(plans)
        front.setdefault(_costs(view), view)
    # Every rule is a plan too: it is on the front where it beats ours.
    for name, plans in rules:
        costs = composer.costs(plans)
        if not any(
            view.peak_bytes <= costs[0] and view.seconds <= costs[1]
            for view in front.values()
        ):
            view = replace(composer.view(plans), name=name)
            front.setdefault(_costs(view), view)
    views = [front[costs] for costs in sorted(front)]
    plain = composer.costs(())
    return Findings(
        title=known.title,
        budget_bytes=known.budget_bytes,
        plain_peak_bytes=plain[0],
        plain_seconds=plain[1],
        floor_bytes=known.floor_bytes or min(view.peak_bytes for view in views),
        measured_peak_bytes=known.measured_peak_bytes,
        measured_seconds=known.measured_seconds,
        step=composer.step,
        plans=tuple(views),
        chosen=views.index(active),
        baselines=tuple(
            Baseline(name, *composer.costs(plans)) for name, plans in rules
        ),
        environment=known.environment,
        checks=known.checks,
        estimated_for=graph.estimated_for,
    )


def rule_peaks(graph: Graph) -> tuple[int, ...]:
    """Return the predicted peaks of the common rules, to plan for as well.

    Examples:
        >>> rule_peaks(Graph((), 0, (), (), (), (), ()))
        (0, 0, 0, 0)
    """
    rules = _rules(graph, NOTHING)
    return tuple(_Composer(graph, NOTHING).costs(plans)[0] for _, plans in rules)


def _rules(graph: Graph, known: Known) -> list[tuple[str, Plans]]:
    rules: list[tuple[str, Plans]] = [
        ("keep everything", ()),
        ("every block", [recompute_all(each) for each in graph.passes]),
        ("every second block", [every_kth(each, 2) for each in graph.passes]),
        ("square root", [square_root(each) for each in graph.passes]),
    ]
    if known.budget_bytes:
        limit = known.budget_bytes - known.reserved_bytes
        fitting = [greedy(each, limit) for each in graph.passes]
        rules.append(("greedy, for the budget", fitting))
    return rules


def _costs(view: PlanView) -> tuple[int, float]:
    return view.peak_bytes, -view.seconds


class _Composer:
    """Describes the passes of one step, one after the other, and plans for them."""

    def __init__(self, graph: Graph, known: Known) -> None:
        self._known = known
        self._graph = graph
        # Equal passes run several times and are shown once.
        self._order = list(dict.fromkeys(graph.order)) or [0]
        self._order += [n for n in range(len(graph.passes)) if n not in self._order]
        names: dict[str, int] = {}
        for each in graph.passes:
            for operation in each.operations:
                names.setdefault(operation.name, len(names))
        names.setdefault("the end of backward", len(names))
        self._names = names
        keys: dict[str, dict[str, None]] = {}
        for each in graph.passes:
            blocks = named_blocks(each)
            for number, path in enumerate(module_paths(each)):
                keys.setdefault(block_of(blocks, number).name, {})[path] = None
        flat = [(block, path) for block, paths in keys.items() for path in paths]
        self._numbers = {key: number for number, key in enumerate(flat)}
        self._passes: list[_Pass] = []
        start = 0
        for number in self._order:
            one = _Pass(graph.passes[number], start, self._numbers)
            self._passes.append(one)
            start += one.graph.moments
        self.step = self._step(flat)

    def costs(self, plans: Plans) -> tuple[int, float]:
        """Return the peak and the time of a step with a plan."""
        return self._added_up(self._simulated(plans))

    def view(self, plans: Plans) -> PlanView:
        """Return a plan as a report shows it."""
        simulated = self._simulated(plans)
        peak_bytes, seconds = self._added_up(simulated)
        highest = max(simulated, key=lambda each: each.peak_bytes)
        allocations: list[Allocation] = []
        reruns: list[RecomputedOperator] = []
        costs = [(0, 0, 0.0)] * len(self.step.parts)
        peak_moment, place = 0, "nowhere"
        for one, costs_of, number in zip(
            self._passes, simulated, self._order, strict=True
        ):
            segments = plans[number] if plans else ()
            total = total_footprint(one.graph, segments)
            allocations += one.allocations(total)
            reruns += one.reruns(total)
            one.add_costs(total, costs)
            if costs_of is highest and one.graph.moments:
                moment = costs_of.peak_moment
                peak_moment, place = one.start + moment, one.place(total, moment)
        name = f"plan of {print_bytes(peak_bytes)}" if any(plans) else "plain"
        plan = plan_for_step(
            self._graph,
            plans or [()] * len(self._passes),
            model=self._known.model,
            budget_bytes=peak_bytes,
            peak_bytes=peak_bytes,
            seconds=seconds,
        )
        return PlanView(
            name=name,
            peak_bytes=peak_bytes,
            seconds=seconds,
            host_bytes=sum(each.host_bytes for each in simulated),
            peak_moment=peak_moment,
            peak_place=place,
            allocations=tuple(allocations),
            reruns=tuple(reruns),
            costs=tuple(PartCost(*each) for each in costs),
            plan=json.dumps(json.loads(plan.to_json())) if self._known.model else "",
        )

    def _simulated(self, plans: Plans) -> list[Simulation]:
        return [
            simulate(one.graph, plans[number] if plans else ())
            for one, number in zip(self._passes, self._order, strict=True)
        ]

    def _added_up(self, simulated: Sequence[Simulation]) -> tuple[int, float]:
        peak_bytes = max(each.peak_bytes for each in simulated)
        seconds = sum(each.seconds for each in simulated)
        return peak_bytes + self._known.reserved_bytes, seconds

    def _step(self, keys: Sequence[tuple[str, str]]) -> Step:
        parts = [Part(block, path, 0, 0.0, 0) for block, path in keys]
        phases: list[tuple[str, int]] = []
        moments: list[Moment] = []
        for number, one in enumerate(self._passes, 1):
            one.add_sizes(parts)
            which = f" {number}" if len(self._passes) > 1 else ""
            phases.append((f"forward{which}", one.start))
            phases.append((f"backward{which}", one.start + len(one.graph.operations)))
            moments += one.moments(self._names)
        return Step(
            operators=tuple(self._names),
            parts=tuple(parts),
            moments=tuple(moments),
            phases=tuple(phases),
            resident=self._known.resident,
            reserved_bytes=self._known.reserved_bytes,
        )


class _Pass:
    """One pass of a step, at its offset among the moments of all."""

    def __init__(
        self, graph: Graph, start: int, numbers: dict[tuple[str, str], int]
    ) -> None:
        self.graph = graph
        self.start = start
        self._blocks: tuple[NamedBlock, ...] = named_blocks(graph)
        self._parts = [
            numbers[block_of(self._blocks, number).name, path]
            for number, path in enumerate(module_paths(graph))
        ]
        self._needed = next_needed(graph)

    def moments(self, names: dict[str, int]) -> list[Moment]:
        graph, half = self.graph, len(self.graph.operations)
        found = [
            Moment(names[o.name], self._parts[n], Signed(0), o.seconds)
            for n, o in enumerate(graph.operations)
        ]
        seconds = max(graph.step_seconds - graph.forward_seconds, 0.0)
        share = seconds / max(graph.backward, 1)
        for producer in self._needed[half:]:
            end = producer is None
            name = names["the end of backward" if end else self._operator(producer)]
            found.append(
                Moment(name, 0 if end else self._parts[producer], Signed(0), share)
            )
        return [
            replace(moment, other_bytes=Signed(other))
            for moment, other in zip(found, graph.other_bytes, strict=True)
        ]

    def add_sizes(self, parts: list[Part]) -> None:
        """Add the operators of this pass to the parts of the step."""
        graph = self.graph
        for number, operation in enumerate(graph.operations):
            part = parts[self._parts[number]]
            parts[self._parts[number]] = replace(
                part,
                operators=part.operators + 1,
                seconds=part.seconds + operation.seconds,
            )
        for number in self._saved():
            storage = graph.storages[number]
            part = parts[self._parts[storage.born]]
            parts[self._parts[storage.born]] = replace(
                part, saved_bytes=part.saved_bytes + storage.bytes
            )

    def add_costs(self, total: Footprint, costs: list[tuple[int, int, float]]) -> None:
        """Add the costs of a plan in this pass."""
        half = len(self.graph.operations)
        sent = {offload.storage for offload in total.offloads}
        for number in self._saved():
            storage = self.graph.storages[number]
            part = self._parts[storage.born]
            kept, offloaded, seconds = costs[part]
            if max(total.holds.get(number, -1), storage.dies) >= half:
                costs[part] = (kept + storage.bytes, offloaded, seconds)
            elif number in sent:
                costs[part] = (kept, offloaded + storage.bytes, seconds)
        for replay in total.replays:
            for operation in replay.operations:
                part = self._parts[operation]
                kept, offloaded, seconds = costs[part]
                seconds += self.graph.operations[operation].seconds
                costs[part] = (kept, offloaded, seconds)

    def reruns(self, total: Footprint) -> list[RecomputedOperator]:
        """Return the replays of a plan, with their moments."""
        return [
            RecomputedOperator(
                self.start + replay.moment,
                self._parts[replay.operations[0]],
                len(replay.operations),
                replay.seconds,
            )
            for replay in total.replays
            if replay.operations
        ]

    def allocations(self, total: Footprint) -> list[Allocation]:
        """Return the allocations of a plan, with their moments."""
        graph, half = self.graph, len(self.graph.operations)
        replayed = _first_replayed(total)
        found: list[Allocation] = []
        for nbytes, first, last, source in MemoryUse(graph).spans([total]).rows():
            last = min(last, graph.moments - 1)
            if not nbytes or first > last:
                continue
            if source in (REMADE, SPIKE):
                category = "recomputed" if source == REMADE else "workspace"
                born = replayed.get(first, -1)
            else:
                # A storage whose span begins in backward was offloaded.
                is_held = total.holds.get(source, -1) >= half or first >= half
                category = "held" if is_held else "running"
                born = graph.storages[source].born
            made = 0 <= born < half
            found.append(
                Allocation(
                    CATEGORIES.index(category),
                    Signed(self._parts[born] if made else -1),
                    Signed(self.start + born if made else -1),
                    nbytes,
                    self.start + first,
                    self.start + last,
                )
            )
        return found

    def place(self, total: Footprint, moment: int) -> str:
        """Return the position of a moment in the step, in words."""
        if moment < len(self.graph.operations):
            return f"in forward, {self._within(moment)}, at {self._short(moment)}"
        replayed = _first_replayed(total)
        if moment in replayed:
            return f"in backward, recomputed {self._within(replayed[moment])}"
        producer = self._needed[moment]
        if producer is None:
            return "at the end of backward"
        what = f"the gradient of {self._short(producer)}"
        return f"in backward, next {what} {self._within(producer)}"

    def _saved(self) -> list[int]:
        """Return the storages of forward that autograd saves."""
        graph, half = self.graph, len(self.graph.operations)
        saved = {graph.values[save.value].storage for save in graph.saves}
        return sorted(n for n in saved if 0 <= graph.storages[n].born < half)

    def _operator(self, operation: int) -> str:
        return self.graph.operations[operation].name

    def _short(self, operation: int) -> str:
        return self._operator(operation).removeprefix("aten.").removesuffix(".default")

    def _within(self, operation: int) -> str:
        """Return the block of an operation: `in h.3`, `after h.11`."""
        name = block_of(self._blocks, operation).name
        return name if name.startswith(("before ", "after ")) else f"in {name}"


def _first_replayed(total: Footprint) -> dict[int, int]:
    """Return the first recomputed operation of each moment that has any."""
    found: dict[int, int] = {}
    for replay in total.replays:
        if replay.operations:
            found.setdefault(replay.moment, replay.operations[0])
    return found
