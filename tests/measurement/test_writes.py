"""Steps that write to parameters while they are measured: nothing is trained."""

# A gradient is maybe None to pyright.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false

import copy

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.backend.state.snapshots import WrittenTensors
from tests.support.bits import tree_differences
from tests.support.fitting import state_of
from tests.support.odd_models import Perceptron, mean_square, odd_batch


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Perceptron() for _ in range(4)))


def add(p: Tensor) -> None:
    p.add_(p.grad, alpha=-0.1)


def write_data(p: Tensor) -> None:
    p.data.sub_(p.grad)


def assign_data(p: Tensor) -> None:
    p.data = p.data - p.grad


def write_list(p: Tensor) -> None:
    torch._foreach_sub_([p], [p.grad])


def write_out(p: Tensor) -> None:
    torch.sub(p.detach(), p.grad, out=p.detach())


@pytest.mark.parametrize(
    "update", [add, write_data, assign_data, write_list, write_out]
)
@pytest.mark.parametrize("call", ["fit", "measure", "manager"])
def test_parameters_that_backward_updates_are_put_back(update, call):
    model, batch = blocks(), odd_batch()

    @torch.no_grad()
    def hook(p: Tensor) -> None:
        update(p)
        p.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    before = copy.deepcopy(model.state_dict())
    if call == "fit":
        recoup.fit(model, batch, 0.9, loss=mean_square)
    elif call == "measure":
        recoup.measure(model, batch, loss=mean_square)
    else:
        recoup.CheckpointManager(auto_checkpoint=True).apply(model)(batch)
    assert list(tree_differences(before, model.state_dict(), where="")) == []


def test_parameters_that_forward_writes_to_are_put_back():
    torch.manual_seed(0)
    table = nn.Embedding(20, 16, max_norm=1.0)
    model = nn.Sequential(table, nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    batch = torch.arange(20)
    twin = copy.deepcopy(model)
    recoup.fit(model, batch, 1.0, loss=mean_square)
    for each in (model, twin):
        mean_square(each(batch)).backward()
    found = [
        {**each.state_dict(), "gradients": [p.grad for p in each.parameters()]}
        for each in (twin, model)
    ]
    assert list(tree_differences(*found, where="")) == []


def test_nothing_is_copied_where_nothing_is_written():
    model, batch = blocks(), odd_batch()
    written = WrittenTensors(model.parameters())
    with written.watched():
        mean_square(model(batch)).backward()
    assert written.copies == []


class Trainer:
    """Has the model and something else, in an object."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.batch = blocks(), odd_batch()
        self.critic = nn.BatchNorm1d(1)

    def step(self) -> None:
        mean_square(self.critic(self.model(self.batch).flatten()[:, None])).backward()


@pytest.mark.parametrize("how", ["method", "lambda", "in a list"])
def test_what_objects_of_a_step_hold_is_put_back(how):
    trainer = Trainer()
    holders = [trainer]
    steps = {
        "method": trainer.step,
        "lambda": lambda: trainer.step(),
        "in a list": lambda: holders[0].step(),
    }
    trainer.step()
    before = state_of(trainer.critic)
    recoup.fit(trainer.model, step=steps[how], budget=1.0)
    assert list(tree_differences(before, state_of(trainer.critic), where="")) == []
