"""Plans that are made while a fitted model trains."""

from time import perf_counter

from recoup.backend.operators.fingerprints import fingerprint_bytes
from recoup.core.graph import Graph
from recoup.core.plan import Plan, plan_for
from recoup.core.segments import Action, Segment
from recoup.engine.verification.replay_check import Verify
from recoup.errors import InfeasibleError
from recoup.planners.planner import floor_with, plan_with
from recoup.planners.search import Search

_PLANNING_SECONDS = 0.5
"""Planning during training begins nothing that takes long after so many seconds."""


def replanned(
    graph: Graph,
    allow: frozenset[Action],
    target_bytes: int,
    budget_bytes: int,
    *,
    or_smallest: bool = True,
) -> tuple[Plan, tuple[Segment, ...]]:
    """Return the fastest plan for a target, with its segments.

    Args:
        graph: The step.
        allow: Actions allowed on a value besides recomputing it.
        target_bytes: The peak to plan for.
        budget_bytes: The budget that the plan names.
        or_smallest: Return the smallest plan if none is within the target.

    Raises:
        InfeasibleError: None is, and the smallest is not wanted.
    """
    search = Search(graph, allow)
    try:
        until = perf_counter() + _PLANNING_SECONDS
        found = plan_with(search, target_bytes, until=until)
    except InfeasibleError:
        if not or_smallest:
            raise
        found = floor_with(search)
    plan = plan_for(
        graph,
        found.segments,
        budget_bytes=budget_bytes,
        peak_bytes=found.simulation.peak_bytes,
        seconds=found.simulation.seconds,
    )
    return plan, tuple(found.segments)


def verification_bytes(graph: Graph, verify: Verify) -> int:
    """Return what verifying the first run of a plan takes at most."""
    if verify == "off":
        return 0
    largest = max((storage.bytes for storage in graph.storages), default=0)
    return fingerprint_bytes(largest)
