"""The host tier on an accelerator: same bits, less memory, nobody waits."""

import functools
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from recoup import CheckpointScope, Host, KeepCostly
from recoup.engine.tiers.host import pool_of
from recoup.tiers import Tier, tier_usage
from tests.support.models import PROBLEMS, training
from tests.support.twin import Region, Step, compare

pytestmark = pytest.mark.cuda

MIB = 1 << 20
TIERS: dict[str, Tier] = {
    "host": Host(smallest_bytes=0),
    "host, narrow": Host(smallest_bytes=0, window_bytes=1024),
    "host, one at a time": Host(smallest_bytes=0, window_bytes=0),
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Compare bits only where PyTorch itself gives the same bits twice."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_the_accelerator(step: Step) -> Step:
    def moved(region: Region):
        with torch.device("cuda"):
            return step(region)

    return moved


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("options", [{}, {"policy": KeepCostly()}])
def test_training_is_bitwise_the_twin(name, tier, options):
    step = training(PROBLEMS[name], steps=3, optimizer=torch.optim.AdamW)
    region = functools.partial(
        CheckpointScope, verify="always", store=TIERS[tier], **options
    )
    assert compare(on_the_accelerator(step), region) == []


def chain(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x.sin()
    return x


def gradient(x: Tensor, tier: Tier | None, length: int, *, delay: int = 0) -> Tensor:
    """Return the gradient of a chain; the device is `delay` cycles late throughout."""
    x = x.clone().requires_grad_()
    torch.cuda._sleep(delay)
    if tier is None:
        y = chain(x, length)
    else:
        with CheckpointScope("chain", store=tier):
            y = chain(x, length)
    torch.cuda._sleep(delay)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("window_mib", [0, 20, 64, 1024])
@pytest.mark.parametrize("delay", [0, 50_000_000])
def test_a_device_far_behind_the_host_gets_the_same_bits(window_mib, delay):
    x = torch.randn(8 * MIB // 4, device="cuda")
    expected = gradient(x, None, 20)
    tier = Host(window_bytes=window_mib * MIB)
    for _ in range(5):
        assert torch.equal(gradient(x, tier, 20, delay=delay), expected)


def peak_bytes(x: Tensor, tier: Tier | None, length: int) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradient(x, tier, length, delay=50_000_000)
    return torch.cuda.max_memory_allocated() - before


def test_the_peak_falls_by_what_is_moved_less_the_window():
    size_bytes, length, window_bytes = 16 * MIB, 32, 64 * MIB
    x = torch.randn(size_bytes // 4, device="cuda")
    plain_bytes = peak_bytes(x, None, length)
    before = tier_usage()["host"].out_bytes
    moved_bytes = peak_bytes(x, Host(window_bytes=window_bytes), length)
    out_bytes = tier_usage()["host"].out_bytes - before
    assert out_bytes == (length - 1) * size_bytes
    # Beside what is under way there is what the running operator reads and writes.
    working_bytes = 4 * size_bytes
    assert moved_bytes <= plain_bytes - out_bytes + window_bytes + working_bytes


def test_a_step_in_the_steady_state_waits_for_nothing():
    x = torch.randn(16 * MIB // 4, device="cuda")
    tier = Host(window_bytes=64 * MIB)
    for _ in range(2):
        gradient(x, tier, 16)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, torch says
        torch.cuda.set_sync_debug_mode("error")
    try:
        gradient(x, tier, 16, delay=1_000_000)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_device_and_pinned_memory_are_flat_after_the_first_steps():
    x = torch.randn(4 * MIB // 4, device="cuda")
    tier = Host(window_bytes=8 * MIB)
    seen = []
    for _ in range(20):
        gradient(x, tier, 16)
        torch.cuda.synchronize()
        seen.append((torch.cuda.memory_allocated(), pool_of("cuda").total_bytes))
    assert len(set(seen[3:])) == 1
    assert tier_usage()["host"].live_bytes == 0


def test_a_graph_dropped_without_backward_leaves_nothing():
    x = torch.randn(4 * MIB // 4, device="cuda", requires_grad=True)
    tier = Host(window_bytes=8 * MIB)
    for _ in range(3):
        with CheckpointScope("chain", store=tier):
            y = chain(x, 16)
        del y
        with CheckpointScope("other", store=tier):
            chain(x, 1)  # notices what has left
        torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with CheckpointScope("chain", store=tier):
        y = chain(x, 16)
    del y
    torch.cuda.synchronize()
    with CheckpointScope("other", store=tier):
        chain(x, 1)
    assert torch.cuda.memory_allocated() == before
    assert tier_usage()["host"].live_bytes == 0


def test_a_write_after_the_scope_is_an_error_or_comes_too_late_to_matter():
    x = torch.randn(4 * MIB // 4, device="cuda", requires_grad=True)
    with CheckpointScope("chain", store=Host()):
        h = x * 2
        y = h.sin()
    with torch.no_grad():
        expected = (x * 2).cos() * 2
        h.zero_()
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "changed in place" in str(error)  # noqa: PT017 (either is right)
    else:
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
