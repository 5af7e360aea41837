"""The assertions of the tests of Tangent's fork, rewritten, and with gradients.

Upstream tests positions, forward results and arithmetic with NumPy; not one gradient.
Here each law holds for NumPy and for torch.
"""

import tracemalloc
from itertools import repeat
from math import prod

import numpy as np
import pytest
import torch

from recoup import checkpointed_loop
from recoup.loops import compute_checkpoint_positions, get_memory_savings


def array(*values):
    return np.array(values, dtype=np.float64)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


KINDS = pytest.mark.parametrize("make", [array, tensor], ids=["numpy", "torch"])


def tanh(value):
    return np.tanh(value) if isinstance(value, np.ndarray) else torch.tanh(value)


def same(left, right):
    return bool((left == right).all())


class TestPositions:
    def test_there_are_at_most_the_requested_number(self):
        assert len(compute_checkpoint_positions(100, 10)) <= 10

    def test_they_are_sorted(self):
        found = compute_checkpoint_positions(100, 10)
        assert found == sorted(found)

    def test_they_are_in_range(self):
        assert all(0 <= p < 100 for p in compute_checkpoint_positions(100, 10))

    def test_more_checkpoints_than_steps_give_all_steps(self):
        assert compute_checkpoint_positions(5, 10) == list(range(5))

    def test_zero_checkpoints_give_none(self):
        assert compute_checkpoint_positions(100, 0) == []

    def test_a_single_one_is_inside(self):
        (position,) = compute_checkpoint_positions(100, 1)
        assert 0 < position < 100

    def test_they_are_spread_over_both_halves(self):
        found = compute_checkpoint_positions(100, 5)
        assert len(found) == 5
        assert found[0] < 50 < found[-1]


@KINDS
class TestLoop:
    def test_the_result_equals_that_of_the_plain_loop(self, make):
        def step(x):
            return tanh(x * 1.1 + 0.1)

        state = make(0.0, 0.5, -0.5)
        for _ in range(50):
            state = step(state)
        final, _ = checkpointed_loop(step, make(0.0, 0.5, -0.5), 50)
        assert same(final, state)

    def test_the_requested_number_is_held(self, make):
        _, checkpoints = checkpointed_loop(lambda x: x * 0.9, make(1.0), 50, 7)
        assert len(checkpoints) == 7

    def test_the_default_is_the_square_root(self, make):
        _, checkpoints = checkpointed_loop(lambda x: x * 0.9, make(1.0), 100)
        assert len(checkpoints) == 10

    def test_a_checkpoint_is_the_state_at_its_position(self, make):
        _, checkpoints = checkpointed_loop(lambda x: x + 1, make(0.0), 100, 10)
        assert all(float(state[0]) == p for p, state in checkpoints.items())

    def test_a_recurrence_with_a_matrix(self, make):
        matrix = make(*np.linspace(-0.3, 0.3, 16)).reshape(4, 4)
        state = make(0.1, 0.2, 0.3, 0.4)
        for _ in range(30):
            state = tanh(state @ matrix)
        begin = make(0.1, 0.2, 0.3, 0.4)
        final, _ = checkpointed_loop(lambda h: tanh(h @ matrix), begin, 30)
        assert same(final, state)

    def test_no_steps(self, make):
        final, checkpoints = checkpointed_loop(lambda x: x + 1, make(3.0), 0)
        assert same(final, make(3.0))
        assert checkpoints == {}

    def test_one_step(self, make):
        final, _ = checkpointed_loop(lambda x: x + 1, make(3.0), 1)
        assert same(final, make(4.0))

    def test_ten_thousand_steps_with_a_hundred_checkpoints(self, make):
        final, checkpoints = checkpointed_loop(
            lambda x: tanh(x * 0.99), make(0.5), 10_000, 100
        )
        assert len(checkpoints) == 100
        assert same(final, final)  # which a NaN is not

    @pytest.mark.parametrize("pack", [tuple, list, lambda pair: dict(enumerate(pair))])
    def test_checkpoints_are_copies_in_the_shape_of_the_state(self, make, pack):
        def step(state):
            if isinstance(state, dict):
                return {name: value + 1 for name, value in state.items()}
            return type(state)([value + 1 for value in state])

        begin = pack([make(0.0), make(10.0)])
        final, checkpoints = checkpointed_loop(step, begin, 9, 3)
        for position in checkpoints:
            assert type(checkpoints[position]) is type(final)
        position = list(checkpoints)[1]
        first = checkpoints[position][0]
        assert same(first, make(float(position)))
        assert same(begin[0], make(0.0))


class TestSavings:
    def test_a_thousand_steps_with_ten(self):
        stats = get_memory_savings(1000, 10)
        assert stats["without_checkpointing"] == 1000
        assert stats["with_checkpointing"] == 10
        assert stats["savings_percent"] == 99.0
        assert stats["num_checkpoints"] == 10

    def test_the_default(self):
        stats = get_memory_savings(100)
        assert (stats["num_checkpoints"], stats["with_checkpointing"]) == (10, 10)
        assert stats["savings_percent"] == 90.0

    def test_they_grow_with_the_length(self):
        ratios = [get_memory_savings(n)["savings_ratio"] for n in (10, 100, 1000)]
        assert ratios == sorted(ratios)
        assert len(set(ratios)) == 3


def test_less_memory_is_used_than_by_storing_all():
    def step(x):
        return np.tanh(x * 1.1 + 0.1)

    def store_all():
        states = [np.zeros(2000)]
        for _ in range(300):
            states.append(step(states[-1]))
        return states

    def peak_of(run):
        tracemalloc.start()
        kept = run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del kept
        return peak

    checkpointed = peak_of(lambda: checkpointed_loop(step, np.zeros(2000), 300))
    assert checkpointed < peak_of(store_all) / 5


def test_the_gradient_that_upstream_gets_wrong():
    """Upstream drops the steps before the first checkpoint: 2.4731 for 2.7048 there."""

    def step(x):
        return x * 1.01

    begin = torch.ones(1, dtype=torch.float64, requires_grad=True)
    final, checkpoints = checkpointed_loop(step, begin, 100)
    assert min(checkpoints) > 0
    assert final.backward() is None
    assert begin.grad is not None
    assert float(begin.grad) == prod(repeat(1.01, 100))
