"""Arguments that are wrong: our error, before anything runs, and nothing left."""

# Wrong on purpose.
# pyright: reportArgumentType=false

from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup import Action, Plan
from recoup.errors import UnsupportedError, UsageError
from tests.support.bits import tree_differences
from tests.support.fitting import state_of
from tests.support.odd_models import Perceptron, mean_square, odd_batch


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Perceptron() for _ in range(count)))


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ({"allow": "offload"}, "expected several actions"),
        ({"allow": None}, "expected several actions"),
        ({"allow": Action.KEEP}, "expected several actions"),
        ({"allow": ["elsewhere"]}, "'elsewhere'"),
        ({"allow": [None]}, "Action.OFFLOAD"),
        ({"verify": "bogus"}, "'bogus'"),
        ({"verify": None}, "None"),
        ({"optimizer": "adam"}, "got str"),
        ({"optimizer": torch.optim.Adam}, "got Adam"),
        ({"loss": "x"}, "expected a function"),
        ({"device": "bogus"}, "'bogus' cannot be used"),
        ({"device": "meta"}, "meta device"),
        ({"blocks": "0"}, "list of module paths"),
        ({"blocks": ["bogus"]}, "named_modules"),
    ],
    ids=str,
)
def test_fit_says_what_is_wrong_with_an_argument_and_leaves_nothing(argument, says):
    model, batch = blocks(), odd_batch()
    before = state_of(model)
    given: Any = {"loss": mean_square, **argument}
    with pytest.raises(UsageError, match=says):
        recoup.fit(model, batch, 0.9, **given)
    assert list(tree_differences(before, state_of(model), where="")) == []


def test_a_step_that_is_no_function_is_refused():
    with pytest.raises(UsageError, match="expected a function for step="):
        recoup.fit(blocks(), step="x", budget=0.9)


def test_actions_may_be_named():
    _, report = recoup.fit(
        blocks(), odd_batch(), 0.9, loss=mean_square, allow=["keep", "offload"]
    )
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("points", [0, -1, True, 2.5, None, "3"])
def test_a_frontier_has_a_whole_number_of_points(points):
    graph = recoup.measure(blocks(), odd_batch(), loss=mean_square)
    with pytest.raises(UsageError, match="points"):
        recoup.frontier(graph, points=points)


@pytest.mark.parametrize("budget", [1.5, float("nan"), None, "x", True, -1, "120%"])
def test_a_plan_is_for_a_budget(budget):
    graph = recoup.measure(blocks(), odd_batch(), loss=mean_square)
    with pytest.raises(UsageError, match=r"a budget|a share|amount of memory"):
        recoup.plan(graph, budget)


def test_a_plan_takes_every_budget_that_fit_takes():
    graph = recoup.measure(blocks(), odd_batch(), loss=mean_square)
    assert recoup.plan(graph, "1GiB").segments == recoup.plan(graph, "1.5G").segments
    assert recoup.plan(graph, "1GiB").segments == ()
    plain_bytes = recoup.plan(graph, 1.0).simulation.peak_bytes
    for budget in (0.9, "0.9", "90%", int(0.9 * plain_bytes)):
        made = recoup.plan(graph, budget)
        assert made.segments
        assert made.simulation.peak_bytes <= 0.9 * plain_bytes
    with pytest.raises(UsageError, match=r"recoup\.measure"):
        recoup.plan("x", 10)


@pytest.mark.parametrize("wrong", ["plan.json", None, {"spans": []}])
def test_only_plans_are_applied(wrong):
    model = blocks()
    with pytest.raises(UsageError, match=r"Plan\.from_json"):
        recoup.apply_plan(model, wrong)
    with pytest.raises(UsageError, match="expected a model, got"):
        recoup.apply_plan(wrong, Plan(()))
    with pytest.raises(UsageError, match="verify"):
        recoup.apply_plan(model, Plan(()), verify=None)
    assert not model._forward_pre_hooks


class PartlyScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.scripted = torch.jit.script(nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.scripted(block(x))
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_scripted_modules_are_refused_and_no_hook_stays(whole):
    model = torch.jit.script(blocks()) if whole else PartlyScripted()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"torch\.jit"):
            recoup.fit(model, odd_batch(), 0.9, loss=mean_square)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
