"""Plans that are made while a fitted model trains."""

from time import perf_counter

import torch

from recoup.backend.memory.meters import BLOCK_BYTES
from recoup.backend.operators.fingerprints import (
    fingerprint_bytes,
    least_fingerprint_bytes,
)
from recoup.core.graph import Graph
from recoup.core.plan import Plan, plan_for
from recoup.core.segments import Action, Segment
from recoup.engine.verification.replay_check import Verify
from recoup.errors import InfeasibleError
from recoup.planners.planner import floor_with, plan_with
from recoup.planners.search import Search

_PLANNING_SECONDS = 0.5
"""The time after which planning during training starts no long computation."""


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
    return fingerprint_bytes(_largest_bytes(graph))


def least_verification_bytes(graph: Graph, device: torch.device) -> int:
    """Return what verifying any plan of a step takes where memory is short."""
    # Of each saved value a fingerprint, and whether it differs, at two moments.
    is_cpu = device.type == "cpu"
    scalar_bytes, value_bytes = (8, 8 + 2) if is_cpu else (BLOCK_BYTES, 3 * BLOCK_BYTES)
    values = max(len({save.value for save in each.saves}) for each in graph.passes)
    largest_bytes = max(map(_largest_bytes, graph.passes))
    return (
        least_fingerprint_bytes(largest_bytes, scalar_bytes=scalar_bytes)
        + value_bytes * values
    )


def _largest_bytes(graph: Graph) -> int:
    return max((storage.bytes for storage in graph.storages), default=0)
