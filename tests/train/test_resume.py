"""Resuming: a run killed at any moment ends bitwise equal to an uninterrupted one."""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from recoup import Trainer
from recoup.errors import SnapshotError
from recoup.train.saving.snapshot import read_snapshot, write_snapshot
from tests.support import killed
from tests.support.bits import tree_differences
from tests.support.processes import forker
from tests.support.training import (
    CountedSchedule,
    batches,
    make_trainer,
    remains,
    samples,
    seeded,
)


class AskedError(Exception):
    """Raised by `on_step`."""


def read_losses(folder: Path) -> dict[int, str]:
    """Return the losses by step; those of repeated steps must be equal."""
    losses: dict[int, str] = {}
    for line in (folder / "losses").read_text().splitlines():
        number, *loss = line.split()
        if loss and loss[0].startswith(("0x", "nan", "inf")):
            assert losses.setdefault(int(number), loss[0]) == loss[0], "made twice"
    return losses


def test_a_run_killed_at_random_moments_has_the_same_loss_curve(tmp_path, seed):
    context = forker()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    process = context.Process(target=killed.run, args=(whole,))
    process.start()
    process.join()
    assert process.exitcode == 0
    moments = random.Random(seed)
    kills = 0
    while not (broken / "finished").exists():
        process = context.Process(target=killed.run, args=(broken,))
        process.start()
        before = _modified(broken)
        # A start of the interpreter is not a moment of training: wait for progress.
        while process.is_alive() and _modified(broken) == before:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.01))
        process.kill()
        process.join()
        kills += 1
        if (broken / "snapshot").exists():
            read_snapshot(broken / "snapshot")
    assert kills >= 3, "a run that is never killed shows nothing"
    expected = read_losses(whole)
    assert len(expected) == killed.STEPS
    assert read_losses(broken) == expected
    ends = [read_snapshot(folder / "snapshot") for folder in (whole, broken)]
    assert list(tree_differences(*ends, where="")) == []


def _modified(folder: Path) -> float:
    snapshot = folder / "snapshot"
    return snapshot.stat().st_mtime_ns if snapshot.exists() else 0.0


@pytest.mark.parametrize("stop_at", [1, 6, 13])
def test_steps_after_loading_are_bitwise_those_without(tmp_path, stop_at):
    data = batches(14)
    options = {"average_decay": 0.9, "precision": "fp16", "norm": True}
    first, second = make_trainer(**options), make_trainer(seed=99, **options)
    with seeded(4):
        for number, batch in enumerate(data):
            if number == stop_at:
                first.save(tmp_path / "run")
            first.step(batch)
        expected = remains(first)
    with seeded(12345):
        second.load(tmp_path / "run")
        for batch in data[stop_at:]:
            second.step(batch)
    assert list(tree_differences(expected, remains(second), where="")) == []
    assert second.steps == 14


LOADERS = {
    "shuffled": lambda data: DataLoader(data, batch_size=8, shuffle=True),
    "own generator": lambda data: DataLoader(
        data,
        batch_size=8,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    ),
    "own sampler": lambda data: DataLoader(
        data,
        batch_size=8,
        sampler=RandomSampler(
            data, replacement=True, generator=torch.Generator().manual_seed(3)
        ),
    ),
    "in order": lambda data: DataLoader(data, batch_size=8),
}


class Augmented(TensorDataset):
    """Draws random numbers from the global generator for every sample."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(4), target


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("kind", [TensorDataset, Augmented])
def test_loaders_of_every_kind_resume(tmp_path, name, kind):
    def run(trainer, *, stop_at=None, **options):
        losses = []

        def note(step):
            losses.append(step.loss)
            if step.number == stop_at:
                raise KeyboardInterrupt

        loader = LOADERS[name](kind(*samples(72)))
        # As if killed one step after the snapshot: nothing else reaches the next run.
        with contextlib.suppress(KeyboardInterrupt):
            trainer.fit(loader, epochs=2, on_step=note, **options)
        return losses

    path = {"snapshot_path": tmp_path / "run"}
    with seeded(8):
        expected = run(make_trainer())
    with seeded(8):
        begun = run(make_trainer(**path, snapshot_every_steps=13), stop_at=14)
    with seeded(1234):
        rest = run(make_trainer(seed=5, **path), resume=True)
    assert len(expected) == 18
    assert begun == expected[:14]
    assert rest == expected[13:]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("killed_at", [None, 12])
def test_the_order_resumes_after_a_snapshot_at_the_end_of_an_epoch(
    tmp_path, name, killed_at
):
    def run(trainer, epochs, **options):
        losses = []

        def note(step):
            losses.append(step.loss)
            if step.number == killed_at and not options:
                raise KeyboardInterrupt

        loader = LOADERS[name](TensorDataset(*samples(72)))
        with contextlib.suppress(KeyboardInterrupt):
            trainer.fit(loader, epochs=epochs, on_step=note, **options)
        return losses

    path = {"snapshot_path": tmp_path / "run"}
    with seeded(8):
        expected = run(make_trainer(), 3, resume=False)
    with seeded(8):
        # Finished after an epoch, or killed in the second without another snapshot.
        run(make_trainer(**path), 1 if killed_at is None else 3)
    with seeded(1234):
        again = make_trainer(seed=5, **path)
        again.load(tmp_path / "run")
        # Between the epochs: what is written there again is what was read.
        again.save(tmp_path / "run")
        rest = run(make_trainer(seed=6, **path), 3, resume=True)
    assert rest == expected[9:]


def test_a_file_of_version_2_can_be_resumed(tmp_path):
    path = {"snapshot_path": tmp_path / "run"}

    def run(trainer, *, resume=False, stop_at=None):
        losses = []

        def note(step):
            losses.append(step.loss)
            if step.number == stop_at:
                raise KeyboardInterrupt

        loader = LOADERS["own generator"](TensorDataset(*samples(72)))
        with contextlib.suppress(KeyboardInterrupt):
            trainer.fit(loader, epochs=2, on_step=note, resume=resume)
        return losses

    with seeded(8):
        expected = run(make_trainer())
    with seeded(8):
        run(make_trainer(**path, snapshot_every_steps=13), stop_at=14)
    state = read_snapshot(tmp_path / "run")
    (position,) = state["position"]
    del position["generators"]
    write_snapshot(tmp_path / "run", {**state, "version": 2, "position": position})
    assert run(make_trainer(seed=5, **path), resume=True) == expected[13:]


def test_settings_are_the_present_ones_and_state_is_the_snapshots(tmp_path):
    data = batches(5)
    before = {"precision": "fp16", "initial_loss_scale": 1024.0, "average_decay": 0.5}
    first = make_trainer(**before, loss_scale_growth_interval=100)
    for batch in data[:3]:
        first.step(batch)
    first.save(tmp_path / "run")
    now = {**before, "initial_loss_scale": 8.0, "average_decay": 0.9}
    second = make_trainer(**now, loss_scale_growth_interval=2, seed=7)
    second.load(tmp_path / "run")
    assert second.scaler is not None
    assert second.average is not None
    assert second.scaler.total_updates == 3
    average = {name: mean.clone() for name, mean in second.average.parameters.items()}
    # Three good steps are more than two: it grows at the next.
    scales = [second.step(batch).scale for batch in data[3:]]
    assert scales == [1024.0, 2048.0]
    second.load(tmp_path / "run")
    second.step(data[3])
    for name, parameter in second.model.named_parameters():
        expected = average[name].lerp(parameter.detach(), 1 - 0.9)
        assert torch.equal(second.average.parameters[name], expected)
    fixed = make_trainer(**before, dynamic_loss_scale=False)
    fixed.load(tmp_path / "run")
    assert fixed.scaler is not None
    assert not fixed.scaler.is_dynamic


def test_resuming_a_finished_run_does_nothing(tmp_path):
    data = batches(3)
    make_trainer(snapshot_path=tmp_path / "run").fit(data, epochs=2, resume=True)
    again = make_trainer(seed=1, snapshot_path=tmp_path / "run")
    result = again.fit(data, epochs=2, resume=True)
    assert (result.steps, result.epochs) == (0, 2)
    assert again.steps == 6
    assert again.fit(data, epochs=1).steps == 3


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"precision": "fp16"}, "scaler"),
        ({"average_decay": 0.5}, "average"),
    ],
)
def test_a_snapshot_of_another_trainer_is_refused_and_changes_nothing(
    tmp_path, changed, words
):
    trainer = make_trainer()
    trainer.step(batches(1)[0])
    trainer.save(tmp_path / "run")
    for one, other in ((make_trainer(seed=3, **changed), trainer),):
        before = remains(one)
        with pytest.raises(SnapshotError, match=words):
            one.load(tmp_path / "run")
        assert list(tree_differences(before, remains(one), where="")) == []
        one.save(tmp_path / "other")
        with pytest.raises(SnapshotError, match=words):
            other.load(tmp_path / "other")


def test_a_snapshot_of_another_model_or_optimizer_is_refused(tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path / "run")
    other = make_trainer(norm=True)
    with pytest.raises(SnapshotError, match=r"another model: blocks\.0\.1"):
        other.load(tmp_path / "run")
    trainer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(SnapshotError, match="groups of"):
        trainer.load(tmp_path / "run")


@pytest.mark.parametrize("part", ["optimizer", "scheduler"])
def test_a_snapshot_of_parts_of_other_classes_is_refused(tmp_path, part):
    make_trainer().save(tmp_path / "run")
    trainer = make_trainer()
    optimizer = trainer.optimizer
    if part == "optimizer":
        optimizer = torch.optim.SGD(trainer.model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if part == "optimizer":
        scheduler = CountedSchedule(optimizer)
    other = Trainer(trainer.model, optimizer, scheduler=scheduler)
    before = remains(other)
    with pytest.raises(SnapshotError, match=f"the snapshot's {part} is of the class"):
        other.load(tmp_path / "run")
    assert list(tree_differences(before, remains(other), where="")) == []


def test_batches_of_another_size_are_refused(tmp_path):
    trainer = make_trainer(snapshot_path=tmp_path / "run", snapshot_every_steps=1)

    def stop(step):
        if step.number == 2:
            raise AskedError

    with pytest.raises(AskedError):
        trainer.fit(batches(4, 8), on_step=stop)
    other = make_trainer(snapshot_path=tmp_path / "run")
    with pytest.raises(SnapshotError, match="seen 8 samples in 1 batches"):
        other.fit(batches(8, 4), resume=True)


def test_a_loader_that_became_shorter_is_refused(tmp_path):
    trainer = make_trainer(snapshot_path=tmp_path / "run", snapshot_every_steps=1)

    def stop(step):
        if step.number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches(6), on_step=stop)
    other = make_trainer(snapshot_path=tmp_path / "run")
    with pytest.raises(SnapshotError, match="the loader has 2"):
        other.fit(batches(2), resume=True)


def test_another_kind_of_file_is_refused(tmp_path):
    write_snapshot(tmp_path / "run", {"version": 77})
    with pytest.raises(SnapshotError, match="this version's trainer"):
        make_trainer().load(tmp_path / "run")


@pytest.mark.parametrize("goes_on", ["in this process", "from a file"])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("stop_at", [1, 3, 4])
def test_on_step_may_save_or_raise(tmp_path, stop_at, accumulation_steps, goes_on):
    data = TensorDataset(*samples(37))

    def run(trainer, **options):
        loader = DataLoader(data, batch_size=5, shuffle=True)
        return trainer.fit(loader, epochs=2, **options)

    path = tmp_path / "run"
    settings = {"accumulation_steps": accumulation_steps, "snapshot_path": path}
    whole, trainer = make_trainer(**settings), make_trainer(**settings)
    with seeded(4):
        run(whole)
        expected = remains(whole)

    def save_and_raise(result):
        if result.number == stop_at:
            trainer.save(path)
            raise AskedError

    with seeded(4):
        with pytest.raises(AskedError):
            run(trainer, on_step=save_and_raise)
        if goes_on == "from a file":
            torch.manual_seed(99)
            trainer = make_trainer(seed=99, **settings)
        run(trainer, resume=goes_on == "from a file")
        found = remains(trainer)
    assert trainer.steps == whole.steps
    assert list(tree_differences(found, expected, where="")) == []


def test_a_failed_first_step_keeps_the_order_of_its_epoch():
    data = TensorDataset(*samples(20))
    fails = True

    def loss_fn(outputs, targets):
        if fails:
            raise AskedError
        return torch.nn.functional.cross_entropy(outputs, targets)

    def run():
        loader = DataLoader(data, batch_size=5, shuffle=True)
        return trainer.fit(loader, epochs=1)

    trainer = make_trainer(loss_fn=loss_fn)
    with seeded(4):
        with pytest.raises(AskedError):
            run()
        fails = False
        run()
        found = remains(trainer)
    trainer = make_trainer(loss_fn=loss_fn)
    with seeded(4):
        run()
    assert list(tree_differences(found, remains(trainer), where="")) == []


@pytest.mark.parametrize("workers_later", [0, 1])
def test_persistent_workers_do_not_change_the_order_of_a_resumed_run(
    tmp_path, workers_later
):
    data = TensorDataset(*samples(20))

    def loader(workers):
        return DataLoader(
            data,
            batch_size=5,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            # Not a copy of this process, in which other tests have started threads.
            multiprocessing_context=forker() if workers > 0 else None,
        )

    whole = make_trainer()
    trainer = make_trainer(snapshot_path=tmp_path / "run", snapshot_every_steps=1)
    with seeded(4):
        whole.fit(loader(1), epochs=2)
        expected = remains(whole)

    def stop(result):
        if result.number == 7:
            raise AskedError

    with seeded(4), pytest.raises(AskedError):
        trainer.fit(loader(1), epochs=2, on_step=stop)
    trainer = make_trainer(seed=99, snapshot_path=tmp_path / "run")
    with seeded(12345):
        trainer.fit(loader(workers_later), epochs=2, resume=True)
        found = remains(trainer)
    assert trainer.steps == 8
    assert list(tree_differences(found, expected, where="")) == []


class NumpySampler(Sampler[int]):
    """Draws its order from its own generator, of NumPy or Python."""

    def __init__(self, count: int, own: Any) -> None:
        self.count = count
        self.own_numbers = own

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        self.own_numbers.shuffle(order)
        yield from order


class Noisy(TensorDataset):
    """Adds noise from its own generator."""

    def __init__(self, *tensors: Tensor, seed: int) -> None:
        super().__init__(*tensors)
        self.noise = np.random.Generator(np.random.MT19937(seed))

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(index)
        return inputs + float(self.noise.normal()), target


OWN_GENERATORS = {
    "PCG64": lambda: np.random.default_rng(7),
    "Philox": lambda: np.random.Generator(np.random.Philox(7)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(7)),
    "RandomState": lambda: np.random.RandomState(7),
    "Random": lambda: random.Random(7),
}


@pytest.mark.parametrize("own", OWN_GENERATORS)
@pytest.mark.parametrize("stop_at", [3, 4, 6])
def test_generators_of_a_sampler_and_a_dataset_resume(tmp_path, own, stop_at):
    """Stopped within an epoch, at its end, and in the second."""

    def run(stop: int | None, *, resume: bool) -> list[float]:
        sampler = NumpySampler(32, OWN_GENERATORS[own]())
        loader = DataLoader(Noisy(*samples(32), seed=3), batch_size=8, sampler=sampler)
        trainer = make_trainer(snapshot_path=tmp_path / str(stop), dropout=0.0)
        losses: list[float] = []

        def note(result: Any) -> None:
            losses.append(result.loss)
            if result.number == stop:
                trainer.save(tmp_path / "stopped")
                raise AskedError

        if resume:
            trainer.load(tmp_path / "stopped")
        with contextlib.suppress(AskedError):
            trainer.fit(loader, epochs=2, on_step=note)
        return losses

    whole = run(None, resume=False)
    first = run(stop_at, resume=False)
    assert first + run(None, resume=True) == whole


def test_resume_counts_the_epochs_of_all_calls(tmp_path):
    """Any number of calls of one epoch, then a resume to a total of five."""
    data = batches(3)
    first = make_trainer(snapshot_path=tmp_path / "run")
    for _ in range(4):
        assert not first.fit(data, epochs=1).interrupted
    assert first.epoch == 4
    first.save(tmp_path / "run")
    again = make_trainer(seed=1, snapshot_path=tmp_path / "run")
    result = again.fit(data, epochs=5, resume=True)
    assert (result.epochs, result.steps) == (5, 3)
    result = again.fit(data, epochs=5, resume=True)
    assert (result.epochs, result.steps) == (5, 0)
    assert again.fit(data, epochs=2).epochs == 7


def test_a_program_of_two_calls_ends_the_same_whichever_was_stopped(tmp_path):
    data = batches(3)

    def program(stop: int | None) -> Trainer:
        trainer = make_trainer(snapshot_path=tmp_path / "run", snapshot_every_steps=1)

        def note(result: Any) -> None:
            if result.number == stop:
                raise AskedError

        trainer.fit(data, epochs=2, resume=True, on_step=note)
        trainer.fit(data, epochs=2, on_step=note)
        return trainer

    for stop in (2, 5, 8, 11):
        with pytest.raises(AskedError):
            program(stop)
    assert program(None).epoch == 4


def test_a_snapshot_that_lacks_a_part_is_refused(tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path / "run")
    state = read_snapshot(tmp_path / "run")
    for name in state.keys() - {"gave_up_segments"}:  # older files do not have it
        partial = {key: value for key, value in state.items() if key != name}
        write_snapshot(tmp_path / "partial", partial)
        with pytest.raises(SnapshotError):
            trainer.load(tmp_path / "partial")
