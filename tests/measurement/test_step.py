"""The cost of a step is what one computes by hand."""

import dataclasses
import time

import pytest
import torch
from torch import nn

from recoup import CheckpointScope
from recoup.errors import UsageError
from recoup.measurement.steps.measured_step import Step, StepCost, measure_step
from recoup.measurement.tracing.saved import SavedBytes

# Bytes of a 16 x 16 matrix of float32, and of the loss.
MATRIX, LOSS = 4 * 16 * 16, 4


def chain(depth):
    """A forward of tanh upon tanh, each of which saves its result, and its leaf."""
    leaf = torch.ones(16, 16, requires_grad=True)

    def forward():
        out = leaf
        for _ in range(depth):
            out = out.tanh()
        return out.sum()

    def prepare():
        leaf.grad = None

    return Step(forward, prepare=prepare, resident=(leaf,)), leaf


def test_bytes_are_those_of_autograd_and_the_loss():
    step, _ = chain(depth=5)
    cost = measure_step(step, device="cpu")
    assert cost.saved_bytes == 5 * MATRIX + LOSS
    # At the start of backward: the leaf, the saved results, the loss, its gradient,
    # and the first gradient, made before the result it uses is freed.
    assert cost.peak_bytes == MATRIX + 5 * MATRIX + 2 * LOSS + MATRIX


def test_saved_bytes_are_what_the_hooks_count_and_the_loss():
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1)
    )
    x = torch.ones(8, 16)

    def forward():
        return model(x).square().sum()

    with SavedBytes(model, x) as saved:
        forward()
    cost = measure_step(Step(forward, prepare=model.zero_grad), device="cpu")
    assert cost.saved_bytes == saved.bytes + LOSS


def test_a_region_shows_in_bytes_and_flops():
    weight = torch.ones(16, 16, requires_grad=True)
    scope = CheckpointScope("block")

    def plain():
        return (weight @ weight).tanh().exp().sum()

    def scoped():
        with scope:
            out = (weight @ weight).tanh().exp()
        return out.sum()

    product_flops = 2 * 16**3
    cost = measure_step(plain, device="cpu")
    assert (cost.saved_bytes, cost.flops) == (2 * MATRIX + LOSS, 3 * product_flops)
    cost = measure_step(scoped, device="cpu")
    assert (cost.saved_bytes, cost.flops) == (LOSS, 4 * product_flops)


def test_only_what_is_named_resident_counts_on_the_cpu():
    step, leaf = chain(depth=2)
    with_leaf = measure_step(step, device="cpu")
    without = measure_step(dataclasses.replace(step, resident=()), device="cpu")
    assert with_leaf.peak_bytes - without.peak_bytes == MATRIX
    assert with_leaf.saved_bytes == without.saved_bytes
    assert leaf.grad is not None


def test_the_step_runs_in_order_and_as_often_as_said():
    events = []
    weight = torch.ones(1, requires_grad=True)

    def forward():
        events.append("forward")
        return weight.sum()

    def backward(loss):
        events.append("backward")
        loss.backward()

    step = Step(forward, backward, prepare=lambda: events.append("prepare"))
    measure_step(step, device="cpu", warmup=2, repeats=3)
    assert events == ["prepare", "forward", "backward"] * (2 + 3 + 2)


def test_the_time_is_the_median_of_the_timed_runs_and_prepare_is_free():
    # Warm-up, three timed runs, the two of memory and operations.
    naps = iter([0.2, 0.5, 0.02, 0.01, 0.0, 0.0])
    weight = torch.ones(1, requires_grad=True)

    def forward():
        time.sleep(next(naps))
        return weight.sum()

    step = Step(forward, prepare=lambda: time.sleep(0.3))
    cost = measure_step(step, device="cpu", warmup=1, repeats=3)
    assert 0.02 <= cost.host_seconds <= cost.seconds < 0.3


def test_every_device_is_measured(device):
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    cost = measure_step(lambda: (weight @ weight).exp().sum(), device=device)
    assert cost.flops == 3 * 2 * 64**3
    # The allocator gives the loss a block of 512 bytes.
    assert cost.saved_bytes == 64 * 64 * 4 + (4 if device.type == "cpu" else 512)
    assert 0 < cost.host_seconds <= cost.seconds


@pytest.mark.parametrize(("warmup", "repeats"), [(-1, 1), (0, 0)])
def test_too_few_runs_are_refused(warmup, repeats):
    with pytest.raises(UsageError, match=f"warmup={warmup} and repeats={repeats}"):
        measure_step(torch.ones, device="cpu", warmup=warmup, repeats=repeats)


def test_a_step_that_returns_no_tensor_is_refused():
    with pytest.raises(UsageError, match="got float"):
        measure_step(lambda: 1.0, device="cpu")  # pyright: ignore[reportArgumentType]


def test_a_cost_cannot_be_changed():
    cost = StepCost(1, 2, 3.0, 4.0, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.flops = 6  # pyright: ignore[reportAttributeAccessIssue]
