"""`fit` calls blocks again in backward where that was measured to be faster."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.core.graph import Graph, HostCosts
from recoup.core.segments import Action
from recoup.fitting.closed_loop import ClosedLoop, Measurements
from recoup.measurement.steps.floor import Cost, measure_floor, run_step
from recoup.measurement.steps.training_step import training_step, untouched
from recoup.measurement.timing.pace import Pace


class Block(nn.Module):
    """Many small operators, so that recording takes long."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(self.norm(x))
        for _ in range(6):
            hidden = torch.tanh(hidden * 1.01) + 0.1
        return x + self.dropout(self.back(hidden))


class Counting(Block):
    """Changes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def model_of(kind: type[Block] = Block, blocks: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(blocks)))


BATCH = torch.randn(256, 24)


def gradients(model: nn.Module, batch: Tensor = BATCH) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(batch).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def settle(
    model: nn.Module,
    paces: list[float],
    *,
    rerun: bool | None = True,
    host_costs: HostCosts | None = None,
    host_share: float = 1.0,
    measured: Measurements | None = None,
):
    """Run the closed loop at 60 %, with these measured times of the plans it tries.

    By its clock no time passes: how much is tried depends on the machine otherwise.
    """
    step = training_step(model, BATCH, loss=lambda out: out.square().sum())
    known = iter(paces)

    def pace(*_: object, **__: object) -> Pace:
        seconds = next(known)
        return Pace(seconds, host_share * seconds)

    def graph(*args: Any, **kwargs: Any) -> Graph:
        """Return the step beside a host that records slowly."""
        found = measure_floor(*args, **kwargs)
        operations = tuple(replace(each, seconds=1e-3) for each in found.operations)
        recording_seconds = 0.0 if host_costs else 1e-2
        return replace(
            found,
            operations=operations,
            step_seconds=0.1,
            recording_seconds=recording_seconds,
            host_costs=host_costs,
        )

    with untouched(step) as repeated:
        loop = ClosedLoop(
            repeated,
            frozenset({Action.KEEP}),
            "first",
            lambda _: None,
            replace(
                measured or Measurements(), graph=graph, pace=pace, clock=lambda: 0.0
            ),
            rerun=rerun,
        )
        loop.measure(None)
        return loop, loop.settle(int(0.6 * loop.search.plain_bytes))


# Each plan that runs is timed twice, in turns with the plain step.
SLOW, FAST = [3.0, 1.0, 3.0, 1.0], [2.0, 1.0, 2.0, 1.0]


class TestTheFasterPlanIsTaken:
    def test_calls_are_repeated_where_they_were_measured_to_be_faster(self):
        model = model_of()
        expected = gradients(model)
        loop, settled = settle(model, SLOW + FAST)
        plan = settled.attempt.adapted.plan
        assert plan.repeated_calls == plan.regions > 0
        assert settled.pace.seconds == 2.0
        assert settled.solution.seconds == pytest.approx(2.0)
        assert settled.attempt.cost.peak_bytes == settled.solution.peak_bytes
        assert loop.graph.repeatable == {str(n) for n in range(6)}
        assert all(map(torch.equal, gradients(model), expected))

    def test_the_plan_before_is_active_again_where_they_were_not(self):
        model = model_of()
        expected = gradients(model)
        loop, settled = settle(model, [*SLOW, 99.0, 1.0, 99.0, 1.0])
        assert settled.attempt.adapted.plan.repeated_calls == 0
        assert settled.pace.seconds == 3.0
        assert not loop.graph.repeatable
        assert all("forward" not in vars(block) for block in model)
        assert all(map(torch.equal, gradients(model), expected))

    def test_a_block_with_a_side_effect_is_not_called_again(self):
        model = model_of(Counting)
        _, settled = settle(model, SLOW)
        assert settled.attempt.adapted.plan.repeated_calls == 0
        counts = [vars(block) for block in model]
        before = [count["calls"] for count in counts]
        gradients(model)
        assert [count["calls"] for count in counts] == [n + 1 for n in before]

    def test_a_second_call_that_gives_other_bits_is_given_up(self):
        calls = [0.0]

        class Odd(Block):
            def forward(self, x: Tensor) -> Tensor:
                calls[0] += 1
                return super().forward(x * calls[0])

        model = model_of(Odd)
        names = frozenset(str(n) for n in range(6))
        unseen = Measurements(repeatable=lambda *_: names)
        loop, settled = settle(model, SLOW, measured=unseen)
        assert settled.attempt.adapted.plan.repeated_calls == 0
        assert not loop.graph.repeatable
        assert all("forward" not in vars(block) for block in model)

    def test_nothing_is_looked_for_where_it_is_not_wanted(self):
        _, settled = settle(model_of(), SLOW, rerun=False)
        assert settled.attempt.adapted.plan.repeated_calls == 0


class TestByDefault:
    def test_calls_are_repeated_where_an_accelerator_waits_for_the_host(self):
        # Its steps in a row are timed once, and once more because they vary.
        slow = HostCosts(0.2, 0.01, 0.001)
        paces = [0.8, 0.8, 0.7, 0.4]  # then both plans once more
        _, settled = settle(model_of(), paces, rerun=None, host_costs=slow)
        plan = settled.attempt.adapted.plan
        assert plan.repeated_calls == plan.regions > 0

    def test_a_host_that_is_predicted_to_take_as_long_is_measured(self):
        # Recording is predicted to cost nothing; the plan takes eight times the device.
        wrong = HostCosts(0.2, 0.0, 0.0)
        _, settled = settle(
            model_of(), [0.8, 0.8, 0.8, 0.4], rerun=None, host_costs=wrong
        )
        plan = settled.attempt.adapted.plan
        assert plan.repeated_calls == plan.regions > 0
        assert settled.pace.seconds == 0.4

    def test_the_plan_before_is_timed_again_and_stays_if_it_is_faster(self):
        slow = HostCosts(0.2, 0.01, 0.001)
        paces = [0.8, 0.8, 0.4, 0.5]
        _, settled = settle(model_of(), paces, rerun=None, host_costs=slow)
        assert settled.attempt.adapted.plan.repeated_calls == 0

    def test_not_where_the_host_has_time(self):
        looked: list[object] = []

        def repeatable(*args: object) -> frozenset[str]:
            looked.append(args)
            return frozenset()

        def cost(*args: Any, **kwargs: Any) -> Cost:
            return replace(run_step(*args, **kwargs), seconds=1.0)

        _, settled = settle(
            model_of(),
            [0.156],
            rerun=None,
            host_costs=HostCosts(0.01, 0.0, 0.0),
            host_share=0.7,
            measured=Measurements(repeatable=repeatable, cost=cost),
        )
        assert settled.attempt.adapted.plan.repeated_calls == 0
        assert not looked

    def test_not_where_the_host_is_the_device(self):
        _, settled = settle(model_of(), SLOW, rerun=None)
        assert settled.attempt.adapted.plan.repeated_calls == 0


@pytest.mark.parametrize("rerun", [True, False])
def test_fit_is_bitwise_and_within_its_budget_either_way(rerun):
    model = model_of()
    expected = gradients(model)
    state = copy.deepcopy(model.state_dict())
    model, report = recoup.fit(
        model, BATCH, 0.6, loss=lambda out: out.square().sum(), rerun=rerun
    )
    assert report.measured_peak_bytes <= report.budget_bytes
    assert rerun or report.plan.repeated_calls == 0
    for _ in range(3):
        assert all(map(torch.equal, gradients(model), expected))
    assert all(
        torch.equal(state[name], each) for name, each in model.state_dict().items()
    )
    report.remove()
    assert all(map(torch.equal, gradients(model), expected))


def test_other_sizes_of_the_batch_may_repeat_calls_too():
    model = model_of()
    larger = torch.randn(320, 24)
    expected = gradients(model, larger)
    _, settled = settle(model, SLOW + FAST)
    settled.attempt.adapted.finish_measuring()
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, larger), expected))
