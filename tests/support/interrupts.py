"""Interrupts a scenario at every line, or every instruction, of recoup's own code."""

import contextlib
import dis
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from tests.support.work import OURS


@functools.cache
def out_of_reach(code: CodeType) -> frozenset[int]:
    """Return where a trace function can come between, but no interrupt.

    Python looks for interrupts after calls and in loops. After the last call of a
    block, which is inside, the next one is that of `__exit__`: an error in between
    would leave any lock taken. An error just before Python takes note that another is
    being handled, or is not any more, would keep that other one.
    """
    found = list(dis.get_instructions(code))
    ends = {i.offset for i in found if i.opname in ("PUSH_EXC_INFO", "POP_EXCEPT")}
    for one, following in itertools.pairwise(found):
        if one.opname == "COPY" and following.opname == "POP_EXCEPT":
            ends.add(one.offset)
    for place in range(len(found) - 3):
        nones = found[place : place + 3]
        call = next(i for i in found[place + 3 :] if i.opname != "PRECALL")
        if (
            all(i.opname == "LOAD_CONST" and i.argval is None for i in nones)
            and call.opname == "CALL"
            and call.arg == 2
        ):
            # A block that returns a value first moves it below `__exit__`.
            moves = place > 0 and found[place - 1].opname == "SWAP"
            start = place - moves
            while start > 0 and found[start - 1].opname == "NOP":
                start -= 1  # the end of a loop, where Python looks for none
            first = found[start]
            ends.update(
                i.offset for i in found if first.offset <= i.offset <= call.offset
            )
    return frozenset(ends)


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """Let nobody hear of interrupts in destructors, which Python ignores.

    pytest keeps what it is told of until the test has ended: the frames that ran then,
    and all that is in them.
    """
    report = sys.unraisablehook

    def report_others(ignored: Any) -> None:
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            report(ignored)

    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report


class Interrupter:
    """Counts the events in files below a folder, and raises at one of them.

    Args:
        at: The number of the event to raise at; -1 to count all.
        opcodes: Every instruction is an event, not every line.
        within: The folder.
        only: The names of the functions to look at, if not all.
    """

    def __init__(
        self,
        at: int = -1,
        *,
        opcodes: bool = False,
        within: str = OURS,
        only: tuple[str, ...] = (),
    ) -> None:
        self._only = only
        self.count = 0
        self.where = ""
        self._at = at
        self._opcodes = opcodes
        self._event = "opcode" if opcodes else "line"
        self._within = within

    def run(self, scenario: Callable[[], object]) -> bool:
        """Run a scenario; return whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            with _unreported():
                scenario()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return bool(self.where)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._within):
            return None
        if self._only and code.co_name not in self._only:
            return None
        frame.f_trace_opcodes = self._opcodes
        frame.f_trace_lines = not self._opcodes
        return self._local

    def _local(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == self._event and frame.f_lasti not in out_of_reach(frame.f_code):
            if self.count == self._at:
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                self.count += 1
                raise KeyboardInterrupt
            self.count += 1
        return self._local


def events_of(
    scenario: Callable[[], object], *, opcodes: bool = False, only: tuple[str, ...] = ()
) -> int:
    """Return the number of events of a scenario that is not interrupted."""
    counter = Interrupter(opcodes=opcodes, only=only)
    assert not counter.run(scenario), "nothing interrupts it"
    return counter.count


def interruptions(
    scenario: Callable[[], object],
    *,
    opcodes: bool = False,
    every: int = 1,
    only: tuple[str, ...] = (),
) -> Iterator[str]:
    """Run a scenario once for each event, interrupted there; say where it was."""
    for at in range(0, events_of(scenario, opcodes=opcodes, only=only), every):
        interrupter = Interrupter(at, opcodes=opcodes, only=only)
        if interrupter.run(scenario):
            yield interrupter.where


Place = tuple[str, int]
"""A file and a line in it."""


class LineInterrupter:
    """Collects the lines that run in files below a folder, or raises at one of them.

    Args:
        at: The line to raise at; None: collect.
        time: Which time that it is reached.
        within: The folder.

    Attributes:
        lines: How often each line was reached.
        is_done: It has raised.
    """

    def __init__(
        self, at: Place | None = None, *, time: int = 1, within: str = OURS
    ) -> None:
        self._at = at
        self._time = time
        self._within = within
        self.lines: Counter[Place] = Counter()
        self.is_done = False

    def run(self, scenario: Callable[[], object]) -> bool:
        """Run a scenario; return whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            with _unreported():
                scenario()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return self.is_done

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._within):
            return None
        if self._at is not None and not _has_line(code, self._at):
            return None
        return self._local

    def _local(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event != "line" or frame.f_lasti in out_of_reach(frame.f_code):
            return self._local
        place = frame.f_code.co_filename, frame.f_lineno
        if self._at is None or place == self._at:
            self.lines[place] += 1
            if self.lines[place] == self._time and self._at is not None:
                self.is_done = True
                raise KeyboardInterrupt
        return self._local


@functools.cache
def _has_line(code: CodeType, place: Place) -> bool:
    file, line = place
    return code.co_filename == file and any(at == line for *_, at in code.co_lines())


Reached = tuple[Place, int]
"""A place, and which time that it is reached."""


def places_reached(
    scenario: Callable[[], object], *, files: str = "", last: bool = False
) -> list[Reached]:
    """Return the lines of recoup that a scenario reaches.

    Args:
        scenario: What to run; it may reach other lines each time.
        files: What the paths of the files match, if not all count.
        last: When each is reached for the last time, not for the first; those that are
            reached once are left out.
    """
    collector = LineInterrupter()
    assert not collector.run(scenario), "nothing interrupts it"
    return [
        (place, times if last else 1)
        for place, times in collector.lines.items()
        if re.search(files, place[0]) and (times > 1 or not last)
    ]


def interruptions_of_lines(
    scenario: Callable[[], object], *, files: str = "", every: int = 1
) -> Iterator[str]:
    """Run a scenario once for each line of recoup that it reaches, interrupted there.

    Args:
        scenario: What to run; it may reach other lines each time.
        files: What the paths of the files match, if not all count.
        every: Take every n-th line.
    """
    for place, time in places_reached(scenario, files=files)[::every]:
        if LineInterrupter(place, time=time).run(scenario):
            yield f"{place[0]}:{place[1]}, time {time}"
