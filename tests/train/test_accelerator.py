"""On an accelerator: no waiting, real memory, and bitwise the hand-written loop."""

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup import Trainer, TrainerSettings
from tests.support.training import Classifier, samples

pytestmark = pytest.mark.cuda

MEBIBYTE = 1 << 20
TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def on_device(count: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = samples(count, seed=seed)
    return inputs.cuda(), targets.cuda()


def make(*, fused: bool = False, **settings) -> Trainer:
    torch.manual_seed(0)
    model = Classifier(32).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return Trainer(
        model, optimizer, TrainerSettings(**settings), functional.cross_entropy
    )


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_it_equals_the_hand_written_loop(precision, recompute, fused):
    torch.manual_seed(0)
    model = Classifier(32).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", 1024.0, enabled=precision == "fp16")
    torch.manual_seed(1)
    for step in range(5):
        inputs, targets = on_device(64, seed=step)
        with torch.autocast("cuda", TYPES[precision], enabled=precision != "fp32"):
            loss = functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    trainer = make(
        fused=fused,
        precision=precision,
        use_gradient_checkpointing=recompute,
        initial_loss_scale=1024.0,
    )
    torch.manual_seed(1)
    for step in range(5):
        result = trainer.step(on_device(64, seed=step))
        assert result.stepped
        assert result.peak_bytes is not None
    pairs = model.parameters(), trainer.model.parameters()
    assert all(map(torch.equal, *pairs))


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Turn every wait for the device into an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, torch says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_step_without_a_scaler_never_waits_for_the_device(
    precision, recompute, request
):
    trainer = make(
        precision=precision,
        use_gradient_checkpointing=recompute,
        max_gradient_norm=1.0,
        average_decay=0.9,
    )
    batch = on_device(64)
    # The first steps verify regions, which reads from the device.
    for _ in range(3):
        trainer.step(batch)
    request.getfixturevalue("no_synchronisation")
    trainer.step(batch)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("norm", [False, True], ids=["layer norm", "batch norm"])
def test_a_step_with_a_fused_optimizer_waits_at_most_for_the_previous_one(
    recompute, norm, request
):
    torch.manual_seed(0)
    model = Classifier(32, dropout=0.0, norm=norm).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    settings = TrainerSettings(precision="fp16", use_gradient_checkpointing=recompute)
    trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
    batch = on_device(64)
    for _ in range(3):
        trainer.step(batch)
    request.getfixturevalue("no_synchronisation")
    results = [trainer.step(batch) for _ in range(3)]
    assert [result.outcome.is_known for result in results] == [True, True, False]


@pytest.mark.parametrize("norm", [False, True], ids=["layer norm", "batch norm"])
def test_an_overflow_known_only_to_the_device_leaves_nothing_behind(norm):
    torch.manual_seed(0)
    model = Classifier(32, dropout=0.0, norm=norm).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    settings = TrainerSettings(precision="fp16", initial_loss_scale=1024.0)
    trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
    trainer.step(on_device(16))
    before = [t.detach().clone() for t in model.state_dict().values()]
    inputs, targets = on_device(16, seed=1)
    inputs[0] = math.inf
    result = trainer.step((inputs, targets))
    assert not result.outcome.is_known
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert result.skipped
    assert trainer.skipped_steps == 1


def test_an_overflow_with_a_fused_optimizer_leaves_nothing_behind():
    for fused in (False, True):
        trainer = make(fused=fused, precision="fp16", average_decay=0.9)
        trainer.step(on_device(16))
        before = [p.detach().clone() for p in trainer.model.parameters()]
        state = torch.cuda.get_rng_state()
        inputs, targets = on_device(16, seed=1)
        inputs[0] = math.inf
        assert trainer.step((inputs, targets)).skipped
        assert all(map(torch.equal, before, trainer.model.parameters()))
        assert torch.equal(state, torch.cuda.get_rng_state())


class Wide(nn.Module):
    """Blocks whose activations are far larger than their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 1024), nn.GELU(), nn.Linear(1024, 4))
            for _ in range(8)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x[:, :3]


@pytest.fixture
def little_memory() -> Iterator[int]:
    """Allow this process a little more than it has reserved."""
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info()
    allowed_bytes = torch.cuda.memory_reserved() + 400 * MEBIBYTE
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes)
    yield allowed_bytes
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_that_does_not_fit_is_computed_in_pieces(little_memory):
    # One block's activations: 200000 x 1024 x 4 bytes, twice: 1.5 GiB.
    batch = on_device(200_000)
    torch.manual_seed(0)
    model = Wide().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    trainer = Trainer(model, optimizer, loss_fn=functional.cross_entropy)
    first, second = trainer.step(batch), trainer.step(batch)
    assert first.parts == second.parts
    assert first.parts >= 4
    assert (second.peak_bytes or 0) <= little_memory
    assert second.loss < first.loss


def test_a_budget_holds_on_the_allocator():
    torch.manual_seed(0)
    model = Wide().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = on_device(20_000)
    free = Trainer(model, optimizer, loss_fn=functional.cross_entropy)
    plain = free.step(batch).peak_bytes or 0
    budget = int(0.6 * plain)
    settings = TrainerSettings(budget=budget)
    trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
    peaks = [trainer.step(batch).peak_bytes or 0 for _ in range(3)]
    trainer.release()
    assert 0 < max(peaks[1:]) <= budget


def test_a_run_resumes_to_the_same_bits(tmp_path):
    batches = [on_device(32, seed=step) for step in range(8)]
    first = make(precision="fp16", average_decay=0.9)
    torch.manual_seed(2)
    for number, batch in enumerate(batches):
        if number == 4:
            first.save(tmp_path / "run")
        first.step(batch)
    second = make(precision="fp16", average_decay=0.9)
    torch.manual_seed(3)
    second.load(tmp_path / "run")
    for batch in batches[4:]:
        second.step(batch)
    pairs = first.model.parameters(), second.model.parameters()
    assert all(map(torch.equal, *pairs))
