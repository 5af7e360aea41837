"""The model's output ends before backward begins, as in a training loop."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recoup
from recoup.backend.memory.meters import StorageMeter
from tests.support.odd_models import Perceptron


@dataclass
class Output:
    """What a language model returns: logits larger than all of its activations."""

    loss: Tensor
    logits: Tensor


class Head(nn.Module):
    """A few blocks and an output projection that dominates memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.Sequential(*(Perceptron() for _ in range(3)))
        self.head = nn.Linear(16, 2048, bias=False)

    def forward(self, x: Tensor, target: Tensor | None = None):
        logits = self.head(self.blocks(x))
        if target is None:
            return logits
        # A log-softmax in double: logits are not what backward needs.
        loss = F.cross_entropy(logits.double(), target)
        if self.kind == "object":
            return Output(loss, logits)
        return {"loss": loss, "logits": logits}


def logit_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.double(), target)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(128, 16), torch.randint(2048, (128,))


def peak_bytes(model: nn.Module, step, *resident: Tensor) -> int:
    model.zero_grad(set_to_none=True)
    step()
    model.zero_grad(set_to_none=True)
    with StorageMeter() as meter:
        meter.track(model, *resident)
        step()
    model.zero_grad(set_to_none=True)
    return meter.peak_bytes


@pytest.mark.parametrize("kind", ["object", "mapping", "loss"])
def test_the_plain_peak_is_that_of_a_loop_that_keeps_the_loss_alone(kind):
    model = Head(kind)
    x, target = inputs()

    def loss_alone() -> Tensor:
        output = model(x, target) if kind != "loss" else model(x)
        if kind == "loss":
            return logit_loss(output, target)
        return output.loss if kind == "object" else output["loss"]

    def loop() -> None:
        loss_alone().backward()

    def holding_loop() -> None:
        output = model(x, target) if kind != "loss" else model(x)
        if kind == "loss":
            loss = logit_loss(output, target)
        else:
            loss = output.loss if kind == "object" else output["loss"]
        loss.backward()
        del output

    expected_bytes = peak_bytes(model, loop, x, target)
    assert expected_bytes < peak_bytes(model, holding_loop, x, target)
    given: Any = {"batch": (x, target)}
    if kind == "loss":
        given = {"batch": (x, target), "loss": logit_loss}
    _, report = recoup.fit(model, budget=1.0, **given)
    report.remove()
    assert report.plain_peak_bytes == expected_bytes
    assert report.measured_peak_bytes == expected_bytes


@pytest.mark.parametrize("kind", ["object", "mapping", "loss"])
def test_a_batch_and_a_step_that_drops_the_output_have_one_floor(kind):
    model = Head(kind)
    x, target = inputs()
    loss = logit_loss if kind == "loss" else None

    def loss_alone() -> Tensor:
        if kind == "loss":
            return logit_loss(model(x), target)
        output = model(x, target)
        return output.loss if kind == "object" else output["loss"]

    _, by_batch = recoup.fit(model, (x, target), 1.0, loss=loss)
    by_batch.remove()
    _, by_step = recoup.fit(model, step=lambda: loss_alone().backward(), budget=1.0)
    by_step.remove()
    counted = by_step.budget_bytes + x.nbytes + target.nbytes
    assert by_batch.budget_bytes in (by_step.budget_bytes, counted)
    assert by_batch.plain_peak_bytes - by_batch.floor_bytes == (
        by_step.plain_peak_bytes - by_step.floor_bytes
    )
