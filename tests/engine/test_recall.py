"""Recomputed values are kept until their last use, with the views of them."""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recoup import CheckpointScope
from recoup.backend.memory.storages import geometry_of
from recoup.engine.lifetime.values import Layout, TapeValue
from recoup.engine.replay.replay_cache import ReplayCache, Saved
from tests.support.counting import Operators

x = torch.arange(6.0)


def recalled(
    *, demand: int, lasting: bool = False
) -> tuple[ReplayCache, TapeValue, Layout]:
    value = TapeValue(0, geometry_of(x))
    value.demand = demand
    layout = value.layout(geometry_of(x.view(2, 3)))
    live = {value: x, layout: layout.view(x)}
    recall = ReplayCache(7, lasting=lasting)
    recall.take([value], live)
    return recall, value, layout


def ask(recall: ReplayCache, value: TapeValue) -> Tensor | None:
    """Ask for a tensor as autograd does with each that it saved."""
    region: Any = SimpleNamespace(recall=None)
    return recall.give(Saved(region, value, None), 7)


def test_a_value_counts_the_saved_tensors_that_refer_to_it():
    value = TapeValue(0, geometry_of(x))
    region: Any = SimpleNamespace(recall=None)
    saved = [Saved(region, value, None) for _ in range(3)]
    assert value.demand == 3
    saved.pop()
    assert value.demand == 2
    saved.clear()
    assert value.demand == 0


@pytest.mark.parametrize("use", [ask, ReplayCache.release])
def test_a_value_and_its_views_are_freed_at_the_last_use(use):
    recall, value, layout = recalled(demand=2)
    use(recall, value)
    assert set(recall.live) == {value, layout}
    use(recall, value)
    assert recall.live == {}
    assert use(recall, value) is None
    assert recall.live == {}


def test_a_recall_serves_its_own_backward():
    recall, _, _ = recalled(demand=1)
    assert recall.serves(7)
    assert not recall.serves(8)


def test_threads_that_count_down_together_do_not_trip_over_each_other():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    recalls = [recalled(demand=4)[:2] for _ in range(2000)]

    def count() -> None:
        for recall, value in recalls:
            ask(recall, value)
            ask(recall, value)

    try:
        with ThreadPoolExecutor(2) as pool:
            for task in [pool.submit(count) for _ in range(2)]:
                task.result()
    finally:
        sys.setswitchinterval(before)
    # A count may get lost, and then a value stays until the end of the backward.
    assert sum(recall.live == {} for recall, _ in recalls) > 1000


def test_a_lasting_recall_serves_all_and_frees_nothing():
    recall, value, layout = recalled(demand=1, lasting=True)
    assert ask(recall, value) is not None
    assert recall.serves(8)
    assert set(recall.live) == {value, layout}


def test_a_layout_gives_a_view_that_lies_as_the_tensor_did():
    whole = torch.arange(6).reshape(2, 3).to(torch.complex64)
    for tensor in (whole.t(), whole[1:], whole.conj(), whole.imag, whole.conj().imag):
        layout = Layout(geometry_of(tensor), geometry_of(whole))
        view = layout.view(whole)
        assert geometry_of(view) == geometry_of(tensor)
        assert torch.equal(view, tensor)


def test_a_view_that_an_operator_takes_and_autograd_saves_is_made_once():
    weight = torch.randn(4, 4, requires_grad=True)
    given = torch.randn(2, 3, 4, requires_grad=True)
    with CheckpointScope("views", verify="off"):
        hidden = given.exp().view(6, 4)  # saved as a matrix, made as a batch of them
        out = (hidden @ weight).tanh()
    with Operators() as operators:
        out.sum().backward()
    assert operators.counts["mm"] == 3  # one is replayed
    assert operators.counts["as_strided"] == 1
