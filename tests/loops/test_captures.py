"""Captures: every unknown tensor that a tape leads to is found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recoup import checkpointed_loop
from recoup.errors import CaptureError
from recoup.loops.torch.captures import CapturedTensors
from recoup.schedules import Chunked
from tests.support.instructions import Doubling


def leaf(*shape):
    return torch.ones(*shape, dtype=torch.float64, requires_grad=True)


@given(st.integers(1, 40), st.data())
def test_a_stray_tensor_is_found_at_any_step(steps, data):
    place = data.draw(st.none() | st.integers(0, steps - 1))
    state, weight, stray = leaf(2), leaf(2), leaf(2)
    result = state
    for index in range(steps):
        result = torch.tanh(result * weight + (stray if index == place else 0.5))
    found = CapturedTensors([weight]).stray([result], [state])
    assert found is (None if place is None else stray)


@pytest.mark.parametrize("place", range(12))
def test_a_hidden_tensor_used_by_one_step_is_an_error(place):
    class Hidden:
        weight = leaf(2)

    def step(state, index):
        return state.sin() * Hidden.weight if index == place else state.sin()

    def gradients():
        schedule = Chunked(12, slots=2, chunk=3)
        final, _ = checkpointed_loop(
            step, state, 12, schedule=schedule, with_index=True
        )
        final.sum().backward()

    state = leaf(2)
    with pytest.raises(CaptureError, match="captures="):
        gradients()
    assert state.grad is None


class TestWhatIsKnown:
    def test_the_given_and_the_captured_themselves(self):
        state, weight = leaf(2), leaf(2)
        assert (
            CapturedTensors([weight]).stray([state, weight, 1, None], [state]) is None
        )

    def test_a_leaf_that_is_returned_as_it_is_and_is_not_known(self):
        state, stray = leaf(2), leaf(2)
        assert CapturedTensors([]).stray([state * 2, stray], [state]) is stray

    def test_a_tensor_computed_before_the_loop(self):
        state, weight = leaf(2), leaf(2)
        double = weight * 2
        result = state * double
        assert CapturedTensors([double]).stray([result], [state]) is None
        assert CapturedTensors([]).stray([result], [state]) is weight

    def test_one_of_several_results_of_an_operator_and_not_the_others(self):
        state, weight = leaf(2), leaf(2, 2)
        first, second = weight.unbind(0)
        captures = CapturedTensors([first])
        assert captures.stray([state * first], [state]) is None
        assert captures.stray([first], [state]) is None
        assert captures.stray([state * second], [state]) is weight
        assert captures.stray([second], [state]) is weight
        assert captures.stray([state * first * second], [state]) is weight

    def test_a_tensor_behind_a_custom_function(self):
        state, stray = leaf(2), leaf(2)
        result = Doubling.apply(state + Doubling.apply(stray))
        assert CapturedTensors([stray]).stray([result], [state]) is None
        assert CapturedTensors([]).stray([result], [state]) is stray

    def test_a_tensor_that_joins_where_paths_part_and_meet(self):
        state, stray = leaf(2), leaf(2)
        result = state
        for _ in range(5):
            result = result.sin() * result.cos() + result * (result + stray).exp()
        assert CapturedTensors([stray]).stray([result, result * 2], [state]) is None
        assert CapturedTensors([]).stray([result, result * 2], [state]) is stray
