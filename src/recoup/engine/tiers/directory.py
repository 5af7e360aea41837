"""Private directories: one for each process, found and removed if the process died."""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from recoup.errors import TierError

try:
    import fcntl
except ImportError:  # not a POSIX system: directories of dead processes stay
    fcntl = None

PREFIX = "recoup-disk-"
_LOCK = "owner.lock"
_UNFINISHED_SECONDS = 60.0
"""A directory without a lock is being made, or its maker died just then."""


class PrivateDirectory:
    """A directory that only this process uses, with a lock that dies with it.

    Making one removes those that dead processes left in the same place: whose lock
    nobody holds. Nothing in them is read.

    Args:
        base: Where to make it.

    Raises:
        TierError: It cannot be made there.

    Examples:
        >>> with tempfile.TemporaryDirectory() as base:
        ...     directory = PrivateDirectory(Path(base))
        ...     made = directory.path.is_dir()
        ...     directory.remove()
        ...     made, list(Path(base).iterdir())
        (True, [])
    """

    def __init__(self, base: Path) -> None:
        self._owner = os.getpid()
        try:
            remove_abandoned(base)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            # Locked before it has its name, so that nobody finds it unlocked.
            unnamed = self.path / f"{_LOCK}.new"
            self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
            _try_lock(self._lock)
            unnamed.rename(self.path / _LOCK)
        except OSError as error:
            raise TierError(
                f"the disk tier cannot make a directory in {base}: {error}. Name "
                "another place with Disk(directory=...)."
            ) from error

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made it: a forked child has no part in its files."""
        return os.getpid() == self._owner

    def remove(self) -> None:
        """Remove the directory with all that is in it; a second time does nothing."""
        if self.is_of_this_process:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1


def remove_abandoned(base: Path) -> list[Path]:
    """Remove what dead processes of this user left, and return what that was."""
    if fcntl is None:
        return []
    found = [path for path in base.glob(PREFIX + "*") if _is_abandoned(path)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def _is_abandoned(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except FileNotFoundError:
            return time.time() - status.st_mtime > _UNFINISHED_SECONDS
        try:
            return _try_lock(lock)
        finally:
            os.close(lock)
    return False


def _try_lock(file: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
