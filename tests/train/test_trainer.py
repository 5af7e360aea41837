"""The trainer: bitwise the hand-written loop, and skipped steps leave no trace."""

import logging
import math
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup import GradientScaler, Trainer, TrainerSettings
from recoup.checkpointing import is_checkpointed
from recoup.errors import SnapshotError, UsageError
from tests.support.bits import tree_differences
from tests.support.training import (
    Classifier,
    CountedSchedule,
    batches,
    make_trainer,
    remains,
    samples,
    seeded,
)
from tests.support.twin import leftovers


def by_hand(
    data, *, precision=None, clip=None, decay=None, norm=False, epochs=1, seed=0
):
    """The hand-written loop with torch alone."""
    torch.manual_seed(seed)
    model = Classifier(norm=norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=1024.0, enabled=precision is torch.float16
    )
    average = [p.detach().clone() for p in model.parameters()]
    losses = []
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", precision, enabled=precision is not None):
                loss = functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            if decay is not None:
                for mean, parameter in zip(average, model.parameters(), strict=True):
                    mean.lerp_(parameter.detach(), 1 - decay)
            losses.append(loss.item())
    return model, optimizer, losses, average


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("norm", [False, True], ids=["layer norm", "batch norm"])
def test_it_is_bitwise_the_hand_written_loop(precision, checkpointed, norm):
    data = batches(6)
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model, optimizer, losses, average = by_hand(
        data, precision=dtype, clip=0.5, decay=0.9, norm=norm, epochs=2
    )
    trainer = make_trainer(
        norm=norm,
        precision=precision,
        max_gradient_norm=0.5,
        average_decay=0.9,
        initial_loss_scale=1024.0,
        use_gradient_checkpointing=checkpointed,
    )
    seen = []
    result = trainer.fit(data, epochs=2, on_step=lambda step: seen.append(step.loss))
    assert seen == losses
    assert (result.steps, result.skipped, result.epochs) == (12, 0, 2)
    assert trainer.average is not None
    expected = model.state_dict(), optimizer.state_dict(), average
    found = (
        trainer.model.state_dict(),
        trainer.optimizer.state_dict(),
        list(trainer.average.parameters.values()),
    )
    assert list(tree_differences(expected, found, where="")) == []


def test_a_step_returns_its_result():
    trainer = make_trainer(precision="fp16", max_gradient_norm=1.0, measure_memory=True)
    result = trainer.step(batches(1)[0])
    assert result.number == 1
    assert result.stepped
    assert not result.skipped
    assert result.scale == 65536.0
    assert 0.1 < result.loss < 10
    assert result.gradient_norm is not None
    assert result.gradient_norm > 0
    assert result.seconds > 0
    assert result.parts == 1
    parameters = sum(p.numel() * 4 for p in trainer.model.parameters())
    assert result.peak_bytes is not None
    # Parameters, their gradients and two moments of each are alive at once.
    assert result.peak_bytes >= 4 * parameters


def test_without_a_scaler_there_is_no_scale_and_nothing_is_measured():
    result = make_trainer().step(batches(1)[0])
    assert (result.scale, result.gradient_norm, result.peak_bytes) == (None, None, None)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "settings",
    [{"precision": "fp16"}, {"skip_nonfinite": True}],
    ids=["fp16", "fp32 that skips"],
)
def test_a_step_with_nonfinite_gradients_leaves_nothing_behind(bad, settings):
    good, spoilt = batches(4), batches(1, seed=9)[0]
    spoilt[0][3, 1] = bad
    trainer = make_trainer(norm=True, average_decay=0.9, **settings)
    trainer.step(good[0])
    trainer.step(good[1])
    before = remains(trainer)
    result = trainer.step(spoilt)
    assert result.skipped
    assert list(tree_differences(before, remains(trainer), where="")) == []
    assert trainer.skipped_steps == 1
    assert result.scale == (65536.0 if trainer.scaler else None)


def fused_trainer(*, norm: bool, dropout: float) -> Trainer:
    """Return a trainer whose optimizer decides on the device whether to step."""
    torch.manual_seed(0)
    model = Classifier(norm=norm, dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    settings = TrainerSettings(precision="fp16", initial_loss_scale=1024.0)
    trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
    # As on an accelerator; here the host knows immediately.
    trainer._stepper.learns_late = True
    return trainer


@pytest.mark.parametrize("norm", [False, True], ids=["layer norm", "batch norm"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_nonfinite_step_known_only_to_the_device_leaves_nothing_behind(
    norm, dropout, bad, caplog
):
    good, spoilt = batches(4), batches(1, seed=9)[0]
    spoilt[0][3, 1] = bad
    trainer = fused_trainer(norm=norm, dropout=dropout)
    trainer.step(good[0])
    trainer.step(good[1])
    before = remains(trainer)
    result = trainer.step(spoilt)
    # With random numbers, the host must know whether to draw them again.
    assert result.outcome.is_known == (dropout > 0)
    assert list(tree_differences(before, remains(trainer), where="")) == []
    assert not trainer.step(good[2]).outcome.is_known or dropout > 0
    assert result.outcome.is_known
    assert "Gradient overflow detected" in caplog.text
    assert (result.stepped, result.skipped, trainer.skipped_steps) == (False, True, 1)


def test_the_progress_of_steps_known_only_to_the_device_is_shown(capsys):
    spoilt = batches(1, seed=9)[0]
    spoilt[0][0] = math.inf
    trainer = fused_trainer(norm=True, dropout=0.0)
    trainer.settings = TrainerSettings(precision="fp16", show_progress=True)
    assert trainer.fit([spoilt, *batches(2)]).skipped == 1
    assert "epoch 1" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_run_with_a_skipped_step_equals_the_run_without_it(place):
    data, spoilt = batches(6), batches(1, seed=9)[0]
    spoilt[0][0] = math.inf
    ends = []
    for extra in ([], [spoilt]):
        trainer = make_trainer(
            norm=True,
            average_decay=0.9,
            precision="fp16",
            dynamic_loss_scale=False,
            initial_loss_scale=1024.0,
        )
        with seeded(5):
            trainer.fit([*data[:place], *extra, *data[place:]])
        ends.append(remains(trainer))
    assert list(tree_differences(*ends, where="")) == []


def test_a_skipped_step_shrinks_the_scale_and_nothing_else():
    trainer = make_trainer(precision="fp16")
    spoilt = batches(1)[0]
    spoilt[0][0] = math.inf
    scales = [trainer.step(spoilt).scale for _ in range(3)]
    assert scales == [65536.0, 32768.0, 16384.0]
    assert isinstance(trainer.scaler, GradientScaler)
    assert trainer.scaler.skipped_updates == 3


def test_160_overflows_in_a_row_and_then_it_trains():
    trainer, good = make_trainer(precision="fp16"), batches(20)
    spoilt = batches(1)[0]
    spoilt[0][0] = math.inf
    for _ in range(160):
        assert trainer.step(spoilt).skipped
    losses = [trainer.step(batch).loss for batch in good]
    assert trainer.skipped_steps == 160
    assert losses[-1] < losses[0] / 2


def test_accumulated_batches_of_any_sizes_make_the_gradients_of_one():
    inputs, targets = samples(20)
    inputs, sizes = inputs.double(), [3, 8, 1, 8]
    pieces = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    ends = []
    for parts in ([(inputs, targets)], pieces):
        torch.manual_seed(0)
        model = Classifier(dropout=0.0).double()
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=functional.cross_entropy,
        )
        result = trainer.step(*parts)
        ends.append([result.loss, *(p.detach() for p in model.parameters())])
    for whole, summed in zip(*ends, strict=True):
        # Sums in another order: a few units in the last of 53 bits.
        assert whole == pytest.approx(summed, rel=1e-12, abs=1e-14)


def test_the_loop_groups_batches_and_trains_on_the_rest():
    trainer = make_trainer(accumulation_steps=4)
    parts = []
    result = trainer.fit(batches(10), on_step=lambda step: parts.append(step.parts))
    assert parts == [4, 4, 2]
    assert result.steps == 3


def test_weights_may_differ_from_sample_counts():
    inputs, targets = samples(8)
    inputs = inputs.double()
    targets[5:] = -100  # ignored by the loss
    pieces = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]

    def counted(batch):
        return float((batch[1] != -100).sum())

    ends = []
    for parts in ([(inputs, targets)], pieces):
        torch.manual_seed(0)
        model = Classifier(dropout=0.0).double()
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=functional.cross_entropy,
            weight_fn=counted,
        )
        trainer.step(*parts)
        ends.append(list(model.parameters()))
    for whole, summed in zip(*ends, strict=True):
        # Sums over 5 samples in another order. Measured: the last bit of a parameter
        # of size 1/2; gradients are smaller, and ten times less of them is added.
        assert torch.allclose(whole, summed, rtol=0, atol=2**-52)


def to_points(scores, targets):
    """Compare with numbers that are not classes: samples count."""
    return functional.mse_loss(scores[:, 0], targets.float())


@pytest.mark.parametrize("loss_fn", [to_points, functional.cross_entropy])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_batch_without_samples_changes_nothing(loss_fn, pieces, place):
    some = batches(2)
    data = [*some[:place], (torch.zeros(0, 4), some[0][1][:0]), *some[place:]]
    if loss_fn is to_points:
        some, data = ([(x, y.float()) for x, y in each] for each in (some, data))
    without, trainer = (make_trainer(loss_fn=loss_fn) for _ in "ab")
    results = []
    for each, given in ((without, some), (trainer, data)):
        each._stepper.recovery.pieces = pieces
        with seeded(3):
            results.append(each.step(*given))
    assert results[1].loss == results[0].loss
    assert results[1].parts == results[0].parts
    assert list(tree_differences(remains(without), remains(trainer), where="")) == []


def test_a_step_without_samples_is_refused_and_changes_nothing():
    trainer = make_trainer()
    nothing = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    before = remains(trainer)
    for given in ([nothing], [nothing, nothing]):
        with pytest.raises(UsageError, match="a step needs samples"):
            trainer.step(*given)
    assert trainer.steps == 0
    assert list(tree_differences(before, remains(trainer), where="")) == []


def test_gradients_do_not_accumulate_over_steps():
    trainer = make_trainer()
    batch = batches(1)[0]
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    trainer.optimizer.zero_grad()
    trainer.step(batch)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_gradients_left_by_other_code_do_not_count():
    ends = []
    for dirty in (False, True):
        trainer = make_trainer()
        if dirty:
            for parameter in trainer.model.parameters():
                parameter.grad = torch.ones_like(parameter)
        with seeded(3):
            trainer.step(batches(1)[0])
        ends.append(remains(trainer))
    assert list(tree_differences(*ends, where="")) == []


def test_parameters_added_to_the_optimizer_later_are_trained():
    data, ends = batches(4), []
    for trained in (True, False):
        torch.manual_seed(0)
        model = Classifier(dropout=0.0)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        settings = TrainerSettings(max_gradient_norm=0.01)
        trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
        for number, (inputs, targets) in enumerate(data):
            if number == 1:
                rest = [*model.stem.parameters(), *model.blocks.parameters()]
                optimizer.add_param_group({"params": rest})
            if trained:
                trainer.step((inputs, targets))
                continue
            model.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(owned, 0.01)
            optimizer.step()
        ends.append(model.state_dict())
    assert list(tree_differences(*ends, where="")) == []


def test_a_missing_folder_for_snapshots_is_refused_before_the_run(tmp_path):
    trainer = make_trainer(snapshot_path=tmp_path / "missing" / "run")
    with pytest.raises(UsageError, match="no folder"):
        trainer.fit(batches(2))
    assert trainer.steps == 0


@pytest.mark.parametrize("epochs", [0, 1.5, "3", True])
def test_an_invalid_number_of_epochs_is_refused(epochs):
    with pytest.raises(UsageError, match="expected epochs to be an integer"):
        make_trainer().fit(batches(1), epochs)


def test_empty_or_exhausted_data_is_refused():
    class Once:
        def __init__(self):
            self.left = iter(batches(2))

        def __iter__(self):
            return self.left

    with pytest.raises(UsageError, match="epoch 1 has no batch"):
        make_trainer().fit([])
    trainer = make_trainer()
    with pytest.raises(UsageError, match="epoch 2 has no batch"):
        trainer.fit(Once(), epochs=2)
    assert (trainer.steps, trainer.epoch) == (2, 1)


def test_a_model_may_return_its_loss():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Classifier(dropout=0.0)

        def forward(self, inputs, targets):
            return {"loss": functional.cross_entropy(self.inner(inputs), targets)}

    torch.manual_seed(0)
    model = Own()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = batches(1)[0]
    spread, named = (inputs, targets), {"inputs": inputs, "targets": targets}
    first = trainer.step(spread).loss
    assert trainer.step(named).loss < first


@pytest.mark.parametrize("seed", range(3))
def test_all_precisions_reach_the_same_accuracy(seed, record_property):
    test_inputs, test_targets = samples(300, seed=100 + seed)
    accuracies = {}
    for precision in ("fp32", "bf16", "fp16"):
        trainer = make_trainer(seed=seed, precision=precision, dropout=0.0)
        with seeded(seed):
            trainer.fit(batches(12, 16, seed=seed), epochs=4)
        trainer.model.eval()
        with torch.no_grad():
            found = trainer.model(test_inputs).argmax(1)
        accuracies[precision] = (found == test_targets).float().mean().item()
    record_property("accuracies", accuracies)
    assert accuracies["fp32"] > 0.85
    for precision in ("bf16", "fp16"):
        assert abs(accuracies[precision] - accuracies["fp32"]) < 0.05, accuracies


def test_an_epoch_schedule_advances_once_an_epoch():
    trainer = make_trainer(schedule_each="epoch")
    trainer.fit(batches(5), epochs=3)
    assert trainer.scheduler is not None
    assert trainer.scheduler.get_last_lr() == [pytest.approx(0.05 * 0.9**3)]


def test_each_call_of_fit_adds_its_number_of_epochs():
    trainer = make_trainer()
    data = batches(3)
    assert trainer.fit(data, epochs=2).epochs == 2
    assert trainer.fit(data, epochs=1).epochs == 3
    assert trainer.steps == 9


def test_regions_are_put_around_every_block_and_replays_are_bitwise():
    trainer = make_trainer(use_gradient_checkpointing=True)
    assert isinstance(trainer.model, Classifier)
    assert all(is_checkpointed(block) for block in trainer.model.blocks)
    trainer.step(batches(1)[0])
    assert list(leftovers()) == []


def test_mixed_precision_is_announced_in_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="recoup.train"):
        make_trainer()
        assert caplog.messages == []
        make_trainer(enable_mixed_precision=True)
    assert caplog.messages == ["Mixed Precision Training enabled: torch.bfloat16"]


def test_an_interrupt_ends_the_run_after_its_step_and_it_can_continue():
    data = batches(8)
    whole = make_trainer(average_decay=0.9)
    with seeded(1):
        whole.fit(data, epochs=2)
    halves = make_trainer(average_decay=0.9)

    def interrupt(step):
        if step.number in (3, 8):
            signal.raise_signal(signal.SIGINT)

    with seeded(1):
        first = halves.fit(data, epochs=2, on_step=interrupt)
        assert first.interrupted
        assert first.steps == 3
        second = halves.fit(data, epochs=2, on_step=interrupt)
        assert second.interrupted
        assert second.steps == 5
        third = halves.fit(data, epochs=2)
    assert not third.interrupted
    assert third.steps == 8
    assert list(tree_differences(remains(whole), remains(halves), where="")) == []


def test_an_error_in_the_model_does_not_change_the_run():
    trainer = make_trainer(norm=True)
    good, bad = batches(2), (torch.randn(4, 4), torch.tensor([0, 1, 2, 99]))
    trainer.step(good[0])
    before = remains(trainer)
    with pytest.raises(IndexError):
        trainer.step(bad)
    assert list(tree_differences(before, remains(trainer), where="")) == []
    trainer.step(good[1])


def test_a_progress_bar_shows_epochs_and_losses(capsys):
    trainer = make_trainer(show_progress=True, precision="fp16")
    trainer.fit(batches(4), epochs=2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "epoch 2" in shown.err
    assert "4/4" in shown.err
    assert "loss" in shown.err


class Unclosed(torch.optim.SGD):
    """An optimizer that requires a closure."""

    def step(self, closure):  # pyright: ignore[reportIncompatibleMethodOverride]
        return closure()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda m: Trainer(nn.ReLU(), torch.optim.SGD(m.parameters())),
            "with parameters to train, got ReLU",
        ),
        (
            lambda m: Trainer(m, torch.optim.SGD(nn.Linear(2, 2).parameters())),
            "none of the model's parameters",
        ),
        (
            lambda m: Trainer(m, torch.optim.LBFGS(m.parameters())),
            "which needs a closure",
        ),
        (lambda m: Trainer(m, Unclosed(m.parameters())), "which needs a closure"),
        (
            lambda m: Trainer(
                m.half(),
                torch.optim.SGD(m.parameters()),
                TrainerSettings(precision="fp16"),
            ),
            "parameters in float32",
        ),
        (
            lambda m: Trainer(
                nn.Linear(2, 2),
                torch.optim.SGD(m.parameters()),
            ),
            "none of the model's parameters",
        ),
    ],
)
def test_incompatible_models_and_optimizers_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make(Classifier())


def test_incompatible_schedulers_are_refused():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters())
    other = torch.optim.SGD(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    elsewhere = torch.optim.lr_scheduler.ExponentialLR(other, 0.9)
    for scheduler, words in (
        (plateau, "measure of progress"),
        (elsewhere, "got one of another"),
    ):
        with pytest.raises(UsageError, match=words):
            Trainer(model, optimizer, scheduler=scheduler)


def test_a_model_without_blocks_is_refused_checkpointing():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(UsageError, match=r"repeated blocks .* got none"):
        Trainer(
            model,
            torch.optim.SGD(model.parameters()),
            TrainerSettings(use_gradient_checkpointing=True),
        )


def test_invalid_batches_are_refused():
    trainer = make_trainer()
    with pytest.raises(UsageError, match="expected at least one batch"):
        trainer.step()
    with pytest.raises(UsageError, match="pair of inputs and targets"):
        trainer.step(torch.ones(3, 4))
    with pytest.raises(UsageError, match="cannot be iterated again"):
        trainer.fit(iter(batches(2)))
    with pytest.raises(UsageError, match="at least 1"):
        trainer.fit(batches(2), epochs=0)
    with pytest.raises(UsageError, match="snapshot_path"):
        trainer.fit(batches(2), resume=True)


def test_a_loss_of_several_elements_is_refused():
    trainer = make_trainer(loss_fn=lambda outputs, targets: outputs.sum(1))
    with pytest.raises(UsageError, match="one element"):
        trainer.step(batches(1)[0])


class TestTrainingMode:
    def test_a_model_in_evaluation_mode_is_trained_in_training_mode(self, caplog):
        """As `from_pretrained` returns it, or an evaluation leaves it."""
        trainer, twin = make_trainer(norm=True), make_trainer(norm=True)
        data = batches(2)
        trainer.model.eval()
        torch.manual_seed(1)
        trainer.step(data[0])
        trainer.fit(data, on_step=lambda _: trainer.model.eval())
        torch.manual_seed(1)
        twin.step(data[0])
        twin.fit(data)
        assert "put in training mode" in caplog.text
        for mine, other in zip(
            trainer.model.state_dict().values(),
            twin.model.state_dict().values(),
            strict=True,
        ):
            assert torch.equal(mine, other)

    def test_parts_in_evaluation_mode_stay_there(self):
        trainer = make_trainer(norm=True)
        norms = [m for m in trainer.model.modules() if isinstance(m, nn.BatchNorm1d)]
        for norm in norms:
            norm.eval()
        trainer.fit(batches(2))
        assert not any(norm.training for norm in norms)
        assert all(norm.num_batches_tracked == 0 for norm in norms)
        trainer.model.eval()
        trainer.model.get_submodule("head").train()
        trainer.fit(batches(2))
        assert not trainer.model.training


class TestSeveralOptimizers:
    def make(self, *, joint: bool, seed: int = 0, **settings: Any) -> Trainer:
        torch.manual_seed(seed)
        model = Classifier(dropout=0.0)
        head = list(model.head.parameters())
        body = [p for p in model.parameters() if all(p is not h for h in head)]
        if joint:
            optimizers = [
                torch.optim.AdamW(body, lr=0.05),
                torch.optim.AdamW(head, lr=0.01, weight_decay=0.1),
            ]
        else:
            groups = [
                {"params": body, "lr": 0.05},
                {"params": head, "lr": 0.01, "weight_decay": 0.1},
            ]
            optimizers = [torch.optim.AdamW(groups)]
        schedules = [CountedSchedule(optimizer) for optimizer in optimizers]
        return Trainer(
            model,
            optimizers,
            TrainerSettings(**settings),
            functional.cross_entropy,
            scheduler=schedules,
        )

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"max_gradient_norm": 0.1, "accumulation_steps": 2},
            {"precision": "fp16", "initial_loss_scale": 2.0**30},
            {"budget": "1MiB", "average_decay": 0.9},
        ],
        ids=str,
    )
    def test_two_optimizers_equal_one_with_two_groups(self, settings):
        data = batches(6)
        one, two = self.make(joint=False, **settings), self.make(joint=True, **settings)
        results = [trainer.fit(data, epochs=2) for trainer in (one, two)]
        assert results[0].skipped == results[1].skipped
        for mine, other in zip(
            two.model.parameters(), one.model.parameters(), strict=True
        ):
            assert torch.equal(mine, other)

    def test_their_states_resume(self, tmp_path):
        data = batches(6)
        whole = self.make(joint=True)
        whole.fit(data, epochs=2)
        first = self.make(joint=True)
        first.fit(data, epochs=1)
        first.save(tmp_path / "run")
        again = self.make(joint=True, seed=5, snapshot_path=tmp_path / "run")
        again.fit(data, epochs=2, resume=True)
        for mine, other in zip(
            again.model.parameters(), whole.model.parameters(), strict=True
        ):
            assert torch.equal(mine, other)

    def test_an_overflow_in_the_parameters_of_one_skips_both(self):
        trainer = self.make(joint=True, precision="fp16", initial_loss_scale=2.0**31)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        result = trainer.step(batches(1)[0])
        assert not result.stepped
        after = trainer.model.parameters()
        assert all(torch.equal(p, b) for p, b in zip(after, before, strict=True))

    def test_a_snapshot_of_other_optimizers_is_refused(self, tmp_path):
        self.make(joint=True).save(tmp_path / "run")
        with pytest.raises(SnapshotError, match=r"CountedSchedule\+CountedSchedule"):
            self.make(joint=False).load(tmp_path / "run")

    def test_incompatible_optimizers_are_refused(self):
        model = nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match="is in two optimizers"):
            Trainer(model, [sgd, torch.optim.SGD([model.weight], lr=0.1)])
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(UsageError, match="none of the model's parameters"):
            Trainer(model, [sgd, other])
        with pytest.raises(UsageError, match="expected an optimizer or a list"):
            Trainer(model, [])
