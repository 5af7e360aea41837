"""Exit statuses of the command line, and the error that carries one."""

from recoup.errors import RecoupError

DONE = 0
FAILED = 1
USAGE = 2
INFEASIBLE = 3
TARGET = 4
FILE = 5
INTERRUPTED = 130
"""Ended by Ctrl-C: 128 and the number of the signal."""

MEANINGS = {
    DONE: "done",
    FAILED: "another failure",
    USAGE: "the command or its arguments are wrong",
    INFEASIBLE: "no plan fits into the budget",
    TARGET: "your function or its step raised, or the function returned no step",
    FILE: "a file cannot be read or written",
    INTERRUPTED: "interrupted; nothing half-written is left behind",
}


class CommandError(RecoupError):
    """A command cannot be carried out.

    Attributes:
        status: The exit status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status
