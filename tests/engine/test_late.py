"""Writes that give no new version are seen by backward, as in plain autograd."""

import torch

from recoup import CheckpointScope
from recoup.backend.memory.storages import geometry_of
from recoup.engine.lifetime.past_contents import LateWrites
from recoup.engine.lifetime.values import TapeValue
from tests.support.counting import Alive

LENGTH = 1000


def noted(tensor: torch.Tensor) -> tuple[LateWrites, TapeValue]:
    late, value = LateWrites(), TapeValue(0, geometry_of(tensor))
    late.before(value, tensor)
    return late, value


def test_a_write_that_counts_is_not_held():
    tensor = torch.ones(3)
    late, _ = noted(tensor)
    tensor.add_(1)
    late.settle()
    assert late.holds == {}


def test_a_write_that_does_not_count_is_held_as_it_is():
    tensor = torch.ones(3)
    late, value = noted(tensor)
    tensor.data.add_(1)
    late.settle()
    assert late.holds[value].fetch("a test").tolist() == [2, 2, 2]


def test_later_writes_do_not_make_an_earlier_one_count():
    tensor = torch.ones(3)
    late, value = noted(tensor)
    tensor.data.add_(1)
    late.settle()
    tensor.add_(1)
    late.settle()
    assert list(late.holds) == [value]


def test_a_region_holds_only_what_was_written_to_uncounted():
    x = torch.randn(LENGTH, dtype=torch.float64, requires_grad=True)
    for uncounted in (False, True):
        with Alive() as alive:
            with CheckpointScope("block", verify="off"):
                y = x * 2
                z = y.sin().sum()
                (y.data if uncounted else y.detach()).add_(1)
            del y
            assert alive.sizes == [8, *([8 * LENGTH] if uncounted else [])]
            del z
