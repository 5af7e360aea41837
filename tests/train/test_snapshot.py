"""Snapshots: data round-trips, atomically, and no code runs."""

import contextlib
import json
import math
import os
import pickle
import resource
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import SnapshotError
from recoup.train.saving.snapshot import read_snapshot, write_snapshot
from tests.support.bits import tree_differences

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=50)
@given(tree=trees)
def test_plain_values_round_trip(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("snapshot") / "run"
    write_snapshot(path, tree)
    assert list(tree_differences(tree, read_snapshot(path), where="")) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_tensors_round_trip_bitwise(tmp_path, dtype, shape):
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    write_snapshot(tmp_path / "run", {"t": tensor})
    (found,) = read_snapshot(tmp_path / "run").values()
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    same = found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
    assert torch.equal(*same)


def test_nan_and_infinity_round_trip(tmp_path):
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    write_snapshot(tmp_path / "run", values)
    assert not list(tree_differences(values, read_snapshot(tmp_path / "run"), where=""))


def test_views_round_trip_as_their_contents(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    tree = [base.T, base[1:, ::2], base.expand(2, 3, 4), torch.conj(base + 1j)]
    write_snapshot(tmp_path / "run", tree)
    for before, after in zip(tree, read_snapshot(tmp_path / "run"), strict=True):
        assert torch.equal(before, after)


def test_a_tensor_that_occurs_twice_is_written_once(tmp_path):
    tensor = torch.randn(1000)
    write_snapshot(tmp_path / "once", [tensor])
    write_snapshot(tmp_path / "twice", [tensor, tensor.detach()])
    more = (tmp_path / "twice").stat().st_size - (tmp_path / "once").stat().st_size
    assert more < 100
    assert torch.equal(*read_snapshot(tmp_path / "twice"))


def test_a_new_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    for number in range(3):
        write_snapshot(tmp_path / "run", {"number": number})
    assert read_snapshot(tmp_path / "run") == {"number": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("bad", [object(), {1, 2}, b"bytes", lambda: 0])
def test_other_objects_are_refused_by_name_and_the_old_file_stays(tmp_path, bad):
    write_snapshot(tmp_path / "run", {"fine": 1})
    with pytest.raises(SnapshotError, match=r"snapshot\['state'\]\[1\]"):
        write_snapshot(tmp_path / "run", {"state": [torch.ones(3), bad]})
    assert read_snapshot(tmp_path / "run") == {"fine": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_keys_other_than_texts_and_integers_are_refused(tmp_path):
    with pytest.raises(SnapshotError, match="has a key"):
        write_snapshot(tmp_path / "run", {(1, 2): 3})


def test_sparse_tensors_are_refused(tmp_path):
    with pytest.raises(SnapshotError, match="dense"):
        write_snapshot(tmp_path / "run", torch.eye(3).to_sparse())


def test_a_truncated_file_is_refused(tmp_path):
    write_snapshot(tmp_path / "run", {"weight": torch.randn(20), "step": 3})
    whole = (tmp_path / "run").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(SnapshotError, match="cannot be read"):
            read_snapshot(tmp_path / "cut")


def test_a_file_with_any_flipped_bit_is_refused(tmp_path):
    write_snapshot(tmp_path / "run", {"weight": torch.randn(4), "step": 3})
    whole = (tmp_path / "run").read_bytes()
    for place in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1
        (tmp_path / "spoilt").write_bytes(spoilt)
        with pytest.raises(SnapshotError, match="cannot be read"):
            read_snapshot(tmp_path / "spoilt")


class Bomb:
    """Runs code when unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("went-off",)


def test_a_pickle_is_refused_and_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").write_bytes(pickle.dumps(Bomb()))
    torch.save({"bomb": Bomb()}, tmp_path / "saved")
    for name in ("run", "saved"):
        with pytest.raises(SnapshotError, match="not a snapshot"):
            read_snapshot(tmp_path / name)
    assert not (tmp_path / "went-off").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


BEGIN = b"recoup snapshot 1\n"
DATA = b"\0" * 16


def forge(path: Path, contents: Any, data: bytes = DATA) -> None:
    """Write a file with valid checksums for any table of contents."""
    table = contents if isinstance(contents, bytes) else json.dumps(contents).encode()
    end = struct.pack(
        "<QQI12s", len(BEGIN + data), len(table), zlib.crc32(table), b"end of file\n"
    )
    path.write_bytes(BEGIN + data + table + end)


def entry(**changed: Any) -> dict[str, Any]:
    known = {"dtype": "float32", "shape": [4], "start": 18, "crc32": zlib.crc32(DATA)}
    return {**known, **changed}


@pytest.mark.parametrize(
    ("changed", "tree", "words"),
    [
        ({"dtype": "ones"}, ["tensor", 0], "unknown type"),
        ({"dtype": "__class__"}, ["tensor", 0], "unknown type"),
        ({"dtype": "qint8"}, ["tensor", 0], "unknown type"),
        ({"dtype": 5}, ["tensor", 0], "unknown type"),
        ({"shape": [1 << 20]}, ["tensor", 0], "cut off"),
        ({"shape": [1 << 38]}, ["tensor", 0], "cut off"),
        ({"shape": [-4]}, ["tensor", 0], "impossible shape"),
        ({"shape": [True]}, ["tensor", 0], "impossible shape"),
        ({"shape": [4.0]}, ["tensor", 0], "impossible shape"),
        ({"shape": 4}, ["tensor", 0], "impossible shape"),
        ({"shape": [1 << 62, 1 << 62]}, ["tensor", 0], "impossible shape"),
        ({"shape": [0, 1 << 62, 1 << 62]}, ["tensor", 0], "impossible shape"),
        ({"start": -5}, ["tensor", 0], "lacks the position of a tensor"),
        ({"start": 3}, ["tensor", 0], "overlap"),
        ({"crc32": None}, ["tensor", 0], "lacks the position of a tensor"),
        ({}, ["exec", "print()"], "does not know"),
        ({}, ["tensor", 7], "does not know"),
        ({}, ["tensor", -1], "does not know"),
        ({}, ["tensor"], "does not know"),
        ({}, [], "without a kind"),
        ({}, {"list": 1}, "without a kind"),
        ({}, ["dict", 3], "not a pair"),
        ({}, ["dict", [["list"], 3]], "not a pair"),
    ],
)
def test_a_forged_table_of_contents_is_refused(tmp_path, changed, tree, words):
    forge(tmp_path / "run", {"tree": tree, "tensors": [entry(**changed)]})
    with pytest.raises(SnapshotError, match=words):
        read_snapshot(tmp_path / "run")


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"tensors": [' + b"9" * 10_000 + b"]}",
        b'{"tensors": [], "tree": ' + b'["list",' * 20_000 + b"1" + b"]" * 20_000,
        b'{"tensors": {}, "tree": 1}',
        b'{"tensors": [1], "tree": 1}',
    ],
    ids=lambda table: str(table[:20]),
)
def test_an_invalid_table_of_contents_is_refused(tmp_path, table):
    forge(tmp_path / "run", table)
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_snapshot(tmp_path / "run")


def test_entries_may_not_share_bytes(tmp_path):
    """Otherwise a small file could request any amount of memory."""
    forge(tmp_path / "run", {"tree": None, "tensors": [entry()] * 2})
    with pytest.raises(SnapshotError, match="overlap"):
        read_snapshot(tmp_path / "run")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([1 << 31, 1 << 62, 1 << 64, -(1 << 63), 0.5, math.inf])
    | st.sampled_from(["float32", "uint8", "bool", "list", "tensor", "dict", "tuple"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["tree", "tensors", "dtype", "shape", "start", "crc32"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(junk=JUNK, place=st.sampled_from(["all", "tree", "tensors", "entry", "node"]))
def test_any_table_of_contents_is_parsed_or_refused(folder, junk, place):
    contents: Any = {"tree": ["tensor", 0], "tensors": [entry()]}
    match place:
        case "all":
            contents = junk
        case "tree" | "tensors":
            contents[place] = junk
        case "node":
            contents["tree"] = ["dict", ["a", junk]]
        case _:
            changed = junk if isinstance(junk, dict) else {"shape": junk}
            contents["tensors"] = [entry(**changed)]
    path = folder / "run"
    forge(path, contents)
    try:
        found = read_snapshot(path)
    except SnapshotError:
        return
    assert total_bytes(found) <= path.stat().st_size


@settings(max_examples=300)
@given(
    place=st.integers(0, 10_000), piece=st.binary(max_size=8), cut=st.integers(0, 12)
)
def test_a_file_with_a_replaced_piece_is_equal_or_refused(folder, place, piece, cut):
    path = folder / "run"
    tree = {"weight": torch.arange(20.0), "names": ["a", "b"], "step": 3}
    write_snapshot(path, tree)
    whole = path.read_bytes()
    place %= len(whole)
    changed = whole[:place] + piece + whole[place + cut :]
    path.write_bytes(changed)
    try:
        found = read_snapshot(path)
    except SnapshotError:
        assert changed != whole
    else:
        assert list(tree_differences(tree, found, where="")) == []


def total_bytes(tree: Any) -> int:
    match tree:
        case torch.Tensor():
            return tree.untyped_storage().nbytes()
        case dict():
            return max(map(total_bytes, tree.values()), default=0)
        case list() | tuple():
            return max(map(total_bytes, tree), default=0)
    return 0


@pytest.mark.parametrize(
    "table",
    [
        b'{"tree":["list"' + b',["list"]' * 50_000 + b'],"tensors":[]}',
        b'{"tree":1,"tensors":[' + b"{}," * 150_000 + b"1]}",
        b'{"tree":1,"tensors":[' + (b"[" * 400 + b"]" * 400 + b",") * 500,
    ],
    ids=["lists", "dictionaries", "nested"],
)
def test_a_table_of_contents_takes_at_most_64_times_its_bytes(tmp_path, table):
    path = tmp_path / "run"
    forge(path, table)
    tracemalloc.start()
    try:
        with contextlib.suppress(SnapshotError):
            read_snapshot(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * path.stat().st_size


def test_a_link_at_the_place_of_the_new_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run.partial").symlink_to(victim)
    write_snapshot(tmp_path / "run", {"a": torch.ones(1)})
    assert victim.read_text() == "precious"
    assert read_snapshot(tmp_path / "run")["a"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "victim"]


def test_a_full_disk_raises_one_error_and_the_old_file_stays(tmp_path):
    write_snapshot(tmp_path / "run", {"number": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(SnapshotError, match=r"cannot be written: .*unchanged"):
            write_snapshot(tmp_path / "run", {"number": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_snapshot(tmp_path / "run") == {"number": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_removed_folder_raises_one_error(tmp_path):
    with pytest.raises(SnapshotError, match=r"cannot be written: .*No such file"):
        write_snapshot(tmp_path / "missing" / "run", {"number": 1})


def test_deeply_nested_data_is_refused(tmp_path):
    tree: Any = 1
    for _ in range(2000):
        tree = [tree]
    with pytest.raises(SnapshotError, match="nested too deeply"):
        write_snapshot(tmp_path / "run", tree)
    assert list(tmp_path.iterdir()) == []
