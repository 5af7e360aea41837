"""Measurements of blocks on this machine, stored next to the compiler's caches.

Times vary between measurements, and a partition that was chosen by other times is
compiled again. With the times of an earlier process, a process chooses the partitions
that the compiler's caches have. Predicted peaks do not vary, but take long to find.
"""

import functools
import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from recoup.core.version import VERSION


class StoredNumbers:
    """Numbers by key: found once, then read from a file.

    Processes append to the file; of several numbers of one key the first one counts.

    Args:
        path: The file; None: numbers are known in this process only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._numbers: dict[str, float] = {}
        for key, number in _lines(path):
            self._numbers.setdefault(key, number)

    def number(self, key: str, found: Callable[[], float]) -> float:
        """Return the number of a key; find and store it if it is unknown."""
        digest = hashlib.sha256(key.encode()).hexdigest()[:32]
        if digest not in self._numbers:
            self._numbers[digest] = found()
            self._store(digest)
        return self._numbers[digest]

    def _store(self, digest: str) -> None:
        if self._path is None:
            return
        line = json.dumps([digest, self._numbers[digest]]) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line)  # one write: lines of processes do not mix
        except OSError:
            self._path = None  # a full disk, or a folder that cannot be written to


def _lines(path: Path | None) -> Iterator[tuple[str, float]]:
    try:
        text = path.read_text() if path is not None else ""
    except (OSError, UnicodeDecodeError):
        return
    for line in text.splitlines():
        try:
            key, number = json.loads(line)
            if isinstance(key, str) and 0 <= number < math.inf:
                yield key, float(number)
        except (ValueError, TypeError):
            continue  # half a line of a process that was ended


@functools.cache
def stored_for(device: torch.device, executor: str) -> StoredNumbers:
    """Return the numbers of a device.

    They are in the folder of Inductor's caches (`TORCHINDUCTOR_CACHE_DIR`), unless
    caches are disabled there (`TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`), or the executor
    has no caches.
    """
    return StoredNumbers(_path(device) if executor == "inductor" else None)


def _path(device: torch.device) -> Path | None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.compiler import config

    if config.force_disable_caches:
        return None
    environment = "\n".join(
        (
            VERSION,
            torch.__version__,
            _name_of(device),
            str(torch.get_num_threads()) if device.type == "cpu" else "",
            torch.get_float32_matmul_precision(),
            str(torch.are_deterministic_algorithms_enabled()),
        )
    )
    name = hashlib.sha256(environment.encode()).hexdigest()[:16]
    return Path(cache_dir(), "recoup", f"numbers-{name}.jsonl")


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}"
    try:
        return str(getattr(torch, device.type).get_device_name(device))
    except (AttributeError, RuntimeError):
        return device.type
