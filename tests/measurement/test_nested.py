"""What regions take is predicted to the byte; inside others, never less than that."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

import recoup
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.problem import Problem
from recoup.backend.memory.meters import StorageMeter
from recoup.core.plan import plan_for
from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate
from recoup.core.trim_segments import without_idle_actions
from recoup.engine.applied.applied_plan import Applied
from recoup.planners.interval_options import holds


def stack(*, normalised: bool) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(6):
        parts.append(nn.Linear(16, 64))
        parts.append(nn.BatchNorm1d(64) if normalised else nn.LayerNorm(64))
        parts += [nn.GELU(), nn.Linear(64, 16)]
    return nn.Sequential(*parts)


def peaks_of(model: nn.Module, segments_for) -> tuple[int, int]:
    """Return the predicted and the measured peak of a plan."""
    batch = torch.ones(32, 16)

    def step() -> None:
        model(batch).sum().backward()

    graph = recoup.measure(model, batch, loss=torch.Tensor.sum)
    segments = segments_for(graph)
    applied = Applied(model, plan_for(graph, segments), verify="off")
    step()
    model.zero_grad(set_to_none=True)
    with StorageMeter() as meter:
        meter.track(model, batch)
        step()
        measured = meter.peak_bytes
    applied.remove()
    return simulate(graph, segments).peak_bytes, measured


def nested(graph, held: int) -> tuple[Segment, ...]:
    last = len(graph.boundaries) - 1
    third = last // 3
    inner = (Segment(0, third), Segment(third, 2 * third), Segment(2 * third, last))
    made = [v for o in graph.operations for v in o.makes if graph.values[v].holdable]
    whole = holds(graph, Segment(0, last, inner=inner), made[:: held or 10**9])
    return (without_idle_actions(graph, whole),)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("held", [0, 3, 4])
def test_nested_regions_take_what_was_predicted(normalised, held):
    predicted, measured = peaks_of(
        stack(normalised=normalised), lambda graph: nested(graph, held)
    )
    assert predicted == measured


class Tail(nn.Module):
    """Drops the output of its first layer, and uses the most memory after that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.wide = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        kept = first * 2
        del first
        scale = float(torch.ones(50_000).mean())  # which backward does not need
        return self.wide(kept.sin() * scale)


@pytest.mark.parametrize("keeps", [True, False])
def test_an_open_region_holds_what_it_reads_from_outside(keeps):
    """Also what no replay will start from: that is known when the region closes."""

    def after_the_first_layer(graph) -> tuple[Segment, ...]:
        start = next(
            number
            for number, place in enumerate(graph.boundaries)
            if place.module == "first" and not place.entering
        )
        (kept,) = graph.operations[graph.boundaries[start].operation].makes
        actions = {kept: Action.KEEP} if keeps else {}
        return (Segment(start, len(graph.boundaries) - 1, actions),)

    predicted, measured = peaks_of(Tail(), after_the_first_layer)
    assert predicted == measured


def at_random(graph, seed: int, depth: int) -> tuple[Segment, ...]:
    """Return the whole model as a segment with others inside, as chance has it."""
    chance = random.Random(seed)

    def segment(start: int, stop: int, depth: int) -> Segment:
        inside = graph.operations_between(start, stop)
        made = [v for n in inside for v in graph.operations[n].makes]
        made = [v for v in made if graph.values[v].holdable]
        kept = chance.sample(made, min(len(made), chance.choice([0, 0, 1, 2, 3])))
        inner: tuple[Segment, ...] = ()
        if depth and stop - start > 1:
            count = min(stop - start + 1, chance.choice([2, 2, 3, 4]))
            places = sorted(chance.sample(range(start, stop + 1), count))
            inner = tuple(segment(a, b, depth - 1) for a, b in pairwise(places))
        return Segment(start, stop, dict.fromkeys(kept, Action.KEEP), inner)

    whole = segment(0, len(graph.boundaries) - 1, depth)
    return (without_idle_actions(graph, whole),)


@pytest.mark.parametrize("seed", range(8))
def test_regions_three_deep_take_what_was_predicted(seed):
    predicted, measured = peaks_of(
        stack(normalised=False), lambda graph: at_random(graph, seed, depth=3)
    )
    assert predicted == measured


@pytest.mark.parametrize("seed", range(8))
def test_with_running_statistics_they_do_not_take_more(seed):
    predicted, measured = peaks_of(
        stack(normalised=True), lambda graph: at_random(graph, seed, depth=3)
    )
    # The statistics of a layer are 512 bytes. A region that is in another and has
    # others in it is taken to have a copy for as long as it lives; it has one in
    # backward only, until that is asked for. The worst of 60 seeds was three copies.
    assert 0 <= predicted - measured <= 3 * 512


def test_statistics_that_an_outer_region_copies_are_counted():
    """The checker is shown a prediction without them."""
    model = stack(normalised=True)
    graph = recoup.measure(model, torch.ones(32, 16), loss=torch.Tensor.sum)
    state_bytes = sum(operation.state_bytes for operation in graph.operations)
    buffers = [b.nbytes for name, b in model.named_buffers() if "running" in name]
    assert state_bytes == sum(buffers) > 0


def test_what_nobody_starts_from_is_not_held():
    graph = recoup.measure(
        stack(normalised=False), torch.ones(32, 16), loss=torch.Tensor.sum
    )
    last = len(graph.boundaries) - 1
    made = [v for o in graph.operations for v in o.makes if graph.values[v].holdable]
    everything = Segment(0, last, dict.fromkeys(made, Action.KEEP))
    useful = without_idle_actions(graph, everything)
    assert set(useful.actions) < set(everything.actions)
    assert simulate(graph, [useful]).bytes_at == simulate(graph, [everything]).bytes_at


def test_masks_made_like_another_tensor_do_not_need_it():
    problem = Problem(CASES["gpt dropout"], "tiny", torch.device("cpu"))
    graph = recoup.measure(problem.model, problem.batch, loss=problem.case.loss)
    assert min(graph.other_bytes) > 0
    likes = [o for o in graph.operations if o.name.startswith("aten.empty_like")]
    assert likes
    assert all(operation.reads == () for operation in likes)
    assert simulate(graph, ()).peak_bytes == problem.peak_bytes()
