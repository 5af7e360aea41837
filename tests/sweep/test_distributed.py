"""Regions in every kind of parallel training, in four processes."""

import pytest

from tests.engine.test_distributed import KINDS, check


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_four_processes(tmp_path, kind):
    check(tmp_path, kind, count=4)
