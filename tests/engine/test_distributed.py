"""Regions in every kind of parallel training: bitwise the run without them."""

import pytest

from tests.support import parallel
from tests.support.processes import together

KINDS = list(parallel.KINDS)


def check(folder, kind: str, count: int) -> None:
    plain = together(parallel.train, folder, kind, None, count=count)
    assert all(isinstance(answer, dict) for answer in plain), plain
    for verify in ("first", "always", "off"):
        found = together(parallel.train, folder, kind, verify, count=count)
        assert all(isinstance(answer, dict) for answer in found), found
        for expected, answer in zip(plain, found, strict=True):
            assert answer["gradients"] == expected["gradients"], verify
            assert answer["replays"] >= parallel.STEPS
            assert expected["replays"] == 0
            assert any(any(map(any, step)) for step in expected["gradients"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes(tmp_path, kind):
    check(tmp_path, kind, count=2)


@pytest.mark.slow
def test_a_region_around_several_sharded_units_is_an_error_that_says_so(tmp_path):
    for answer in together(parallel.train, tmp_path, "sharded in pairs", "first"):
        assert isinstance(answer, str)
        assert answer.startswith("ChangedTensorError")
        assert "sharded unit" in answer
