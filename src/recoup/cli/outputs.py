"""Outputs: files written whole or not at all, and results as text or JSON."""

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recoup.cli.statuses import FILE, CommandError


def check_writable(path: Path | None) -> None:
    """Raise before any work if a file could not be written.

    Raises:
        CommandError: There is no such folder, or it takes no files.
    """
    if path is None:
        return
    folder = path.resolve().parent
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    if not folder.is_dir():
        raise _unwritable(path, f"there is no folder {str(folder)!r}")
    if not os.access(folder, os.W_OK):
        raise _unwritable(path, "its folder takes no files")


def write_whole(path: Path, text: str) -> None:
    """Write a file; if that is interrupted or fails, nothing is left behind.

    Raises:
        CommandError: The file cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=".recoup-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp makes files that only their owner reads.
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


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        CommandError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise CommandError(
            f"{str(path)!r} cannot be read: {reason}. Name another file.", status=FILE
        ) from error


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
