"""Steps whose host time is measured by `benchmarks.cases.checkouts`.

Uses only names that every checkout of recoup since 1b39e56 has. Commands come by
standard input, one a line: `time CASE`, `calls CASE`, or `dump CASE` (under callgrind).
Each is answered by one line: two numbers, of forward and of backward.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import recoup
from benchmarks.models import TINY, Problem
from recoup.cli.gpt import Block, RunBlock, run_plain


def run_scope(block: Block, hidden: Tensor) -> Tensor:
    with recoup.CheckpointScope("block"):
        return block(hidden)


def run_keeping_costly(block: Block, hidden: Tensor) -> Tensor:
    with recoup.CheckpointScope("block", policy=recoup.KeepCostly()):
        return block(hidden)


def _run_with_gate(
    region: AbstractContextManager[Any], block: Block, hidden: Tensor
) -> Tensor:
    """Run a block that returns a gate too, computed from what the rest needs."""
    with region:
        attended = block._attend(block.attention_norm(hidden))  # noqa: SLF001
        middle = hidden + attended
        normed = block.perceptron_norm(middle)
        wide = functional.gelu(block.widen(normed))
        out, gate = middle + block.narrow(wide), normed.sigmoid()
    return out * gate


def run_two_outputs_plain(block: Block, hidden: Tensor) -> Tensor:
    return _run_with_gate(nullcontext(), block, hidden)


def run_two_outputs(block: Block, hidden: Tensor) -> Tensor:
    return _run_with_gate(recoup.CheckpointScope("block"), block, hidden)


CASES: dict[str, RunBlock] = {
    "plain": run_plain,
    "scope": run_scope,
    "keep costly": run_keeping_costly,
    "two outputs, plain": run_two_outputs_plain,
    "two outputs": run_two_outputs,
}


class HostWorker:
    """Runs steps of all cases on one model."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        self._problem = Problem.make(TINY, 1, device=device, dtype=torch.float32)

    def _forward(self, case: str) -> Tensor:
        self._problem.clear_gradients()
        return self._problem.loss(CASES[case])

    def _measured(
        self, case: str, first: Callable[[], None], then: Callable[[], float]
    ) -> tuple[float, float]:
        """Return what was measured of forward and of backward, without collections."""
        gc.collect()
        gc.disable()
        try:
            first()
            loss = self._forward(case)
            forward = then()
            first()
            loss.backward()
            return forward, then()
        finally:
            gc.enable()

    def time(self, case: str) -> tuple[float, float]:
        """Return microseconds of thread time."""
        started = 0.0

        def first() -> None:
            nonlocal started
            started = time.thread_time()

        return self._measured(case, first, lambda: 1e6 * (time.thread_time() - started))

    def calls(self, case: str) -> tuple[float, float]:
        """Return the calls of Python functions and of others."""
        count = 0

        def note(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            del frame, argument
            count += event in ("call", "c_call")

        def first() -> None:
            nonlocal count
            count = 0
            sys.setprofile(note)

        def then() -> float:
            sys.setprofile(None)
            return count

        return self._measured(case, first, then)

    def dump(self, case: str) -> tuple[float, float]:
        """Let callgrind, which runs this process, write what both have executed."""
        requests = ctypes.PyDLL(os.environ["CALLGRIND_REQUESTS"])
        requests.instrument()
        return self._measured(case, requests.start, requests.stop)


def main() -> None:
    worker = HostWorker()
    for line in sys.stdin:
        kind, _, case = line.strip().partition(" ")
        print(*getattr(worker, kind)(case), flush=True)


if __name__ == "__main__":
    main()
