"""Selection: which of several checkpoints to recompute so that the rest fits."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from recoup.backend.memory.storages import Geometry
from recoup.engine.lifetime.values import OUTSIDE, Value
from recoup.engine.recording.region import Region
from recoup.engine.scopes.checkpoint_node import CheckpointNode, held_bytes

_FEW = 20_000
"""Up to so many combinations are all compared: that takes some 20 ms."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of a checkpoint that may be recomputed.

    Attributes:
        bytes: What it holds more if it is kept than if it is recomputed.
        cost: How many operators recomputing it runs.
    """

    bytes: int
    cost: int


def candidate_of(node: CheckpointNode) -> Candidate:
    """Return what recomputing a node spares and costs.

    Of a region that is what autograd saves of the values made in it; what comes from
    outside is held in any case. A node made by hand spares all that it holds.
    """
    region = node.region
    if not isinstance(region, Region):
        return Candidate(held_bytes([node]), 1)
    values = [v for v in region.tape.saved if v.demand > 0 and v.producer != OUTSIDE]
    operators = len(region.tape.operations) if region.options.recompute else len(values)
    return Candidate(sum(map(_bytes_of, values)), max(1, operators))


def select(candidates: Sequence[Candidate], budget_bytes: int) -> list[int]:
    """Return what to recompute so that what is kept fits, at the least cost.

    Of equal cost the fewest are taken, and among alike ones those that are evenly
    spread. Where there are many kinds, those that spare most for their cost.

    Examples:
        >>> alike = [Candidate(4, 1)] * 6
        >>> select(alike, 16)
        [1, 4]
        >>> select([Candidate(9, 9), Candidate(5, 1), Candidate(5, 1)], 10)
        [1, 2]
    """
    excess = sum(each.bytes for each in candidates) - budget_bytes
    places: dict[Candidate, list[int]] = {}
    for number, each in enumerate(candidates):
        if each.bytes:
            places.setdefault(each, []).append(number)
    if excess <= 0:
        return []
    kinds = sorted(places, key=lambda kind: -kind.bytes / kind.cost)
    counts = _counts(kinds, [len(places[kind]) for kind in kinds], excess)
    found: list[int] = []
    for kind, count in zip(kinds, counts, strict=True):
        alike = places[kind]
        found += [alike[len(alike) * (2 * i + 1) // (2 * count)] for i in range(count)]
    return sorted(found)


def _counts(
    kinds: Sequence[Candidate], limits: Sequence[int], excess: int
) -> Sequence[int]:
    """Return how many of each kind to recompute to spare so many bytes."""
    if sum(k.bytes * n for k, n in zip(kinds, limits, strict=True)) <= excess:
        return limits
    if math.prod(limit + 1 for limit in limits) <= _FEW:
        fitting = (
            counts
            for counts in itertools.product(*(range(n + 1) for n in limits))
            if _spared(kinds, counts) >= excess
        )
        return min(
            fitting,
            key=lambda counts: (
                sum(k.cost * n for k, n in zip(kinds, counts, strict=True)),
                sum(counts),
                _spared(kinds, counts),
            ),
        )
    counts = [0] * len(kinds)
    for number, kind in enumerate(kinds):
        left = excess - _spared(kinds, counts)
        counts[number] = min(limits[number], max(0, -(-left // kind.bytes)))
    for number in sorted(range(len(kinds)), key=lambda n: -kinds[n].cost):
        spare = _spared(kinds, counts) - excess
        counts[number] -= min(counts[number], spare // kinds[number].bytes)
    return counts


def _spared(kinds: Sequence[Candidate], counts: Sequence[int]) -> int:
    return sum(k.bytes * n for k, n in zip(kinds, counts, strict=True))


def _bytes_of(value: Value) -> int:
    hold = value.hold
    if hold is not None and hold.tensor is not None:
        return hold.tensor.untyped_storage().nbytes()
    return _extent(value.geometry) if value.geometry is not None else 0


def _extent(geometry: Geometry) -> int:
    shape, stride, offset, dtype, _ = geometry
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (offset + last + 1) * dtype.itemsize
