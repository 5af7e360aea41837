"""From a measured step and plans for it to findings."""

from collections.abc import Sequence

from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.core.units import print_bytes
from recoup.planners.every_kth import every_kth
from recoup.planners.greedy import greedy
from recoup.planners.recompute_all import recompute_all
from recoup.planners.solution import Solution
from recoup.planners.square_root import square_root
from recoup.report.block_rows import block_rows
from recoup.report.findings import Baseline, Findings, PlanView
from recoup.report.timeline import timeline


def compose(  # noqa: PLR0913 (a report has many parts)
    graph: Graph,
    chosen: Sequence[Segment],
    others: Sequence[Solution] = (),
    *,
    title: str = "a training step",
    budget_bytes: int = 0,
    floor_bytes: int = 0,
    measured_peak_bytes: int = 0,
    measured_seconds: float = 0.0,
    resident: Sequence[tuple[str, int]] = (),
    reserved_bytes: int = 0,
    environment: Sequence[tuple[str, str]] = (),
) -> Findings:
    """Return the findings about a step: the plan in force among others, and baselines.

    Costs a simulation and a timeline for each plan.

    Args:
        graph: The step, as measured.
        chosen: The plan in force.
        others: Plans to show beside it, as the time-memory frontier.
        title: What was measured.
        budget_bytes: The budget; 0: none.
        floor_bytes: The smallest budget that can be met; 0: the least peak here.
        measured_peak_bytes: The peak of a real step with the plan; 0: none ran.
        measured_seconds: The time of a real step with the plan; 0: none ran.
        resident: Names and bytes of what is in memory all the time.
        reserved_bytes: What is kept free besides.
        environment: Names and values to show as they are.

    Examples:
        >>> found = compose(Graph((), 0, (), (), (), (), ()), ())
        >>> found.plan.name, found.plan.peak_bytes
        ('plain', 0)
    """
    in_force = _view(graph, chosen, resident, reserved_bytes)
    known = {_costs(in_force): in_force}
    for segments in ((), *(other.segments for other in others)):
        view = _view(graph, segments, resident, reserved_bytes)
        known.setdefault(_costs(view), view)
    plans = [known[costs] for costs in sorted(known)]
    plain = simulate(graph, ())
    return Findings(
        title=title,
        budget_bytes=budget_bytes,
        plain_peak_bytes=plain.peak_bytes + reserved_bytes,
        plain_seconds=plain.seconds,
        floor_bytes=floor_bytes or min(view.peak_bytes for view in plans),
        measured_peak_bytes=measured_peak_bytes,
        measured_seconds=measured_seconds,
        plans=tuple(plans),
        chosen=plans.index(in_force),
        baselines=baselines(graph, budget_bytes, reserved_bytes=reserved_bytes),
        environment=tuple(environment),
        estimated_for=graph.estimated_for,
    )


def baselines(
    graph: Graph, budget_bytes: int = 0, *, reserved_bytes: int = 0
) -> tuple[Baseline, ...]:
    """Return what the rules that people use would cost on a step, by prediction.

    Args:
        graph: The step.
        budget_bytes: For the greedy rule; 0 leaves it out.
        reserved_bytes: What is kept free besides.

    Examples:
        >>> [rule.name for rule in baselines(Graph((), 0, (), (), (), (), ()))]
        ['keep everything', 'every block', 'every second block', 'square root']
    """
    rules: list[tuple[str, Sequence[Segment]]] = [
        ("keep everything", ()),
        ("every block", recompute_all(graph)),
        ("every second block", every_kth(graph, 2)),
        ("square root", square_root(graph)),
    ]
    if budget_bytes:
        fitting = greedy(graph, budget_bytes - reserved_bytes)
        rules.append(("greedy, for the budget", fitting))
    found: list[Baseline] = []
    for name, segments in rules:
        costs = simulate(graph, segments)
        found.append(Baseline(name, costs.peak_bytes + reserved_bytes, costs.seconds))
    return tuple(found)


def _costs(view: PlanView) -> tuple[int, float]:
    return view.peak_bytes, -view.seconds


def _view(
    graph: Graph,
    segments: Sequence[Segment],
    resident: Sequence[tuple[str, int]],
    reserved_bytes: int,
) -> PlanView:
    costs = simulate(graph, segments)
    peak_bytes = costs.peak_bytes + reserved_bytes
    return PlanView(
        name=f"plan of {print_bytes(peak_bytes)}" if segments else "plain",
        peak_bytes=peak_bytes,
        seconds=costs.seconds,
        host_bytes=costs.host_bytes,
        timeline=timeline(
            graph, segments, resident=resident, reserved_bytes=reserved_bytes
        ),
        blocks=block_rows(graph, segments),
    )
