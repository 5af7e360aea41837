"""The trainer under load: memory stays constant, and overhead is small."""

import copy
import cProfile
import gc
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup import Trainer, TrainerSettings, checkpoint_module
from recoup.engine.recording import region
from tests.support.counting import Alive, Operators
from tests.support.training import batches, make_trainer


def tiny(*, fused=False, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    return Trainer(model, optimizer, TrainerSettings(**settings), functional.mse_loss)


def objects_after(trainer, data, *, epochs):
    trainer.fit(data, epochs=epochs)
    return len(gc.get_objects())


def test_10_000_steps_leave_nothing_behind():
    trainer = tiny(average_decay=0.9)
    data = [(torch.randn(2, 4), torch.randn(2, 4))] * 500
    before, after = (objects_after(trainer, data, epochs=n) for n in (2, 18))
    assert trainer.steps == 10_000
    # The collector is off: one leaked object per step would be 9000.
    assert after - before < 50


def test_steps_with_everything_leave_nothing_behind():
    trainer = tiny(precision="fp16", average_decay=0.9, max_gradient_norm=1.0)
    data = [(torch.randn(2, 4), torch.randn(2, 4))] * 50
    before, after = (objects_after(trainer, data, epochs=n) for n in (1, 4))
    assert after - before < 50


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "fp16"},
        {"budget": "1 MiB"},
        {"use_gradient_checkpointing": True},
        {"use_gradient_checkpointing": True, "checkpoint_segment_size": 2},
    ],
    ids=["plain", "fp16", "budget", "checkpointed", "segments"],
)
def test_an_unreferenced_trainer_is_freed_without_the_collector(settings):
    # The first one imports half of torch, and frames of imports are cycles.
    torch.optim.AdamW([torch.ones(1)])
    trainer = make_trainer(**settings)
    trainer.fit(batches(3))
    gone = ref(trainer), ref(trainer.model)
    trainer.release()
    del trainer
    # The collector is off.
    assert [each() for each in gone] == [None, None]


def test_no_memory_of_a_step_outlives_it():
    trainer = tiny(use_gradient_checkpointing=False)
    batch = torch.randn(2, 4), torch.randn(2, 4)
    with Alive() as alive:
        trainer.step(batch)
        first = alive.total_bytes
        for _ in range(20):
            trainer.step(batch)
        # Parameters and moments existed or stay; losses and gradients do not.
        assert alive.total_bytes == first


class ByHand:
    """The hand-written loop to compare with, on its own model."""

    def __init__(self, model, precision, *, fused=False):
        self.model = copy.deepcopy(model)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3, fused=fused)
        self.dtype = TYPES[precision]
        self.scaler = torch.amp.GradScaler("cpu", 1024.0, enabled=precision == "fp16")

    def step(self, batch):
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            loss = functional.mse_loss(self.model(batch[0]), batch[1])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH = torch.randn(2, 4), torch.randn(2, 4)


def contenders(precision, *, fused=False):
    trainer = tiny(fused=fused, precision=precision, initial_loss_scale=1024.0)
    return ByHand(trainer.model, precision, fused=fused), trainer


def operators_of(step):
    with Operators() as operators:
        step(BATCH)
    return operators.counts


@pytest.mark.parametrize("precision", TYPES)
def test_a_step_runs_exactly_the_operators_of_a_hand_written_one(precision):
    by_hand, trainer = contenders(precision)
    for _ in range(3):
        expected, found = operators_of(by_hand.step), operators_of(trainer.step)
        for name in ("detach", "profiler"):
            # Neither computes: the loss for the result, marks for a profiler.
            found.pop(name, None)
            expected.pop(name, None)
        assert found == expected


def test_a_fused_optimizer_adds_one_flag_to_read():
    by_hand, trainer = contenders("fp16", fused=True)
    for contender in (by_hand, trainer):
        contender.step(BATCH)
    more = operators_of(trainer.step) - operators_of(by_hand.step)
    assert more == {"detach": 1, "gt": 1, "_local_scalar_dense": 1}


def test_the_host_reads_nothing_if_the_device_decides():
    by_hand, trainer = contenders("fp16", fused=True)
    trainer._stepper.learns_late = True  # as on an accelerator
    for contender in (by_hand, trainer):
        contender.step(BATCH)
        contender.step(BATCH)
    # One is for the previous step, which is known by now.
    more = operators_of(trainer.step) - operators_of(by_hand.step)
    scale = {"clone": 1, "clamp_": 1}  # which only the device knows
    overflows = {"gt": 2, "add": 1}
    assert more == {"detach": 1, "_local_scalar_dense": 1, **scale, **overflows}


def checkpointed_contenders():
    """The trainer with regions around blocks, and regions put there by hand."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*blocks)
    by_hand = ByHand(model, "bf16")
    for block in by_hand.model:
        checkpoint_module(block)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = TrainerSettings(precision="bf16", use_gradient_checkpointing=True)
    return by_hand, Trainer(model, optimizer, settings, functional.mse_loss)


def test_checkpointing_by_the_trainer_costs_as_much_as_by_hand():
    by_hand, trainer = checkpointed_contenders()
    for contender in (by_hand, trainer):
        contender.step(BATCH)  # verifies
    assert operators_of(trainer.step) - operators_of(by_hand.step) == {"detach": 1}
    # Five tiny calls a module more: its buffers are looked for. By hand there are 2118.
    assert calls_of(trainer.step) - calls_of(by_hand.step) < 150


@pytest.mark.parametrize("precision", TYPES)
def test_regions_are_verified_once_under_any_name(precision, monkeypatch):
    verified = []
    real = region.check_for

    def noted(verify, key):
        check = real(verify, key)
        verified.append(check is not None)
        return check

    monkeypatch.setattr(region, "check_for", noted)
    torch.manual_seed(0)
    for named in (False, True):
        # The first casts its input, the last has a part more: other operators.
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]
        blocks[-1].append(nn.Tanh())
        model = nn.Sequential(*blocks)
        if not named:
            for block in blocks:
                checkpoint_module(block)
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            TrainerSettings(precision=precision, use_gradient_checkpointing=named),
            functional.mse_loss,
        )
        trainer.step(BATCH)
        verified.clear()
        for _ in range(3):
            trainer.step(BATCH)
        assert verified == [False] * 9


def calls_of(step):
    """Return the function calls of a step, of Python and of C."""
    for _ in range(5):
        step(BATCH)
    profile = cProfile.Profile()
    with profile:
        for _ in range(10):
            step(BATCH)
    return sum(entry.callcount for entry in profile.getstats()) / 10


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 60), ("fp16", 150)])
def test_a_step_makes_few_more_calls_than_a_hand_written_one(precision, limit):
    by_hand, trainer = contenders(precision)
    # Most take a tenth of a microsecond. By hand there are 213 and 274.
    assert calls_of(trainer.step) - calls_of(by_hand.step) < limit
