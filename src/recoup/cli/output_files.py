"""Outputs: files written atomically, and results as text or JSON."""

import contextlib
import json
import os
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recoup.cli.statuses import FILE, CommandError

if TYPE_CHECKING:
    from recoup.report.drawing import Picture
    from recoup.report.findings import Findings


def check_writable(path: Path | None) -> None:
    """Raise before any work if a file could not be written."""
    if path is None:
        return
    folder = path.resolve().parent
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    if not folder.is_dir():
        raise _unwritable(path, f"there is no folder {str(folder)!r}")
    if not os.access(folder, os.W_OK):
        raise _unwritable(path, "its folder is not writable")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: an interrupt or a failure leaves nothing behind."""
    try:
        handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=".recoup-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            # Files of mkstemp are readable only by their owner.
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def check_figure(path: Path | None) -> None:
    """Raise before any work if a picture could not be saved."""
    if path is None:
        return
    from recoup.report.drawing import check_kind, check_painter

    if check_kind(path) == ".png":
        check_painter()
    check_writable(path)


def write_picture(path: Path, picture: "Picture") -> None:
    """Write a picture in the format of its suffix, atomically."""
    write_whole(path, picture.encoded(path.suffix.lower()))


def read_text(path: Path) -> str:
    """Return the text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise CommandError(
            f"{str(path)!r} cannot be read: {reason}. Name another file.", status=FILE
        ) from error


def print_verdict(verdict_of: "Findings | str", good: str = "-") -> None:
    """Print the main result as one sentence, coloured in a terminal.

    Args:
        verdict_of: The sentence, or findings that have one.
        good: The colour of a sentence: "yes", "no" or "-".
    """
    from rich.console import Console
    from rich.text import Text

    from recoup.core.display import WIDTH
    from recoup.report.texts import fits_words, verdict

    if not isinstance(verdict_of, str):
        peak_bytes = verdict_of.measured_peak_bytes or verdict_of.plan.peak_bytes
        good = fits_words(peak_bytes, verdict_of.budget_bytes)
        verdict_of = verdict(verdict_of)
    style = {"yes": "bold green", "no": "bold red", "-": "bold"}[good]
    console = Console()
    lines = textwrap.fill(verdict_of, min(console.width, WIDTH))
    console.print(Text(lines, style), soft_wrap=True)
    console.print()


def print_texts(*texts: str) -> None:
    """Print texts separated by empty lines; sentences are wrapped, tables are not."""
    shown = [
        textwrap.fill(line, 80) if line.endswith(".") else line
        for text in filter(None, texts)
        for line in (*text.splitlines(), "")
    ]
    print("\n".join(shown))


def as_json(data: Mapping[str, Any]) -> str:
    """Return a result for other programs.

    Examples:
        >>> as_json({"peak_bytes": 12})
        '{"peak_bytes": 12}'
    """
    return json.dumps(data)


def _unwritable(path: Path, reason: str) -> CommandError:
    return CommandError(
        f"{str(path)!r} cannot be written: {reason}. Name another file.", status=FILE
    )
