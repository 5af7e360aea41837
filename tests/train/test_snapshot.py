"""Snapshots: what goes in comes out, whole or not at all, and no code runs."""

import json
import math
import os
import pickle
import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup import SnapshotError
from recoup.train.snapshot import read_snapshot, write_snapshot
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
def test_plain_values_come_back_as_they_were(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("snapshot") / "run"
    write_snapshot(path, tree)
    assert list(tree_differences(tree, read_snapshot(path), where="")) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_tensors_come_back_bit_by_bit(tmp_path, dtype, shape):
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    write_snapshot(tmp_path / "run", {"t": tensor})
    (found,) = read_snapshot(tmp_path / "run").values()
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    same = found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
    assert torch.equal(*same)


def test_nan_and_infinity_come_back(tmp_path):
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    write_snapshot(tmp_path / "run", values)
    assert not list(tree_differences(values, read_snapshot(tmp_path / "run"), where=""))


def test_views_come_back_as_what_they_show(tmp_path):
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


def test_a_new_one_takes_the_place_of_the_old_and_nothing_else_stays(tmp_path):
    for number in range(3):
        write_snapshot(tmp_path / "run", {"number": number})
    assert read_snapshot(tmp_path / "run") == {"number": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("bad", [object(), {1, 2}, b"bytes", lambda: 0])
def test_what_is_no_data_is_refused_by_name_and_the_old_file_stays(tmp_path, bad):
    write_snapshot(tmp_path / "run", {"fine": 1})
    with pytest.raises(SnapshotError, match=r"snapshot\['state'\]\[1\]"):
        write_snapshot(tmp_path / "run", {"state": [torch.ones(3), bad]})
    assert read_snapshot(tmp_path / "run") == {"fine": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_keys_that_are_no_text_or_number_are_refused(tmp_path):
    with pytest.raises(SnapshotError, match="has a key"):
        write_snapshot(tmp_path / "run", {(1, 2): 3})


def test_sparse_tensors_are_refused(tmp_path):
    with pytest.raises(SnapshotError, match="dense"):
        write_snapshot(tmp_path / "run", torch.eye(3).to_sparse())


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path):
    write_snapshot(tmp_path / "run", {"weight": torch.randn(20), "step": 3})
    whole = (tmp_path / "run").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(SnapshotError, match="cannot be read"):
            read_snapshot(tmp_path / "cut")


def test_a_file_with_any_bit_turned_is_refused(tmp_path):
    write_snapshot(tmp_path / "run", {"weight": torch.randn(4), "step": 3})
    whole = (tmp_path / "run").read_bytes()
    for place in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1
        (tmp_path / "spoilt").write_bytes(spoilt)
        with pytest.raises(SnapshotError, match="cannot be read"):
            read_snapshot(tmp_path / "spoilt")


class Bomb:
    """Goes off when it is unpickled."""

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


@pytest.mark.parametrize(
    ("entry", "tree", "words"),
    [
        ({"dtype": "ones"}, ["tensor", 0], "unknown type"),
        ({"dtype": "__class__"}, ["tensor", 0], "unknown type"),
        ({"shape": [1 << 20]}, ["tensor", 0], "cut off"),
        ({}, ["exec", "print()"], "does not know"),
    ],
)
def test_a_forged_table_of_contents_is_refused(tmp_path, entry, tree, words):
    data = b"\0" * 16
    known = {"dtype": "float32", "shape": [4], "start": 18, "crc32": zlib.crc32(data)}
    table = json.dumps({"tree": tree, "tensors": [{**known, **entry}]}).encode()
    begin = b"recoup snapshot 1\n"
    end = struct.pack(
        "<QQI12s", len(begin + data), len(table), zlib.crc32(table), b"end of file\n"
    )
    (tmp_path / "run").write_bytes(begin + data + table + end)
    with pytest.raises(SnapshotError, match=words):
        read_snapshot(tmp_path / "run")
