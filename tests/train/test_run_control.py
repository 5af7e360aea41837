"""A run is stopped by its callback, keeps snapshots, and survives a full disk."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import IterableDataset, TensorDataset

from recoup import Trainer, TrainerSettings
from recoup.errors import SnapshotError, SnapshotWriteError, UsageError
from recoup.train import ResumableRun
from recoup.train.saving import snapshot
from recoup.train.saving.snapshot import read_snapshot
from tests.support import together as cases
from tests.support.bits import tree_differences
from tests.support.processes import together
from tests.support.training import batches, make_trainer, remains, samples, seeded


class TestStop:
    def test_a_callback_ends_the_run_after_its_step_and_it_can_continue(self):
        data = batches(8)
        whole, halves = make_trainer(), make_trainer()
        with seeded(1):
            whole.fit(data, epochs=2)

        def stop(step: Any) -> None:
            if step.number in (3, 8):
                halves.stop()

        with seeded(1):
            results = [halves.fit(data, epochs=2, on_step=stop) for _ in range(3)]
        assert [each.steps for each in results] == [3, 5, 8]
        assert [each.interrupted for each in results] == [True, True, False]
        assert list(tree_differences(remains(whole), remains(halves), where="")) == []

    def test_a_stopped_run_is_resumed_from_its_snapshot(self, tmp_path):
        data = batches(8)
        path = {"snapshot_path": tmp_path / "run", "snapshot_every_steps": 100}
        whole, begun, rest = make_trainer(), make_trainer(**path), make_trainer(**path)
        with seeded(1):
            whole.fit(data)
        with seeded(1):
            begun.fit(data, on_step=lambda step: step.number == 5 and begun.stop())
        with seeded(77):
            assert rest.fit(data, resume=True).steps == 3
        assert list(tree_differences(remains(whole), remains(rest), where="")) == []

    def test_it_is_refused_outside_fit(self):
        trainer = make_trainer()
        with pytest.raises(UsageError, match="on_step"):
            trainer.stop()
        trainer.fit(batches(1))
        with pytest.raises(UsageError, match="on_step"):
            trainer.stop()


class TestKeepLast:
    def test_the_last_ones_are_kept_under_the_numbers_of_their_steps(self, tmp_path):
        (tmp_path / "run.notes").write_text("mine")
        path = tmp_path / "run"
        trainer = make_trainer(
            snapshot_path=path, snapshot_every_steps=2, snapshot_keep=3
        )
        with seeded(1):
            trainer.fit(batches(11))
        names = sorted(each.name for each in tmp_path.iterdir())
        assert names == ["run", "run.10", "run.11", "run.8", "run.notes"]
        for step in (8, 10, 11):
            assert read_snapshot(tmp_path / f"run.{step}")["steps"] == step
        # The same file, not a second one: its bytes are on the disk once.
        assert path.samefile(tmp_path / "run.11")

    def test_an_earlier_one_can_be_resumed(self, tmp_path):
        path = tmp_path / "run"
        settings = {
            "snapshot_path": path,
            "snapshot_every_steps": 2,
            "snapshot_keep": 2,
        }
        first, second = make_trainer(**settings), make_trainer(**settings)
        with seeded(1):
            first.fit(batches(6))
        shutil.copy(tmp_path / "run.4", path)
        with seeded(9):
            second.fit(batches(6), resume=True)
        assert list(tree_differences(remains(first), remains(second), where="")) == []
        assert {each.name for each in tmp_path.iterdir()} == {"run", "run.4", "run.6"}

    def test_without_links_it_is_copied(self, tmp_path, monkeypatch):
        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(snapshot.os, "link", refuse)
        path = tmp_path / "run"
        make_trainer(snapshot_path=path, snapshot_keep=1).fit(batches(2), epochs=2)
        assert {each.name for each in tmp_path.iterdir()} == {"run", "run.4"}
        assert path.read_bytes() == (tmp_path / "run.4").read_bytes()

    def test_it_needs_a_path_and_a_count(self, tmp_path):
        with pytest.raises(UsageError, match="snapshot_path"):
            make_trainer(snapshot_keep=2)
        with pytest.raises(UsageError, match="snapshot_keep"):
            make_trainer(snapshot_keep=0, snapshot_path=tmp_path / "run")


class TestFailedWrites:
    def test_a_temporarily_missing_folder_does_not_end_the_run(self, tmp_path, caplog):
        folder, away = tmp_path / "folder", tmp_path / "away"
        folder.mkdir()
        plain = make_trainer()
        trainer = make_trainer(snapshot_path=folder / "run", snapshot_every_steps=2)

        def move(step: Any) -> None:
            if step.number == 4:
                folder.rename(away)
            if step.number == 7:
                away.rename(folder)

        with seeded(1):
            plain.fit(batches(9))
        with seeded(1):
            result = trainer.fit(batches(9), on_step=move)
        assert result.steps == 9
        assert list(tree_differences(remains(plain), remains(trainer), where="")) == []
        assert [each.levelname for each in caplog.records] == ["ERROR", "ERROR"]
        assert "continues without this snapshot" in caplog.text
        assert read_snapshot(folder / "run")["steps"] == 9

    def test_a_failed_last_snapshot_raises_after_the_training(self, tmp_path):
        folder = tmp_path / "folder"
        folder.mkdir()
        trainer = make_trainer(snapshot_path=folder / "run")
        with pytest.raises(SnapshotWriteError, match="cannot be written"):
            trainer.fit(batches(5), on_step=lambda step: shutil.rmtree(folder, True))
        assert trainer.steps == 5
        assert trainer.epoch == 1
        trainer.save(tmp_path / "elsewhere")

    def test_a_state_that_cannot_be_written_ends_the_run(self, tmp_path):
        trainer = make_trainer(snapshot_path=tmp_path / "run", snapshot_every_steps=1)
        trainer.optimizer.param_groups[0]["mine"] = object()
        with pytest.raises(SnapshotError, match="mine"):
            trainer.fit(batches(5))
        assert trainer.steps == 1


def test_two_processes_resume_and_stop_together(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    found = together(work_in_process, tmp_path, str(folder))
    # One process requested a stop at step 4: all end after the next one.
    assert found == [(5, "SnapshotWriteError")] * 2


def work_in_process(rank: int, folder: str) -> tuple[int, str]:
    model = cases.make_model(rank, "replicated")
    settings = TrainerSettings(snapshot_path=f"{folder}/run", snapshot_every_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, settings, functional.cross_entropy)

    def disturb(step: Any) -> None:
        if rank == 0 and step.number == 1:
            Path(folder).rmdir()
        if rank == 1 and step.number == 4:
            trainer.stop()

    try:
        trainer.fit(batches(8), on_step=disturb)
    except SnapshotError as error:
        return trainer.steps, type(error).__name__
    return trainer.steps, "none"


class Stream(IterableDataset[Any]):
    """Samples in order; counts reads."""

    def __init__(self) -> None:
        self.read = 0
        self._seen = self._start = 0
        self._samples = samples(72)

    def __iter__(self) -> Iterator[Any]:
        self._seen, self._start = self._start, 0
        while self._seen < 72:
            self._seen += 1
            self.read += 1
            yield tuple(each[self._seen - 1] for each in self._samples)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state["seen"]


class CustomLoader:
    """A minimal stateful loader: batches in its own order, drawn for each epoch."""

    def __init__(self, data: Any) -> None:
        del data
        self.generator = torch.Generator().manual_seed(3)
        self.read = 0
        self._order: list[int] = []
        self._taken = 0
        self._restored: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        state, self._restored = self._restored, None
        self._taken = 0 if state is None else state["taken"]
        if state is None:
            self._order = torch.randperm(9, generator=self.generator).tolist()
        else:
            self._order = state["order"]
        data = batches(9)
        while self._taken < len(self._order):
            index = self._order[self._taken]
            self._taken += 1
            self.read += 1
            yield data[index]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = dict(state)


def torchdata_loader(data: Any, **settings: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(data, batch_size=8, **settings)


class Counted(TensorDataset):
    """Draws a number for every sample, and counts the samples that are read."""

    read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        inputs, target = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(4), target


STATEFUL: dict[str, Any] = {
    "own": lambda: (own := CustomLoader(None), own),
    "shuffled": lambda: (
        data := Counted(*samples(72)),
        torchdata_loader(data, shuffle=True),
    ),
    "own generator": lambda: (
        data := Counted(*samples(72)),
        torchdata_loader(
            data, shuffle=True, generator=torch.Generator().manual_seed(3)
        ),
    ),
    "stream": lambda: (data := Stream(), torchdata_loader(data)),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stop_at", [4, 9, 13])
@pytest.mark.parametrize("name", STATEFUL)
class TestStatefulLoaders:
    """Loaders with `state_dict` and `load_state_dict` resume without skipping."""

    def run(
        self, trainer: Trainer, name: str, stop_at: int | None = None, **options: Any
    ) -> tuple[list[float], Any]:
        losses: list[float] = []
        torch.manual_seed(21)  # torchdata's sampler draws its seed when it is made
        counted, loader = STATEFUL[name]()

        def note(step: Any) -> None:
            losses.append(step.loss)
            if step.number == stop_at:
                trainer.stop()

        with seeded(8 if not options else 1234):
            trainer.fit(loader, epochs=2, on_step=note, **options)
        return losses, counted

    def test_a_resumed_run_has_the_same_losses(self, tmp_path, name, stop_at):
        path = {"snapshot_path": tmp_path / "run"}
        expected, whole = self.run(make_trainer(), name)
        begun, first = self.run(make_trainer(**path), name, stop_at)
        rest, second = self.run(make_trainer(seed=5, **path), name, resume=True)
        assert len(expected) == 18
        assert begun + rest == expected
        assert first.read + second.read == whole.read, "read once"

    def test_a_custom_loop_resumes_too(self, tmp_path, name, stop_at):
        def loop(stop: int | None, *, resume: bool) -> list[Any]:
            torch.manual_seed(21)
            _, loader = STATEFUL[name]()
            torch.manual_seed(1234 if resume else 8)
            model = torch.nn.Linear(4, 3)
            run = ResumableRun(model, torch.optim.SGD(model.parameters(), lr=0.1))
            if resume:
                run.load(tmp_path / "run")
            found: list[Any] = []
            while run.epoch < 2:
                for inputs, _ in run.batches(loader):
                    found.append(inputs.tolist())
                    if len(found) == stop:
                        run.save(tmp_path / "run")
                        return found
            return found

        expected = loop(None, resume=False)
        found = loop(stop_at, resume=False) + loop(None, resume=True)
        assert found == expected


def test_a_loader_that_is_ahead_after_a_failed_step_skips_batches(tmp_path):
    """The loader has yielded a batch that no step used."""
    torch.manual_seed(0)
    expected: list[float] = []
    make_trainer().fit(
        CustomLoader(None), on_step=lambda step: expected.append(step.loss)
    )
    torch.manual_seed(0)
    trainer, losses = make_trainer(), []
    loader = CustomLoader(None)

    def fail(module: Any, given: Any) -> None:
        if len(losses) == 4:
            raise ZeroDivisionError

    hook = trainer.model.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(loader, on_step=lambda step: losses.append(step.loss))
    hook.remove()
    trainer.save(tmp_path / "run")
    other = make_trainer(seed=3)
    other.load(tmp_path / "run")
    other.fit(CustomLoader(None), on_step=lambda step: losses.append(step.loss))
    assert losses == expected
