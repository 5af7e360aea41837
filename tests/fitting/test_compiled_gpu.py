"""Compiled blocks on an accelerator: bits, the allocator's peak, offload, processes."""

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.backend.compiler.partitioning import saved_bytes
from recoup.core.compiled_plan import BlockPartition, CompiledPlan
from recoup.engine.applied.compiled_blocks import CompiledForward, probe
from recoup.engine.applied.offloaded_saves import HOST
from recoup.engine.tiers.account import ACCOUNTS
from recoup.measurement.timing.block_bench import KernelTimes, costed
from recoup.planners.block_choice import saved_sets

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]

DEVICE = torch.device("cuda")
WIDTH, TOKENS, IMAGE = 512, 16384, 64
"""An activation of a layer has 32 MiB: a GPU's matrix products take 65 of workspace."""


class Layer(nn.Module):
    """A perceptron with dropout, whose kernels are deterministic."""

    def __init__(self, width=WIDTH, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        wide = functional.gelu(self.wide(self.norm(hidden)))
        return hidden + self.dropout(self.narrow(wide))


class Attention(nn.Module):
    """A transformer layer."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.mixing, self.inner = nn.Linear(width, 3 * width), Layer(width, 0.0)

    def forward(self, hidden):
        heads = self.mixing(hidden).unflatten(-1, (8, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(*heads.chunk(3, dim=-1))
        return self.inner(hidden + mixed.transpose(1, 2).flatten(2))


class Normed(nn.Module):
    """A convolution with batch normalisation."""

    def __init__(self, channels=32):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, image):
        return functional.relu(self.norm(self.convolution(image))) + image


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Convolutions by algorithms that give the same bits twice; a clean allocator."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    gc.collect()
    torch.accelerator.empty_cache()


def stack(layer, count=4) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(count))).to(DEVICE)


def tokens(count=TOKENS):
    return torch.randn(count, WIDTH, device=DEVICE)


def fitted(model, batch, budget, executor: Any, **options) -> Any:
    _, report = recoup.fit(
        model, batch, budget, loss=torch.sum, compile=executor, **options
    )
    return report


def outcome(model, batch):
    """Train two steps; return losses, gradients, buffers and random numbers."""
    model.to(DEVICE)
    torch.manual_seed(7)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        found.append(loss.detach())
        found.extend(p.grad.clone() for p in model.parameters() if p.requires_grad)
    model.zero_grad()
    return [*found, *(b.clone() for b in model.buffers()), torch.rand(3, device=DEVICE)]


def same(found, wanted):
    return all(map(torch.equal, found, wanted)) and len(found) == len(wanted)


def peak_of(model, batch):
    """Return the allocator's peak of a step."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    loss = model(batch).sum()
    loss.backward()
    model.zero_grad()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize("budget", [0.6, 0.8])
def test_eager_kernels_are_bitwise_within_the_budget(budget):
    model, batch = stack(Layer), tokens()
    twin = copy.deepcopy(model).cpu()  # it would count in peaks
    report = fitted(model, batch, budget, "exact")
    assert report.difference == report.noise == 0
    assert not report.eager
    assert abs(report.predicted_peak_bytes / report.measured_peak_bytes - 1) < 0.01
    assert peak_of(model, batch) <= report.budget_bytes
    assert same(outcome(model, batch), outcome(twin, batch))
    plan = CompiledPlan.from_json(report.plan.to_json())
    report.remove()
    applied = recoup.apply_plan(model, plan)
    assert same(outcome(model, batch), outcome(twin, batch))
    applied.remove()
    assert same(outcome(model, batch), outcome(twin, batch))


def test_batch_norm_is_recomputed_bitwise_and_updates_its_statistics_once():
    model = stack(Normed)
    batch = torch.randn(32, 32, IMAGE, IMAGE, device=DEVICE)
    twin = copy.deepcopy(model).cpu()  # it would count in peaks
    report = fitted(model, batch, 0.7, "exact")
    assert len(report.plan.blocks) == 4
    assert any(not block.saves for block in report.plan.blocks)
    assert report.difference == report.noise
    if not report.noise:
        assert same(outcome(model, batch), outcome(twin, batch))
        assert torch.equal(model[0].norm.running_mean, twin[0].norm.running_mean)


@pytest.mark.parametrize("executor", ["exact", "inductor"])
def test_attention_under_autocast(executor):
    model, batch = stack(Attention), tokens().view(16, -1, WIDTH)

    def step():
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(batch).float().sum()
        loss.backward()

    report: Any
    _, report = recoup.fit(model, step=step, budget=0.6, compile=executor)
    assert len(report.plan.blocks) == 4
    assert report.measured_peak_bytes <= report.budget_bytes
    assert report.difference < 0.05 + 2 * report.noise
    model.zero_grad()
    torch.accelerator.reset_peak_memory_stats()
    step()
    assert torch.accelerator.max_memory_allocated() <= report.budget_bytes


def test_inductor_recomputes_the_masks_of_forward_within_the_budget():
    model, batch = stack(Layer), tokens()
    report = fitted(model, batch, 0.5, "inductor")
    assert report.measured_peak_bytes <= report.budget_bytes
    assert peak_of(model, batch) <= report.budget_bytes
    report.remove()
    block, hidden = model[0], tokens(256).requires_grad_()
    joint = probe(block, "inductor", hidden)
    assert joint.draws
    fastest, *_, smallest = saved_sets(costed(joint, KernelTimes(DEVICE)))
    found = []
    for saved in (fastest, smallest):
        part = BlockPartition("", 0, joint.digest, saved.names, 1 << 30, 0)
        forward = CompiledForward(block, part, "inductor")
        torch.manual_seed(3)
        leaves = [hidden, *block.parameters()]
        found.append(torch.autograd.grad(forward(hidden).sum(), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("executor", ["exact", "inductor"])
def test_saved_values_wait_on_the_host_and_come_back_bitwise(executor):
    block, batch = stack(Layer, 1)[0], tokens().requires_grad_()
    joint = probe(block, executor, batch)
    fastest, *_ = saved_sets(costed(joint, KernelTimes(DEVICE)))
    kept = BlockPartition("", 0, joint.digest, fastest.names, 1 << 40, 0)
    moved_bytes = saved_bytes(joint, fastest.names, least=HOST.smallest_bytes)
    found, moved = [], []
    for partition in (kept, replace(kept, offloads=True)):
        forward = CompiledForward(block, partition, executor)
        before = ACCOUNTS.host.usage
        for _ in range(2):
            torch.manual_seed(3)
            leaves = [batch, *block.parameters()]
            found.append(torch.autograd.grad(forward(batch).sum(), leaves))
        after = ACCOUNTS.host.usage
        moved.append(after.out_bytes - before.out_bytes)
        assert after.live_bytes == before.live_bytes
    assert moved == [0, 2 * moved_bytes]
    assert all(same(each, found[0]) for each in found)


def test_a_step_whose_blocks_offload_takes_less_and_has_the_same_bits():
    model, batch = stack(Layer, 6), tokens()
    twin = copy.deepcopy(model).cpu()  # it would count in peaks
    allow = (recoup.Action.KEEP, recoup.Action.OFFLOAD)
    report = fitted(model, batch, 0.6, "exact", allow=allow)
    assert peak_of(model, batch) <= report.budget_bytes
    assert same(outcome(model, batch), outcome(twin, batch))
    kept = [replace(block, offloads=False) for block in report.plan.blocks]
    report.remove()
    peaks = []
    for offloads in (False, True):
        blocks = tuple(replace(block, offloads=offloads) for block in kept)
        applied = recoup.apply_plan(model, replace(report.plan, blocks=blocks))
        peak_of(model, batch)
        peaks.append(peak_of(model, batch))
        assert same(outcome(model, batch), outcome(twin, batch))
        applied.remove()
    saves = any(block.saved_bytes for block in kept)
    assert peaks[1] < peaks[0] if saves else peaks[1] == peaks[0]


def test_plans_of_a_frontier_take_what_they_say():
    model, batch = stack(Layer), tokens()
    plans = recoup.frontier(model, batch, loss=torch.sum, points=3, compile="exact")
    assert len(plans) > 1
    for plan in plans:
        applied = recoup.apply_plan(model, plan)
        peak_of(model, batch)
        assert abs(peak_of(model, batch) / plan.peak_bytes - 1) < 0.02
        applied.remove()


def test_frozen_layers_and_accumulated_gradients():
    model, batch = stack(Layer), tokens()
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    twin = copy.deepcopy(model).cpu()  # it would count in peaks
    report = fitted(model, batch, 0.8, "exact", accumulate=True)
    assert report.difference == 0
    assert set(report.eager) == {"0", "1"}
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats()
        model(batch).sum().backward()
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated() <= report.budget_bytes
    assert same(outcome(model, batch), outcome(twin, batch))


def test_without_gradients_and_with_another_size():
    model, batch = stack(Layer), tokens()
    twin = copy.deepcopy(model).cpu()  # it would count in peaks
    fitted(model, batch, 0.6, "exact")
    for each in (model, twin):
        each.to(DEVICE).eval()
    with torch.no_grad():
        assert torch.equal(model(batch), twin(batch))
    for each in (model, twin):
        each.train()
    smaller = tokens(TOKENS // 2)
    assert same(outcome(model, smaller), outcome(twin, smaller))


def test_all_executors_are_measured():
    model, batch = stack(Layer, 3), tokens()
    report = fitted(model, batch, 0.7, "auto")
    assert set(report.contenders) == {"inductor", "exact", "False"}
    assert report.measured_peak_bytes <= report.budget_bytes


def test_a_fitted_model_in_a_process_group(tmp_path):
    model, batch = stack(Layer), tokens()
    twin = copy.deepcopy(model).cpu()  # it would count in peaks
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    meeting = f"file://{tmp_path}/meeting"
    distributed.init_process_group(backend, meeting, rank=0, world_size=1)
    try:
        fitted(model, batch, 0.6, "exact")
        parallel = DistributedDataParallel(model)
        assert same(outcome(parallel, batch), outcome(twin, batch))
    finally:
        distributed.destroy_process_group()
