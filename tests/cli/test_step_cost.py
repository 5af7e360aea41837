"""The cost of a step equals the one computed by hand."""

import torch
from torch import nn

from recoup import CheckpointScope
from recoup.cli.demo_training import step_cost
from recoup.measurement.tracing.saved import SavedBytes

# Bytes of a 16 x 16 matrix of float32, and of the loss.
MATRIX, LOSS = 4 * 16 * 16, 4
CPU = torch.device("cpu")


class Weight(nn.Module):
    """Holds one matrix."""

    def __init__(self, size=16, device=CPU):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size, device=device))


def test_bytes_equal_those_of_autograd_and_the_loss():
    model = Weight()

    def forward():
        out = model.weight
        for _ in range(5):  # each tanh saves its result
            out = out.tanh()
        return out.sum()

    cost = step_cost(model, forward, device=CPU)
    assert cost.saved_bytes == 5 * MATRIX + LOSS
    # At the start of backward: the weight, the saved results, the loss, its gradient,
    # and the first gradient, made before the result it uses is freed.
    assert cost.peak_bytes == MATRIX + 5 * MATRIX + 2 * LOSS + MATRIX


def test_saved_bytes_equal_those_of_the_hooks_and_the_loss():
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1)
    )
    x = torch.ones(8, 16)

    def forward():
        return model(x).square().sum()

    with SavedBytes(model, x) as saved:
        forward()
    cost = step_cost(model, forward, device=CPU)
    assert cost.saved_bytes == saved.bytes + LOSS


def test_a_region_shows_in_bytes_and_flops():
    model = Weight()
    weight, scope = model.weight, CheckpointScope("block")

    def plain():
        return (weight @ weight).tanh().exp().sum()

    def scoped():
        with scope:
            out = (weight @ weight).tanh().exp()
        return out.sum()

    product_flops = 2 * 16**3
    cost = step_cost(model, plain, device=CPU)
    assert (cost.saved_bytes, cost.flops) == (2 * MATRIX + LOSS, 3 * product_flops)
    cost = step_cost(model, scoped, device=CPU)
    assert (cost.saved_bytes, cost.flops) == (LOSS, 4 * product_flops)


def test_resident_tensors_count_on_the_cpu_and_are_not_saved():
    model, table = Weight(), torch.ones(16, 16)

    def forward():
        return (model.weight * 2).sum()

    without = step_cost(model, forward, device=CPU)
    cost = step_cost(model, forward, device=CPU, resident=(table,))
    assert cost.peak_bytes - without.peak_bytes == MATRIX
    assert cost.saved_bytes == without.saved_bytes


def test_the_step_runs_eight_times_without_earlier_gradients():
    model, seen = Weight(), []

    def forward():
        seen.append(model.weight.grad)
        return model.weight.sum()

    cost = step_cost(model, forward, device=CPU)
    assert seen == [None] * 8
    assert 0 < cost.host_seconds <= cost.seconds


def test_every_device_is_measured(device):
    model = Weight(64, device)
    weight = model.weight
    cost = step_cost(model, lambda: (weight @ weight).exp().sum(), device=device)
    assert cost.flops == 3 * 2 * 64**3
    # The allocator rounds the loss up to a block of 512 bytes.
    assert cost.saved_bytes == 64 * 64 * 4 + (4 if device.type == "cpu" else 512)
    assert 0 < cost.host_seconds <= cost.seconds
