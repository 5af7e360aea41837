"""Progress of long work: told to whoever wants to know, shown in a terminal."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console

Progress = Callable[[str], None]
"""Called with what is being done now, in a few words."""


@contextmanager
def progress_for(
    progress: Progress | bool | None,  # noqa: FBT001 (as users give it)
) -> Generator[Progress]:
    """Return whom to tell what is being done.

    Args:
        progress: A function that is told; True shows a line in the terminal, False
            shows nothing, None shows it if standard error is a terminal.
    """
    if callable(progress):
        yield progress
        return
    shown = sys.stderr.isatty() if progress is None else progress
    if not shown:
        yield lambda _: None
        return
    with Console(stderr=True).status("recoup") as status:
        yield lambda doing: status.update(f"recoup: {doing}")
