"""Several processes that train together: started fast, never left hanging."""

import multiprocessing
import multiprocessing.connection
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

# torch's optimizers import its compiler when they are first used: seconds.
PRELOADED = [
    "tests.support.killed",
    "tests.support.together",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]


ENDED = "ended without a word"
"""In place of the result of a process that ended before it had one."""


class ProcessFailedError(Exception):
    """A process did not end in time."""


def forker() -> Any:
    """Return the context whose processes begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def together(
    work: Callable[..., Any],
    folder: Path,
    *args: Any,
    count: int = 2,
    seconds: float = 90,
    patience: float = 60,
) -> list[Any]:
    """Run `work(rank, *args)` in processes joined by gloo; return what each returned.

    Gloo waits `patience` seconds for a process that does not answer.

    An exception that a process raises comes back in place of its result.
    """
    context = forker()
    meeting = folder / f"meeting-{uuid.uuid4().hex}"
    pipes, processes = [], []
    for rank in range(count):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_work,
            args=(work, rank, count, str(meeting), sender, patience, args),
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    end = time.monotonic() + seconds
    try:
        return [_receive(pipe, end) for pipe in pipes]
    finally:
        for process in processes:
            process.join(max(0.0, min(5.0, end - time.monotonic())))
            process.kill()
            process.join()


def _receive(pipe: Any, end: float) -> Any:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        raise ProcessFailedError("a process hangs")
    try:
        return pipe.recv()
    except EOFError:
        return ENDED


def _work(
    work: Callable[..., Any],
    rank: int,
    count: int,
    meeting: str,
    sender: Any,
    patience: float,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=patience),
    )
    try:
        result = work(rank, *args)
    except BaseException as error:  # noqa: BLE001 (it is the result)
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    sender.send(result)
    sender.close()
