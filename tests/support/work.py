"""Counts the lines and calls of Python in chosen files: work without a clock."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import recoup

OURS = str(Path(recoup.__file__).parent)


def lines_of(call: Callable[[], object], within: str = OURS) -> int:
    """Return how many lines run in files below a folder, in turns of loops too."""
    count = 0

    def local(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(within) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def calls_of(call: Callable[[], object], within: str = OURS) -> int:
    """Return how many functions of files below a folder are called.

    A generator that goes on counts as a call. Nothing is collected meanwhile.
    """
    count = 0

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(within)

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def growth(step: Callable[[int], object], size: int, within: str = OURS) -> float:
    """Return by how much work grows when the size doubles: 2 if it is linear.

    What does not depend on the size cancels out. A quadratic step gives 4.
    """
    step(size)  # what happens once in a process
    one, two, four = (lines_of(lambda n=n: step(n), within) for n in _sizes(size))
    return (four - two) / (two - one)


def _sizes(size: int) -> tuple[int, int, int]:
    return size, 2 * size, 4 * size
