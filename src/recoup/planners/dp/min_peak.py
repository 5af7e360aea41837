"""The lowest peak: a plan that depends on bytes and operators, not on times."""

from collections.abc import Sequence
from dataclasses import replace

from recoup.core.graph import Graph
from recoup.core.segments import Segment, within_calls
from recoup.core.simulation import simulate
from recoup.core.trim_segments import without_idle_actions
from recoup.planners.baselines import blocks_of, recompute_all, square_root
from recoup.planners.dp.partition import Partition
from recoup.planners.dp.stretch_memory import Memory
from recoup.planners.exhaustive import smallest
from recoup.planners.option import segments_of


def lowest_plan(
    graph: Graph,
    places: Sequence[int],
    *,
    reach: int,
    memory: Memory | None = None,
) -> tuple[Segment, ...]:
    """Return the plan with the lowest peak that is known how to find.

    Of plans with the same peak the one that runs the fewest operators again is taken.
    Two measurements of one step give the same answer, though their times differ.

    Args:
        graph: The step.
        places: Boundaries where segments may begin and end.
        reach: Over how many places at most a segment goes.
        memory: What is known of the stretches of this step already.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = (Boundary(0, 0), Boundary(0, 0))
        >>> lowest_plan(Graph((), 0, (), (), (), places, ()), (0, 1), reach=2)
        (Segment(start=0, stop=1, actions={}, inner=()),)
    """
    counted = timed_alike(graph)
    blocks = blocks_of(counted)
    plans = [recompute_all(counted), square_root(counted)]
    plans.append(smallest(counted, blocks) or ())
    memory = Memory() if memory is None else memory
    for nest in (False, True):
        far = nested_reach(reach) if nest else reach
        partition = Partition(counted, places, reach=far, nest=nest, memory=memory)
        path = partition.best(partition.lowest())
        plans.append(segments_of(option for _, option in path or ()))
    plans = [
        tuple(
            without_idle_actions(counted, segment)
            for segment in within_calls(counted, plan)
        )
        for plan in plans
    ]

    def cost(plan: tuple[Segment, ...]) -> tuple[int, float]:
        costs = simulate(counted, plan)
        return costs.peak_bytes, costs.replay_seconds

    return min(plans, key=cost)


def nested_reach(reach: int) -> int:
    """Return over how many places a segment goes that has others inside."""
    return max(2, reach // 2)


def timed_alike(graph: Graph) -> Graph:
    """Return the step with operators that all take one second.

    Examples:
        >>> from recoup.core.graph import Operation
        >>> graph = Graph((Operation("exp", 0.5, (), ()),), 0, (), (), (), (), (0,))
        >>> timed_alike(graph).operations[0].seconds
        1.0
    """
    return replace(
        graph,
        operations=tuple(replace(o, seconds=1.0) for o in graph.operations),
        step_seconds=float(len(graph.operations)),
        recording_seconds=0.0,
        link_bytes_per_second=0.0,
    )
