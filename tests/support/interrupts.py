"""Interrupts a scenario at every line, or every instruction, of recoup's own code."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tests.support.work import OURS


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
        if event == self._event:
            if self.count == self._at:
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                self.count += 1
                raise KeyboardInterrupt
            self.count += 1
        return self._local


def events_of(scenario: Callable[[], object], *, opcodes: bool = False) -> int:
    """Return the number of events of a scenario that is not interrupted."""
    counter = Interrupter(opcodes=opcodes)
    assert not counter.run(scenario), "nothing interrupts it"
    return counter.count


def interruptions(
    scenario: Callable[[], object], *, opcodes: bool = False, every: int = 1
) -> Iterator[str]:
    """Run a scenario once for each event, interrupted there; say where it was."""
    for at in range(0, events_of(scenario, opcodes=opcodes), every):
        interrupter = Interrupter(at, opcodes=opcodes)
        if interrupter.run(scenario):
            yield interrupter.where
