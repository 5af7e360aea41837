"""The collector may drop what is in a tier at any point, and nobody waits for it."""

import concurrent.futures.thread
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from recoup import CheckpointScope, Disk, Host, Packed
from recoup.engine.tiers.account import ACCOUNTS
from recoup.engine.tiers.deposits import _REGISTER
from recoup.engine.tiers.host import pool_of, traffic_of
from recoup.engine.tiers.shelf import Shelf, shelf_in
from recoup.tiers import Tier, tier_usage

SECONDS = 20


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path, smallest_bytes=0)


def shelf_of(disk: Disk) -> Shelf:
    return shelf_in(Path(str(disk.directory)).resolve(), "cpu", disk.queue_bytes)


def locks(shelf: Shelf) -> dict[str, Any]:
    """Return every lock that a thread may hold when the collector runs on it."""
    return {
        "all executors": concurrent.futures.thread._global_shutdown_lock,
        "the reader's executor": shelf._reader._shutdown_lock,
        "the shelf": shelf._room,
        "the traffic": traffic_of(torch.device("cpu"))._lock,
        "the buffers": pool_of("cpu")._lock,
        "the register": _REGISTER._lock,
        "host account": ACCOUNTS.host._lock,
        "disk account": ACCOUNTS.disk._lock,
    }


def finishes(call: Callable[[], object]) -> bool:
    """Return whether a call returns, on a thread of its own, in some time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return not thread.is_alive()


def in_a_cycle(tier: Tier) -> None:
    """Leave a graph with values in a tier for the collector."""
    x = torch.linspace(-1, 1, 1000, requires_grad=True)
    with CheckpointScope("block", store=tier):
        y = x.exp().sin().cos()
    cycle: list[object] = [y]
    cycle.append(cycle)


@pytest.mark.parametrize("kind", [Host, Disk, Packed])
@pytest.mark.parametrize("own_thread", [True, False])
def test_a_collection_waits_for_no_lock(disk, kind, own_thread):
    """Neither for those of the thread it runs on, nor for those of others.

    Another's may be waited for by their owner for one of this thread.
    """
    tier = disk if kind is Disk else kind(smallest_bytes=0)
    gc.disable()
    try:
        in_a_cycle(tier)
        shelf_of(disk).drain()
        held = locks(shelf_of(disk))
        with ExitStack() as stack:
            if own_thread:

                def collect() -> None:
                    with ExitStack() as inside:
                        for lock in held.values():
                            inside.enter_context(lock)
                        gc.collect()

                assert finishes(collect)
            else:
                for lock in held.values():
                    stack.enter_context(lock)
                assert finishes(gc.collect)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Host, Disk])
def test_what_was_dropped_under_a_lock_is_freed_at_the_next_use(disk, kind):
    tier = disk if kind is Disk else Host(smallest_bytes=0)
    shelf = shelf_of(disk)

    def in_use() -> tuple[int, ...]:
        shelf.drain()
        usage = tier_usage()
        files = [p for p in shelf.directory.path.iterdir() if p.suffix != ".lock"]
        live = usage["host"].live_bytes, usage["disk"].live_bytes, len(files)
        return *live, pool_of("cpu").in_use_bytes, len(shelf._slots)

    gc.collect()
    before = in_use()
    gc.disable()
    try:
        in_a_cycle(tier)
        assert in_use() != before
        with ExitStack() as stack:
            for lock in locks(shelf).values():
                stack.enter_context(lock)
            gc.collect()
    finally:
        gc.enable()
    in_a_cycle(tier)
    gc.collect()
    assert in_use() == before


HOSTILE = """
import concurrent.futures.thread as pool, faulthandler, gc, sys, time, torch
from recoup import CheckpointScope, Disk
faulthandler.dump_traceback_later(60, exit=True)
gc.disable()
gc.freeze()  # what was imported need not be looked at every time
lock = pool._global_shutdown_lock
entered = []

class Collecting:  # the collector runs whenever anybody submits
    def __enter__(self):
        lock.acquire()
        entered.append(gc.collect())
    def __exit__(self, *error):
        lock.release()

pool._global_shutdown_lock = Collecting()
x = torch.linspace(-1, 1, 1000, requires_grad=True)
for _ in range(300):
    if len(entered) > 5:
        break
    with CheckpointScope("block", store=Disk(sys.argv[1], smallest_bytes=0)):
        y = x.exp().sin().cos()
    time.sleep(0.01)  # what is not yet written is not read: nothing is submitted
    y.sum().backward(retain_graph=True)  # the reader is submitted to
    cycle = [y]
    cycle.append(cycle)
assert len(entered) > 5, entered
"""


def test_a_collection_inside_any_submit_does_not_deadlock(tmp_path):
    subprocess.run([sys.executable, "-c", HOSTILE, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == []
