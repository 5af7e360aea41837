"""Out of memory: recompute more, then split the batch; the gradients are the same."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup import Trainer, TrainerSettings
from recoup.checkpointing import is_checkpointed
from tests.support.bits import tree_differences
from tests.support.training import (
    Ceiling,
    Classifier,
    batches,
    make_trainer,
    remains,
    samples,
)
from tests.support.twin import leftovers


class Wide(nn.Module):
    """Blocks whose activations are many times their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh())
            for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x[:, :3]


def trained(limit_bytes, *, count=512, steps=3, **settings):
    """Train under a memory limit; return the state, the results, and the limit."""
    torch.manual_seed(0)
    model = Wide().double()
    # Plain SGD: the updates show the gradients.
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        TrainerSettings(**settings),
        functional.cross_entropy,
    )
    inputs, targets = samples(count)
    batch = inputs.double(), targets
    with Ceiling(limit_bytes) as ceiling:
        results = [trainer.step(batch) for _ in range(steps)]
    return list(model.parameters()), results, ceiling, model


UNLIMITED = 1 << 40


def test_a_step_that_does_not_fit_is_retried_with_blocks_recomputed(caplog):
    expected, _, free, plain = trained(UNLIMITED)
    assert not any(is_checkpointed(block) for block in plain.blocks)
    found, results, ceiling, model = trained(free.peak_bytes // 2)
    assert ceiling.raised == 1
    assert all(is_checkpointed(block) for block in model.blocks)
    assert [result.parts for result in results] == [1, 1, 1]
    # Replays give the bits of the first run.
    assert all(map(torch.equal, expected, found))
    assert "every block is recomputed" in caplog.text


def test_a_step_that_still_does_not_fit_is_computed_in_pieces(caplog):
    expected, whole, free, _ = trained(UNLIMITED)
    found, results, ceiling, _ = trained(free.peak_bytes // 8)
    assert ceiling.raised >= 2
    assert results[0].parts > 1
    # The next steps start with the measures that made it fit.
    assert {result.parts for result in results} == {results[0].parts}
    for one, other in zip(expected, found, strict=True):
        # Sums over 512 samples in another order, in 53 bits.
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    for one, other in zip(whole, results, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
    assert f"in {results[0].parts} pieces" in caplog.text
    assert list(leftovers()) == []


def test_memory_of_a_failed_attempt_is_freed_before_the_next():
    _, _, free, _ = trained(UNLIMITED)
    limit = free.peak_bytes // 8
    _, _, ceiling, _ = trained(limit)
    # What the ceiling saw never stayed above it: each attempt began from nothing.
    assert ceiling.peak_bytes < 2 * limit


def test_recovery_can_be_switched_off():
    _, _, free, _ = trained(UNLIMITED)
    with pytest.raises(torch.OutOfMemoryError):
        trained(free.peak_bytes // 2, recover_from_out_of_memory=False)


def test_without_measures_left_the_error_has_the_reason_and_nothing_changed():
    trainer = make_trainer()
    batch = batches(1)[0]
    trainer.step(batch)
    before = remains(trainer)
    with Ceiling(100), pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.step(batch)
    assert "in 8 pieces and cannot be split further" in caught.value.__notes__[0]
    assert list(tree_differences(before, remains(trainer), where="")) == []


def test_batches_of_a_model_with_batch_statistics_are_not_split():
    trainer, batch = make_trainer(norm=True), batches(1)[0]
    trainer.step(batch)
    with Ceiling(100), pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.step(batch)
    assert "batch normalisation" in caught.value.__notes__[0]


def test_batches_that_cannot_be_split_stay_whole():
    model = Classifier()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda outputs, targets: outputs.square().mean() * targets,
    )
    with Ceiling(100), pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.step((torch.ones(4, 4), torch.ones(())))
    assert "different lengths" in caught.value.__notes__[0]


def test_a_step_that_fails_halfway_leaves_no_partial_gradients():
    # The second of two accumulated batches is too large: the first one's gradients
    # are there by then, and must not count twice.
    pairs = batches(1)[0], samples(400)
    small, large = ((inputs.double(), targets) for inputs, targets in pairs)
    ends = []
    for limit in (UNLIMITED, 80_000):
        torch.manual_seed(0)
        model = Classifier(dropout=0.0).double()
        # Plain SGD: the updates show the gradients.
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = Trainer(model, optimizer, loss_fn=functional.cross_entropy)
        with Ceiling(limit) as ceiling:
            trainer.step(small, large)
        ends.append(list(model.parameters()))
    assert ceiling.raised
    for one, other in zip(*ends, strict=True):
        # Sums over 408 samples in another order, in 53 bits: the last bits of numbers
        # up to 1. The small batch counted twice would change gradients by a 50th.
        assert torch.allclose(one, other, rtol=0, atol=2**-48)


def test_other_errors_are_not_treated_as_out_of_memory(caplog):
    def broken(outputs, targets):
        raise ZeroDivisionError

    trainer = make_trainer(loss_fn=broken)
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
        trainer.step(batches(1)[0])
    assert caplog.messages == []
    assert trainer.steps == 0


def test_the_number_of_pieces_is_saved_in_a_snapshot(tmp_path):
    trainer = make_trainer(dropout=0.0)
    batch = samples(400)
    with Ceiling(40_000):
        pieces = trainer.step(batch).parts
    assert pieces > 1
    trainer.save(tmp_path / "run")
    other = make_trainer(seed=1, dropout=0.0)
    other.load(tmp_path / "run")
    assert other.step(batch).parts == pieces
    assert isinstance(other.model, Classifier)
    assert all(is_checkpointed(block) for block in other.model.blocks)
