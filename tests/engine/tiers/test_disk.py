"""The disk tier: files in the background, and nothing of them left."""

import functools
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recoup import CheckpointScope, Disk
from recoup.engine.tiers.shelf import (
    PREFIX,
    PrivateDirectory,
    Shelf,
    remove_abandoned,
    shelf_in,
)
from recoup.errors import TierError, UsageError
from recoup.tiers import tier_usage

LENGTH, DOUBLE = 1000, 8
SIZE_BYTES = LENGTH * DOUBLE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    tier = Disk(tmp_path, smallest_bytes=0)
    yield tier
    shelf = shelf_of(tier)
    shelf.drain()  # what goes in the background counts until it is gone
    shelf.directory.remove()


def shelf_of(disk: Disk) -> Shelf:
    return shelf_in(Path(str(disk.directory)).resolve(), "cpu", disk.queue_bytes)


def files(disk: Disk) -> list[Path]:
    shelf = shelf_of(disk)
    shelf.drain()
    return sorted(p for p in shelf.directory.path.iterdir() if p.suffix != ".lock")


def vector() -> Tensor:
    return torch.randn(LENGTH, dtype=torch.float64, requires_grad=True)


def three(x: Tensor, disk: Disk) -> Tensor:
    with CheckpointScope("block", store=disk):
        return x.sin().sin().sin()


class TestFiles:
    def test_each_storage_is_a_file_of_its_size(self, disk):
        y = three(vector(), disk)
        assert [file.stat().st_size for file in files(disk)] == [SIZE_BYTES] * 2
        del y

    def test_they_are_gone_after_backward(self, disk):
        three(vector(), disk).sum().backward()
        assert files(disk) == []

    def test_they_are_gone_when_backward_never_comes(self, disk):
        y = three(vector(), disk)
        assert len(files(disk)) == 2
        del y
        assert files(disk) == []

    def test_only_the_owner_can_look_into_the_directory(self, disk):
        y = three(vector(), disk)
        assert shelf_of(disk).directory.path.stat().st_mode & 0o077 == 0
        del y

    def test_usage_counts_what_is_on_disk(self, disk):
        before = tier_usage()["disk"]
        y = three(vector(), disk)
        files(disk)
        now = tier_usage()["disk"]
        assert now.live_bytes - before.live_bytes == 2 * SIZE_BYTES
        y.sum().backward()
        files(disk)
        now = tier_usage()["disk"]
        assert now.live_bytes == before.live_bytes
        assert now.back_bytes - before.back_bytes == 2 * SIZE_BYTES

    def test_host_buffers_wait_no_longer_than_the_file(self, disk):
        before = tier_usage()["host"].live_bytes
        y = three(vector(), disk)
        files(disk)
        assert tier_usage()["host"].live_bytes == before
        del y

    def test_files_are_read_ahead_in_reverse_order(self, disk):
        x = vector()
        stored = [disk.put(x.detach() + n) for n in range(4)]
        shelf = shelf_of(disk)
        shelf.drain()
        stored[3].get()
        slots = [s._slot for s in stored]
        assert [slot.reading is not None for slot in slots] == [True] * 3 + [False]
        for n, one in enumerate(stored):
            assert torch.equal(one.get(), x.detach() + n)
            one.drop()

    def test_no_more_is_read_ahead_than_the_queue_holds(self, tmp_path: Path):
        disk: Any = Disk(tmp_path, smallest_bytes=0, queue_bytes=2 * SIZE_BYTES)
        shelf = shelf_of(disk)
        stored = []
        for _ in range(4):
            stored.append(disk.put(vector().detach()))
            shelf.drain()
        stored[3].get()
        ahead = [one._slot.reading is not None for one in stored]
        assert ahead == [False, True, True, False]
        stored.clear()
        shelf.drain()
        shelf.directory.remove()

    def test_without_a_queue_each_is_written_before_the_next(self, tmp_path):
        disk = Disk(tmp_path, smallest_bytes=0, queue_bytes=0)
        x = vector()
        three(x, disk).sum().backward()
        twin = x.detach().clone().requires_grad_()
        twin.sin().sin().sin().sum().backward()
        assert x.grad is not None
        assert twin.grad is not None
        assert torch.equal(x.grad, twin.grad)
        shelf_of(disk).directory.remove()


def flip(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[5] ^= 1
    file.write_bytes(contents)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


@contextmanager
def full_disk(shelf: Shelf) -> Iterator[None]:
    """Let no file grow beyond a hundred bytes."""
    del shelf
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def removed_directory(shelf: Shelf) -> Iterator[None]:
    """Remove the private directory, and put a file where its folder was."""
    base = shelf.directory.path.parent
    shutil.rmtree(base)
    base.write_text("")
    try:
        yield
    finally:
        base.unlink()
        base.mkdir()


UNWRITTEN = r"could not write 7.81 KiB to .*0000|cannot make a directory in /"


class TestErrors:
    @pytest.mark.parametrize("damage", [flip, cut, lengthen, Path.unlink])
    def test_a_damaged_file_is_named_and_no_gradient_is_made(self, disk, damage):
        x = vector()
        y = three(x, disk)
        file = files(disk)[0]
        damage(file)
        with pytest.raises(TierError, match=file.name):
            y.sum().backward()
        assert x.grad is None
        del y
        assert files(disk) == []

    @pytest.mark.parametrize("fault", [full_disk, removed_directory])
    def test_what_cannot_be_written_is_said_and_not_lost(self, disk, fault):
        x, shelf = vector(), shelf_of(disk)
        with fault(shelf):
            one = disk.put(x.detach() + 1)
            shelf.drain()
            with pytest.warns(UserWarning, match=UNWRITTEN):
                two = disk.put(x.detach() + 2)
            shelf.drain()
            three_ = disk.put(x.detach() + 3)  # said once
            shelf.drain()
        for n, stored in enumerate((one, two, three_), start=1):
            assert torch.equal(stored.get(), x.detach() + n)
            stored.drop()
        shelf.drain()
        if shelf.directory.path.exists():
            assert files(disk) == []
        assert shelf._waiting_bytes == 0

    # The error comes without a warning before it, whether the write has failed by the
    # time of the second put or fails while that waits.
    @pytest.mark.parametrize("is_drained", [True, False])
    @pytest.mark.parametrize("fault", [full_disk, removed_directory])
    def test_more_than_the_queue_that_cannot_be_written_is_an_error(
        self, tmp_path, fault, is_drained
    ):
        disk = Disk(tmp_path, smallest_bytes=0, queue_bytes=SIZE_BYTES)
        x, shelf = vector(), shelf_of(disk)
        with fault(shelf):
            kept = disk.put(x.detach())
            if is_drained:
                shelf.drain()
            with pytest.raises(TierError, match=UNWRITTEN):
                disk.put(x.detach() + 1)
            assert torch.equal(kept.get(), x.detach())
            kept.drop()
            with pytest.raises(TierError, match=UNWRITTEN):
                three(x, disk)
        gc.collect()  # an error refers to its frames, and these to the values
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            three(x, disk).sum().backward()  # the disk as it is then
        twin = x.detach().clone().requires_grad_()
        twin.sin().sin().sin().sum().backward()
        assert x.grad is not None
        assert twin.grad is not None
        assert torch.equal(x.grad, twin.grad)
        shelf.drain()
        assert shelf._waiting_bytes == 0
        shelf.directory.remove()

    def test_a_directory_that_was_removed_is_made_again(self, disk):
        x = vector()
        lost = three(x, disk)
        files(disk)
        shutil.rmtree(shelf_of(disk).directory.path)
        with pytest.raises(TierError, match="No such file"):
            lost.sum().backward()
        assert x.grad is None
        del lost
        y = three(x, disk)
        assert len(files(disk)) == 2
        y.sum().backward()
        assert x.grad is not None
        assert files(disk) == []

    def test_a_place_that_is_not_there_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="an existing directory"):
            Disk(tmp_path / "missing")

    def test_a_place_that_cannot_be_used_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(TierError, match="cannot make a directory"):
            PrivateDirectory(tmp_path / "file")


PROGRAM = """
import sys, time, torch
from recoup import CheckpointScope, Disk
from recoup.engine.tiers.shelf import shelf_in
from pathlib import Path
base, end = sys.argv[1:]
x = torch.linspace(-1, 1, 100_000, requires_grad=True)
with CheckpointScope("block", store=Disk(base, smallest_bytes=0)):
    y = x.exp().sin().cos()
shelf_in(Path(base).resolve(), "cpu", Disk().queue_bytes).drain()
print("ready", flush=True)
if end == "error":
    raise ZeroDivisionError
if end == "wait":
    time.sleep(600)
if end == "backward":
    y.sum().backward()
"""


def start(base: Path, end: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(base), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets what it runs in the background ignore the interrupt.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: "subprocess.Popen[str]") -> int:
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.slow
class TestProcesses:
    @pytest.mark.parametrize(("end", "code"), [("backward", 0), ("error", 1)])
    def test_a_process_leaves_nothing(self, tmp_path, end, code):
        process = start(tmp_path, end)
        assert finish(process) == code
        assert list(tmp_path.iterdir()) == []

    def test_an_interrupted_process_leaves_nothing(self, tmp_path):
        process = start(tmp_path, "wait")
        assert len(list(tmp_path.glob("*/0*"))) == 2
        process.send_signal(signal.SIGINT)
        assert finish(process) != 0
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_process_left_is_removed_unread(self, tmp_path):
        process = start(tmp_path, "wait")
        (left,) = tmp_path.iterdir()
        assert len(list(left.glob("0*"))) == 2
        os.mkfifo(left / "99999999")  # whoever reads this waits for ever
        process.kill()
        finish(process)
        assert left.is_dir()
        disk = Disk(tmp_path, smallest_bytes=0)
        x = vector()
        three(x, disk).sum().backward()
        assert not left.exists()
        assert x.grad is not None
        own = shelf_of(disk).directory
        assert list(tmp_path.iterdir()) == [own.path]
        own.remove()

    def test_what_a_living_process_uses_stays(self, tmp_path):
        process = start(tmp_path, "wait")
        (used,) = tmp_path.iterdir()
        assert remove_abandoned(tmp_path) == []
        assert used.is_dir()
        process.kill()
        finish(process)
        assert remove_abandoned(tmp_path) == [used]


FORKED = """
import faulthandler, os, sys, torch
from recoup import CheckpointScope, Disk
from recoup.errors import TierError

def graph(length):
    x = torch.linspace(-1, 1, length, requires_grad=True)
    with CheckpointScope("block", store=Disk(sys.argv[1], smallest_bytes=0)):
        return x, x.exp().sin()

graph(100)[1].sum().backward()  # the threads run
x, y = graph(1000)
child = os.fork()
if not child:
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        y.sum().backward()
    except TierError as error:
        del y
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
y.sum().backward()
assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_is_refused_its_parents_files_and_leaves_them(tmp_path):
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], check=True)


class TestTheDirectory:
    def test_one_that_is_being_made_is_left_alone(self, tmp_path):
        young = tmp_path / f"{PREFIX}young"
        young.mkdir()
        assert remove_abandoned(tmp_path) == []
        hour_ago = time.time() - 3600
        os.utime(young, (hour_ago, hour_ago))
        assert remove_abandoned(tmp_path) == [young]

    def test_a_link_is_not_followed(self, tmp_path):
        precious = tmp_path / "precious"
        precious.mkdir()
        (tmp_path / f"{PREFIX}link").symlink_to(precious)
        assert remove_abandoned(tmp_path) == []
        assert precious.is_dir()

    def test_a_child_does_not_remove_its_parents(self, tmp_path):
        directory = PrivateDirectory(tmp_path)
        directory._owner += 1  # as a forked child sees it
        directory.remove()
        assert directory.path.is_dir()
        directory._owner -= 1
        directory.remove()
        assert not directory.path.exists()
