"""Snapshots: a tree of tensors and plain values in one file that is data, not code.

A file is the words `recoup snapshot 1`, the bytes of the tensors one after the other,
a table of contents in JSON, and a fixed-size end that says where the table is and
what its checksum is. A file without its end is not a snapshot.
"""

import ctypes
import json
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from recoup.core.errors import SnapshotError, UsageError

_BEGIN = b"recoup snapshot 1\n"
_END = struct.Struct("<QQI12s")
_END_MARK = b"end of file\n"


def check_folder(path: str | Path | None) -> None:
    """Raise unless there is a folder for a file, which may not be wanted at all.

    Raises:
        UsageError: There is none: better known before hours of training than after.

    Examples:
        >>> check_folder("run.snapshot")
    """
    if path is not None and not Path(path).parent.is_dir():
        raise UsageError(
            f"snapshots were to be written to {str(path)!r}: there is no folder "
            f"{str(Path(path).parent)!r}. Make it first."
        )


def write_snapshot(path: str | Path, tree: Any) -> None:
    """Write a tree to a file, so that at every moment the file is whole.

    The new file is written beside the old one, brought to the disk, and takes its
    place in one move: whoever reads finds the old or the new one, whenever the
    machine stops.

    Args:
        path: The file; its folder must exist.
        tree: Dictionaries, lists and tuples of tensors, numbers, texts and None.

    Raises:
        SnapshotError: Something in the tree is none of these. The file is unchanged.

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
        with partial.open("wb") as file:
            _write(file, tree)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read_snapshot(path: str | Path) -> Any:
    """Read a tree from a file, tensors on the CPU. Nothing in the file is executed.

    Raises:
        SnapshotError: The file is no snapshot, or is damaged.
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
            f"{where} is a {type(value).__name__}: a snapshot holds tensors, numbers, "
            "texts, None, and lists, tuples and dictionaries of them."
        )

    def _pairs(mapping: dict[Any, Any], where: str) -> list[Any]:
        for key in mapping:
            if not isinstance(key, str | int):
                raise SnapshotError(f"{where} has a key {key!r}: no text or number.")
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
        raise SnapshotError(f"a snapshot holds dense tensors: got {tensor.layout}.")
    geometry = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
    key = (tensor.data_ptr(), *geometry)
    if tensor.numel() and key in known:
        return known[key]
    # A copy to the CPU of lazily conjugated or negated memory would copy the laziness.
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    memory = _memory(flat)
    tensors.append(
        {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "start": file.tell(),
            "crc32": zlib.crc32(memory),
        }
    )
    file.write(memory)
    # Only what stays alive while we write keeps its address for itself.
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
    if mark != _END_MARK or start + length + _END.size != size:
        raise SnapshotError("its end is missing.")
    file.seek(start)
    table = file.read(length)
    if zlib.crc32(table) != checksum:
        raise SnapshotError("its table of contents is damaged.")
    contents = json.loads(table)
    tensors = [_read_tensor(file, entry, end=start) for entry in contents["tensors"]]
    return _decode(contents["tree"], tensors)


def _read_tensor(file: BinaryIO, entry: dict[str, Any], *, end: int) -> Tensor:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"it holds a tensor of an unknown type {entry['dtype']!r}.")
    shape: list[int] = entry["shape"]
    tensor = torch.empty(shape, dtype=dtype)
    start, nbytes = entry["start"], math.prod(shape) * dtype.itemsize
    file.seek(start)
    memory = _memory(tensor)
    if start + nbytes > end or file.readinto(memory) != nbytes:  # pyright: ignore[reportAttributeAccessIssue]
        raise SnapshotError("a tensor in it is cut off.")
    if zlib.crc32(memory) != entry["crc32"]:
        raise SnapshotError("a tensor in it is damaged: its checksum differs.")
    return tensor


def _decode(node: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    kind, *parts = node
    match kind:
        case "tensor":
            return tensors[parts[0]]
        case "list":
            return [_decode(part, tensors) for part in parts]
        case "tuple":
            return tuple(_decode(part, tensors) for part in parts)
        case "dict":
            return {key: _decode(value, tensors) for key, value in parts}
    raise SnapshotError(f"it holds a {kind!r}, which this version does not know.")


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _sync_folder(folder: Path) -> None:
    """Bring the move to the disk too; where folders cannot be opened, do without."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
