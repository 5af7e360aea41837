"""Snapshots: a tree of tensors and plain values in one file that is data, not code.

A file is the words `recoup snapshot 1`, the bytes of the tensors one after the other, a
table of contents in JSON, and a fixed-size trailer with the position and checksum of
the table. A file without its trailer is not a snapshot.
"""

import json
import math
import os
import shutil
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from recoup.backend.memory.pinned import memory_of
from recoup.backend.memory.storages import QUANTIZED
from recoup.errors import SnapshotError, SnapshotWriteError, UsageError

_BEGIN = b"recoup snapshot 1\n"
_END = struct.Struct("<QQI12s")
_END_MARK = b"end of file\n"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in QUANTIZED
}


def check_folder(path: str | Path | None) -> None:
    """Raise unless the folder of a file exists; None needs none.

    Raises:
        UsageError: It does not exist: fail before hours of training, not after.

    Examples:
        >>> check_folder("run.snapshot")
    """
    if path is not None and not Path(path).parent.is_dir():
        raise UsageError(
            f"expected a folder for snapshots at {str(path)!r}, but there is no folder "
            f"{str(Path(path).parent)!r}; make it first."
        )


def write_snapshot(path: str | Path, tree: Any) -> None:
    """Write a tree to a file atomically.

    The new file is written next to the old one, as `.partial`, synchronised to the
    disk, and renamed to replace it: a reader finds the old or the new one, whenever the
    machine stops. A link at either name is replaced, never followed.

    Args:
        path: The file; its folder must exist.
        tree: Dictionaries, lists and tuples of tensors, numbers, texts and None.

    Raises:
        SnapshotError: The tree contains something else.
        SnapshotWriteError: The file cannot be written, for example on a full disk. The
            old file is unchanged.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_snapshot(f"{folder}/run", {"weight": torch.ones(2), "step": 3})
        ...     read_snapshot(f"{folder}/run")
        {'weight': tensor([1., 1.]), 'step': 3}
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        # Left by a killed process, or a link that somebody put there.
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            try:
                _write(file, tree)
                file.flush()
                os.fsync(file.fileno())
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise SnapshotWriteError(
            f"{path} cannot be written: {error}. The previous file is unchanged."
        ) from error
    except RecursionError:
        raise SnapshotError(
            f"{path} cannot be written: its content is nested too deeply."
        ) from None
    _sync_folder(path.parent)


def keep_last(path: str | Path, step: int, count: int) -> None:
    """Keep a snapshot under the number of its step as well, and only the last of these.

    The file is linked, so it takes its bytes once; where links are impossible it is
    copied. The last ones are those written last: a run that went back to an earlier
    step keeps the ones it writes from there on.

    Raises:
        SnapshotWriteError: The file cannot be linked, copied or removed.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (8, 9, 10):
        ...         write_snapshot(f"{folder}/run", {"step": step})
        ...         keep_last(f"{folder}/run", step, 2)
        ...     sorted(each.name for each in Path(folder).iterdir())
        ['run', 'run.10', 'run.9']
    """
    path = Path(path)
    kept = path.with_name(f"{path.name}.{step}")
    try:
        kept.unlink(missing_ok=True)
        try:
            os.link(path, kept)
        except OSError:
            shutil.copy2(path, kept)
        found = [
            (each.stat().st_mtime_ns, int(number), each)
            for each in path.parent.iterdir()
            if (number := each.name.removeprefix(f"{path.name}.")).isdecimal()
            and each.name != number
        ]
        for *_, each in sorted(found)[:-count]:
            each.unlink()
    except OSError as error:
        raise SnapshotWriteError(
            f"{kept} cannot be kept: {error}. {path} itself is complete."
        ) from error


def read_snapshot(path: str | Path) -> Any:
    """Read a tree from a file, tensors on the CPU. Nothing in the file is executed.

    The tensors take no more memory than the file, and the rest at most 64 times the
    bytes of the file's table of contents, for any content.

    Raises:
        SnapshotError: The file is not a snapshot, or is damaged.
    """
    try:
        with Path(path).open("rb") as file:
            return _read(file)
    except SnapshotError as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from None


def _write(file: BinaryIO, tree: Any) -> None:
    file.write(_BEGIN)
    tensors: list[dict[str, Any]] = []
    known: dict[tuple[Any, ...], int] = {}

    def encode(value: Any, where: str) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case Tensor():
                return ["tensor", _write_tensor(file, value, tensors, known)]
            case list() | tuple():
                kind = "list" if isinstance(value, list) else "tuple"
                return [
                    kind,
                    *(encode(v, f"{where}[{i}]") for i, v in enumerate(value)),
                ]
            case dict():
                return ["dict", *_pairs(value, where)]
        raise SnapshotError(
            f"expected tensors, numbers, texts, None, and lists, tuples and "
            f"dictionaries of them, got a {type(value).__name__} at {where}."
        )

    def _pairs(mapping: dict[Any, Any], where: str) -> list[Any]:
        for key in mapping:
            if not isinstance(key, str | int):
                raise SnapshotError(
                    f"expected texts and integers as keys, but {where} has a key "
                    f"{key!r}."
                )
        return [[key, encode(v, f"{where}[{key!r}]")] for key, v in mapping.items()]

    contents = {"tree": encode(tree, "snapshot"), "tensors": tensors}
    table = json.dumps(contents, separators=(",", ":")).encode()
    start = file.tell()
    file.write(table)
    file.write(_END.pack(start, len(table), zlib.crc32(table), _END_MARK))


def _write_tensor(
    file: BinaryIO,
    tensor: Tensor,
    tensors: list[dict[str, Any]],
    known: dict[tuple[Any, ...], int],
) -> int:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise SnapshotError(
            f"expected dense tensors in a snapshot, got {tensor.layout}."
        )
    geometry = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
    key = (tensor.data_ptr(), *geometry)
    if tensor.numel() and key in known:
        return known[key]
    # Resolve first: copying a lazily conjugated or negated tensor keeps it lazy.
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    memory = memory_of(flat)
    tensors.append(
        {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "start": file.tell(),
            "crc32": zlib.crc32(memory),
        }
    )
    file.write(memory)
    # Only tensors that stay alive while writing keep their address to themselves.
    known[key] = len(tensors) - 1
    return known[key]


def _read(file: BinaryIO) -> Any:
    if file.read(len(_BEGIN)) != _BEGIN:
        raise SnapshotError("it is not a snapshot of this version of recoup.")
    size = file.seek(0, os.SEEK_END)
    if size < len(_BEGIN) + _END.size:
        raise SnapshotError("its end is missing.")
    file.seek(size - _END.size)
    start, length, checksum, mark = _END.unpack(file.read(_END.size))
    if mark != _END_MARK or start + length + _END.size != size or start < len(_BEGIN):
        raise SnapshotError("its end is missing.")
    file.seek(start)
    table = file.read(length)
    if zlib.crc32(table) != checksum:
        raise SnapshotError("its table of contents is damaged.")
    try:
        contents = json.loads(table)
        entries = _entries(contents, end=start)
        tensors = [_read_tensor(file, entry) for entry in entries]
        return _decode(contents.get("tree"), tensors)
    except RecursionError:
        raise SnapshotError("its table of contents is nested too deeply.") from None
    except ValueError as error:  # of JSON: not text, not JSON, a number too long
        raise SnapshotError(f"its table of contents is damaged: {error}.") from None


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    """The checked position of a tensor in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int
    checksum: int


def _entries(contents: Any, *, end: int) -> list[_TensorPlace]:
    """Check the positions of all tensors before memory is allocated for any.

    No two share a byte, so their total is no larger than the file.
    """
    found = contents.get("tensors") if isinstance(contents, dict) else None
    if not isinstance(found, list):
        raise SnapshotError("its table of contents has no list of tensors.")
    entries = [_entry(each) for each in found]
    last = len(_BEGIN)
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start < last:
            raise SnapshotError("two tensors in it overlap, or one overlaps its start.")
        last = entry.start + entry.nbytes
        if last > end:
            raise SnapshotError("a tensor in it is cut off.")
    return entries


def _entry(found: Any) -> _TensorPlace:
    if not isinstance(found, dict):
        raise SnapshotError("an entry of its table of contents is not a dictionary.")
    name, shape = found.get("dtype"), found.get("shape")
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise SnapshotError(f"it holds a tensor of an unknown type {name!r:.40}.")
    start, checksum = found.get("start", -1), found.get("crc32", -1)
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise SnapshotError(f"it holds a tensor of an impossible shape {shape!r:.40}.")
    # torch multiplies the sizes of empty tensors too.
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= 1 << 63:
        raise SnapshotError(f"it holds a tensor of an impossible shape {shape!r:.40}.")
    if not _is_count(start) or not _is_count(checksum):
        raise SnapshotError("its table of contents lacks the position of a tensor.")
    nbytes = math.prod(shape) * dtype.itemsize
    return _TensorPlace(dtype, tuple(shape), start, nbytes, checksum)


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _read_tensor(file: BinaryIO, entry: _TensorPlace) -> Tensor:
    tensor = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    memory = memory_of(tensor)
    file.seek(entry.start)
    if file.readinto(memory) != entry.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
        raise SnapshotError("a tensor in it is cut off.")
    if zlib.crc32(memory) != entry.checksum:
        raise SnapshotError("a tensor in it is damaged: its checksum differs.")
    try:
        return tensor.view(entry.dtype).reshape(entry.shape)
    except RuntimeError as error:  # a type or a shape that this torch refuses
        raise SnapshotError(f"a tensor in it cannot be made: {error}.") from None


def _decode(node: Any, tensors: list[Tensor]) -> Any:
    if node is None or isinstance(node, bool | int | float | str):
        return node
    match node:
        case ["tensor", int(number)] if 0 <= number < len(tensors):
            return tensors[number]
        case ["list", *parts]:
            return [_decode(part, tensors) for part in parts]
        case ["tuple", *parts]:
            return tuple(_decode(part, tensors) for part in parts)
        case ["dict", *pairs]:
            return dict(_pair(pair, tensors) for pair in pairs)
        case [kind, *_]:
            raise SnapshotError(
                f"it holds a {kind!r:.40}, which this version does not know."
            )
    raise SnapshotError(f"it holds a {type(node).__name__} without a kind.")


def _pair(pair: Any, tensors: list[Tensor]) -> tuple[str | int, Any]:
    match pair:
        case [str() | int() as key, value]:
            return key, _decode(value, tensors)
    raise SnapshotError("a dictionary in it has an entry that is not a pair.")


def _sync_folder(folder: Path) -> None:
    """Synchronise the rename to the disk; skip it where folders cannot be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
