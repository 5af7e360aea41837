"""The activation checkpointer: every item of its seed, and what the seed got wrong."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from recoup import ActivationCheckpointer, CheckpointConfig, Disk, Host
from recoup.errors import (
    ChangedTensorError,
    CheckpointIndexError,
    CheckpointLimitError,
    MissingCheckpointError,
    UsageError,
)
from tests.support.counting import Alive

OVERFLOWS = ("spread", "error", "evict_oldest", "skip")


def simple(activation: Tensor, layer: int) -> Tensor:
    return activation * 1.1 + layer * 0.01


def sequential(x: Any, layers, function=simple) -> Any:
    for layer in layers:
        x = function(x, layer)
    return x


def checkpointer(every: int | str = 2, **options: Any) -> ActivationCheckpointer:
    return ActivationCheckpointer(
        CheckpointConfig(checkpoint_every_n_layers=every, **options)  # pyright: ignore[reportArgumentType]
    )


class Counted:
    """Counts how often each layer is computed."""

    def __init__(self, function=simple) -> None:
        self.calls: list[int] = []
        self._function = function

    def __call__(self, activation: Any, layer: int) -> Any:
        self.calls.append(layer)
        return self._function(activation, layer)


class TestTheConfiguration:
    def test_it_has_the_defaults_of_the_seed(self):
        config = CheckpointConfig()
        assert config.checkpoint_every_n_layers == 4
        assert config.max_checkpoints == 64
        assert config.use_mixed_precision is False
        assert config.on_overflow == "spread"
        assert ActivationCheckpointer().config == config

    @pytest.mark.parametrize(
        "wrong",
        [
            {"checkpoint_every_n_layers": -1},
            {"checkpoint_every_n_layers": 1.5},
            {"checkpoint_every_n_layers": "root"},
            {"checkpoint_every_n_layers": True},
            {"max_checkpoints": -1},
            {"max_checkpoints": None},
            {"use_mixed_precision": "bf16"},
            {"on_overflow": "explode"},
            {"store": "host"},
        ],
        ids=str,
    )
    def test_what_is_out_of_range_is_refused(self, wrong):
        with pytest.raises(UsageError):
            CheckpointConfig(**wrong)

    def test_something_else_is_refused(self):
        with pytest.raises(UsageError, match="CheckpointConfig"):
            ActivationCheckpointer(4)  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize(
        ("every", "expected"), [(3, [0, 3, 6]), (1, list(range(8))), (0, [])]
    )
    def test_every_nth_layer_is_a_checkpoint_layer(self, every, expected):
        found = checkpointer(every)
        layers = [layer for layer in range(8) if found.is_checkpoint_layer(layer)]
        assert layers == expected


class TestTheTable:
    def test_layers_are_named_by_anything_that_is_a_whole_number(self):
        table, x = checkpointer(2), torch.ones(2)
        layers, second = torch.arange(4), torch.tensor(2)
        output = table.checkpointed_forward(x, layers, simple)  # pyright: ignore[reportArgumentType]
        assert torch.equal(output, sequential(x, range(4)))
        found = table.get(second)  # pyright: ignore[reportArgumentType]
        assert torch.equal(found, sequential(x, range(3)))
        for wrong in (-1, 1.0, True, "1", None):
            with pytest.raises(UsageError, match="integer of at least 0"):
                table.save(wrong, x)  # pyright: ignore[reportArgumentType]

    def test_what_is_saved_can_be_got(self):
        table = checkpointer()
        activation = torch.tensor([1.0, 2.0, 3.0, 4.0])
        table.save(2, activation)
        assert torch.equal(table.get(2), activation)

    def test_a_layer_beyond_all_that_were_saved_is_an_index_error(self):
        table = checkpointer()
        table.save(2, torch.ones(4))
        with pytest.raises(IndexError, match=r"Index 5 out of bounds \(limit 3\)"):
            table.get(5)
        with pytest.raises(CheckpointIndexError) as caught:
            table.get(5)
        assert (caught.value.index, caught.value.limit) == (5, 3)
        assert caught.value.context == "ActivationCheckpointer.get"

    def test_a_layer_that_was_not_kept_is_a_key_error(self):
        table = checkpointer()
        table.save(2, torch.ones(4))
        with pytest.raises(KeyError) as caught:
            table.get(1)
        assert isinstance(caught.value, MissingCheckpointError)
        assert str(caught.value) == "No checkpoint stored for layer 1"

    @pytest.mark.parametrize("on_overflow", ["spread", "error"])
    def test_one_too_many_is_refused_in_the_words_of_the_seed(self, on_overflow):
        table = checkpointer(max_checkpoints=2, on_overflow=on_overflow)
        table.save(0, torch.ones(1))
        table.save(2, torch.ones(1))
        with pytest.raises(CheckpointLimitError) as caught:
            table.save(4, torch.ones(1))
        expected = "Maximum checkpoint count (2) exceeded when saving layer 4"
        assert str(caught.value) == expected
        assert table.num_checkpoints() == 2

    def test_the_oldest_is_evicted_if_asked(self):
        table = checkpointer(max_checkpoints=2, on_overflow="evict_oldest")
        for layer in (0, 2, 4):
            table.save(layer, torch.full((3,), float(layer)))
        assert table.num_checkpoints() == 2
        assert table.memory_stored_bytes() == 24
        with pytest.raises(MissingCheckpointError):
            table.get(0)
        assert float(table.get(4)[0]) == 4.0

    def test_what_is_skipped_is_counted(self):
        table = checkpointer(max_checkpoints=1, on_overflow="skip")
        table.save(0, torch.ones(3))
        table.save(2, torch.ones(5))
        assert (table.num_checkpoints(), table.skipped_bytes()) == (1, 20)

    def test_saving_a_layer_again_replaces_it_and_counts_once(self):
        table = checkpointer(max_checkpoints=1)
        table.save(2, torch.ones(6))
        table.save(2, torch.zeros(6))
        assert (table.num_checkpoints(), table.memory_stored_bytes()) == (1, 24)
        assert torch.equal(table.get(2), torch.zeros(6))

    def test_clear_resets_everything(self):
        table = checkpointer()
        table.checkpointed_forward(torch.ones(3), range(6), simple)
        table.clear()
        assert table.num_checkpoints() == 0
        assert table.memory_saved_bytes() == 0
        assert table.memory_stored_bytes() == 0
        with pytest.raises(CheckpointIndexError):
            table.get(0)

    def test_a_clone_is_independent(self):
        table = checkpointer()
        table.save(0, torch.ones(1))
        other = table.clone()
        table.clear()
        assert torch.equal(other.get(0), torch.ones(1))
        other.save(2, torch.ones(1))
        assert table.num_checkpoints() == 0

    def test_an_activation_that_was_changed_since_is_an_error(self):
        table = checkpointer()
        x = torch.ones(3)
        table.save(0, x)
        x.add_(1)
        with pytest.raises(ChangedTensorError):
            table.get(0)

    def test_nested_structures_and_other_types_come_back(self):
        table = checkpointer()
        x = {"a": torch.arange(3), "b": (torch.tensor([True]), "text")}
        table.save(0, x)
        found = table.get(0)
        assert torch.equal(found["a"], x["a"])
        assert found["b"][1] == "text"
        assert table.memory_stored_bytes() == 25

    @pytest.mark.parametrize("layer", [-1, 1.0, True, None])
    def test_an_index_is_a_whole_number(self, layer):
        with pytest.raises(UsageError):
            checkpointer().save(layer, torch.ones(1))


class TestForward:
    def test_the_accounts_are_those_of_the_seed(self):
        table = checkpointer(3, max_checkpoints=10)
        x = torch.tensor([1.0, 2.0, 3.0])
        table.checkpointed_forward(x, range(6), simple)
        assert table.num_checkpoints() == 2
        assert table.memory_stored_bytes() == 24
        assert table.memory_saved_bytes() == 48

    @given(
        layers=st.lists(st.integers(0, 5), max_size=9),
        every=st.integers(0, 4) | st.just("sqrt"),
        limit=st.integers(0, 4),
        on_overflow=st.sampled_from(["spread", "evict_oldest", "skip"]),
    )
    def test_output_and_gradient_are_bitwise_those_of_the_plain_run(
        self, layers, every, limit, on_overflow
    ):
        weights = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)

        def function(x: Tensor, layer: int) -> Tensor:
            return (x * weights[layer]).sin() + x

        def gradients(run) -> tuple[Tensor, ...]:
            x = torch.linspace(0, 1, 4, dtype=torch.float64, requires_grad=True)
            y = run(x)
            # The sum keeps every input in the graph when there is no layer.
            total = y.sum() + 0 * weights.sum()
            return y.detach(), *torch.autograd.grad(total, (x, weights))

        table = checkpointer(every, max_checkpoints=limit, on_overflow=on_overflow)
        expected = gradients(lambda x: sequential(x, layers, function))
        found = gradients(lambda x: table.checkpointed_forward(x, layers, function))
        assert all(map(torch.equal, expected, found))
        assert table.num_checkpoints() <= limit

    def test_modules_learn_as_without_it(self):
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in "ab")
        x = torch.randn(3, 8)

        def gradients(run) -> list[Tensor]:
            return list(torch.autograd.grad(run(x).sum(), list(blocks.parameters())))

        def function(x: Tensor, layer: int) -> Tensor:
            return blocks[layer](x)

        layers = [0, 1, 0, 1]
        table = checkpointer(2)
        expected = gradients(lambda x: sequential(x, layers, function))
        found = gradients(lambda x: table.checkpointed_forward(x, layers, function))
        assert all(map(torch.equal, expected, found))

    def test_each_layer_is_computed_once_and_its_operators_at_most_once_more(self):
        counted = Counted()
        x = torch.ones(3, requires_grad=True)
        y = checkpointer(3).checkpointed_forward(x, range(9), counted)
        y.sum().backward()
        assert counted.calls == list(range(9))

    def test_between_forward_and_backward_only_checkpoints_are_alive(self):
        length = 1000

        def function(x: Tensor, layer: int) -> Tensor:
            return x.sin().cos().exp()

        x = torch.ones(length, requires_grad=True)
        table = checkpointer(3)
        # The first time, fingerprints are taken too.
        table.checkpointed_forward(x, range(9), function).sum().backward()
        table.clear()
        with Alive() as alive:
            y = table.checkpointed_forward(x, range(9), function)
            # Layers 0, 3 and 6, and the output.
            assert [s for s in alive.sizes if s >= x.nbytes] == [x.nbytes] * 4
        y.sum().backward()

    def test_two_forwards_before_their_backwards_do_not_mix(self):
        table = checkpointer()
        first, second = (torch.rand(3, requires_grad=True) for _ in "ab")
        y = table.checkpointed_forward(first, range(5), Sine())
        z = table.checkpointed_forward(second, range(5), Sine())
        assert torch.equal(table.get(4), z.detach())
        (y.sum() + 2 * z.sum()).backward()
        for x, factor in ((first, 1), (second, 2)):
            twin = x.detach().clone().requires_grad_()
            (factor * sequential(twin, range(5), Sine()).sum()).backward()
            assert x.grad is not None
            assert twin.grad is not None
            assert torch.equal(x.grad, twin.grad)

    def test_a_second_forward_shows_nothing_of_the_first(self):
        table = checkpointer(1, max_checkpoints=3, on_overflow="skip")
        table.checkpointed_forward(torch.tensor([1.0]), range(5), simple)
        table.checkpointed_forward(torch.tensor([9.0]), range(5), simple)
        assert torch.equal(table.get(0), simple(torch.tensor([9.0]), 0))

    def test_an_error_in_a_layer_comes_through_and_leaves_nothing(self):
        def function(x: Tensor, layer: int) -> Tensor:
            if layer == 3:
                raise ZeroDivisionError
            return x + 1

        table = checkpointer()
        with pytest.raises(ZeroDivisionError):
            table.checkpointed_forward(torch.ones(2), range(6), function)
        assert table.num_checkpoints() == 0
        assert table.memory_saved_bytes() == 0
        assert table.checkpointed_forward(torch.ones(1), [0], function) == 2.0

    def test_nested_structures_are_activations_too(self):
        def function(pair: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
            a, b = pair
            return (a * b).sin(), a + layer

        a, b = (torch.rand(3, requires_grad=True) for _ in "ab")
        x, y = checkpointer().checkpointed_forward((a, b), range(5), function)
        expected = sequential((a, b), range(5), function)
        assert torch.equal(x, expected[0])
        found = torch.autograd.grad((x + y).sum(), (a, b))
        twin = torch.autograd.grad((expected[0] + expected[1]).sum(), (a, b))
        assert all(map(torch.equal, found, twin))

    def test_the_square_root_keeps_and_recomputes_fewest(self):
        table = checkpointer("sqrt")
        with pytest.raises(UsageError, match="expected a forward before this"):
            table.is_checkpoint_layer(0)
        table.checkpointed_forward(torch.ones(1), range(100), simple)
        assert table.num_checkpoints() == math.isqrt(100)
        assert table.is_checkpoint_layer(10)


class Sine:
    def __call__(self, x: Tensor, layer: int) -> Tensor:
        return (x * (layer + 1)).sin()


class TestOverflow:
    @pytest.mark.parametrize(
        ("on_overflow", "kept", "skipped_bytes"),
        [
            ("spread", [0, 4, 8], 0),
            ("evict_oldest", [6, 8, 10], 0),
            ("skip", [0, 2, 4], 3 * 8),
        ],
    )
    def test_a_forward_keeps_what_the_policy_says(
        self, on_overflow, kept, skipped_bytes
    ):
        table = checkpointer(2, max_checkpoints=3, on_overflow=on_overflow)
        x = torch.tensor([1.0, 2.0])
        table.checkpointed_forward(x, range(12), simple)
        found = []
        for layer in range(12):
            try:
                table.get(layer)
            except MissingCheckpointError:
                continue
            found.append(layer)
        assert found == kept
        assert table.skipped_bytes() == skipped_bytes
        stored = table.memory_stored_bytes()
        assert stored + table.memory_saved_bytes() + skipped_bytes == 12 * 8

    def test_an_error_comes_before_anything_has_run(self):
        counted = Counted()
        table = checkpointer(2, max_checkpoints=2, on_overflow="error")
        message = r"Maximum checkpoint count \(2\) exceeded when saving layer 4"
        with pytest.raises(CheckpointLimitError, match=message):
            table.checkpointed_forward(torch.ones(1), range(9), counted)
        assert counted.calls == []


class TestWhatIsAsked:
    @given(
        st.integers(0, 5),
        st.integers(0, 6),
        st.sampled_from(["spread", "evict_oldest", "skip"]),
        st.lists(st.integers(0, 9), max_size=12),
    )
    def test_a_checkpoint_layer_is_one_that_the_forward_kept(
        self, every, most, on_overflow, layers
    ):
        made = checkpointer(every, max_checkpoints=most, on_overflow=on_overflow)
        made.checkpointed_forward(torch.ones(2), layers, simple)
        kept = {entry.layer for entry in made._table.entries.values()}
        asked = {layer for layer in layers if made.is_checkpoint_layer(layer)}
        assert asked == kept
        # The others go by the interval, as before the first forward.
        for layer in set(range(12)).difference(layers):
            assert made.is_checkpoint_layer(layer) == (every > 0 and layer % every == 0)

    def test_arrays_of_numpy_are_counted_as_tensors_are(self):
        def forward(activation) -> tuple[int, int, int]:
            made = checkpointer(3, max_checkpoints=10)
            made.checkpointed_forward(activation, range(6), simple)
            stored, saved = made.memory_stored_bytes(), made.memory_saved_bytes()
            return made.num_checkpoints(), stored, saved

        assert forward(np.array([1, 2, 3], dtype=np.float32)) == (2, 24, 48)
        assert forward(torch.tensor([1.0, 2.0, 3.0])) == (2, 24, 48)

    def test_arrays_that_are_saved_or_skipped_by_hand_are_counted(self):
        made = checkpointer(1, max_checkpoints=1, on_overflow="skip")
        made.save(0, [np.zeros(4), torch.zeros(2), None, 3])
        made.save(1, np.zeros(8, dtype=np.int16))
        assert (made.memory_stored_bytes(), made.skipped_bytes()) == (40, 16)


class TestRecompute:
    @pytest.mark.parametrize("on_overflow", ["spread", "evict_oldest", "skip"])
    @pytest.mark.parametrize("every", [0, 1, 2, 3, 10])
    def test_it_is_right_for_every_target(self, every, on_overflow):
        layers = [3, 0, 5, 1, 4, 2, 6]
        table = checkpointer(every, max_checkpoints=2, on_overflow=on_overflow)
        x = torch.tensor([1.0, 2.0, 3.0])
        table.checkpointed_forward(x, layers, simple)
        for place, target in enumerate(layers):
            found = table.recompute_from_checkpoint(target, layers, simple)
            assert torch.equal(found, sequential(x, layers[: place + 1]))

    def test_it_computes_only_what_lies_between(self):
        table = checkpointer(3)
        table.checkpointed_forward(torch.ones(2), range(9), simple)
        for target, expected in [(0, []), (2, [1, 2]), (3, []), (8, [7, 8])]:
            counted = Counted()
            table.recompute_from_checkpoint(target, range(9), counted)
            assert counted.calls == expected

    def test_a_layer_that_comes_twice_is_meant_the_last_time(self):
        layers = [0, 1, 0, 1]
        table = checkpointer(2)
        x = torch.ones(2)
        table.checkpointed_forward(x, layers, simple)
        found = table.recompute_from_checkpoint(0, layers, simple)
        assert torch.equal(found, sequential(x, [0, 1, 0]))

    def test_what_was_saved_by_hand_serves_too(self):
        table = checkpointer()
        table.save(2, torch.full((1,), 5.0))
        found = table.recompute_from_checkpoint(4, range(6), simple)
        assert torch.equal(found, sequential(torch.full((1,), 5.0), [3, 4]))

    def test_with_nothing_kept_it_says_so_in_the_words_of_the_seed(self):
        with pytest.raises(MissingCheckpointError) as caught:
            checkpointer().recompute_from_checkpoint(3, range(6), simple)
        expected = "No checkpoint found before layer 3 for recomputation"
        assert str(caught.value) == expected

    def test_a_target_that_is_not_among_the_layers_is_refused(self):
        table = checkpointer()
        table.checkpointed_forward(torch.ones(1), range(4), simple)
        with pytest.raises(ValueError, match="layer 9 is not among"):
            table.recompute_from_checkpoint(9, range(4), simple)


class TestMixedPrecision:
    def test_checkpoints_take_half_the_bytes(self):
        x = torch.rand(100)
        full, half = checkpointer(), checkpointer(use_mixed_precision=True)
        for table in (full, half):
            table.checkpointed_forward(x, range(6), simple)
        assert half.memory_stored_bytes() * 2 == full.memory_stored_bytes()

    def test_what_is_got_has_its_type_and_is_off_by_a_2048th_at_most(self):
        table = checkpointer(use_mixed_precision=True)
        x = torch.tensor([0.1234567, 65504.0, 7e4, -7e4, math.inf])
        table.save(0, x)
        found = table.get(0)
        assert found.dtype is torch.float32
        assert bool(((found - x).abs()[:4] <= x.abs()[:4] / 2048).all())
        assert found[4] == math.inf

    def test_small_numbers_do_not_become_zero(self):
        table = checkpointer(use_mixed_precision=True)
        table.save(0, torch.tensor([1e-4]))
        assert abs(float(table.get(0)) - 1e-4) <= 1e-4 / 2048

    @given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=9))
    def test_the_error_is_within_the_bound_that_is_stated(self, numbers):
        x = torch.tensor(numbers)
        made = checkpointer(use_mixed_precision=True)
        made.save(0, x)
        bound = (x.double().abs() / 2**11).clamp(min=2.0**-25)
        assert ((made.get(0).double() - x.double()).abs() <= bound).all()

    def test_the_relative_bound_alone_is_not_true_of_small_numbers(self):
        x = torch.tensor([3e-8, 1e-6])
        made = checkpointer(use_mixed_precision=True)
        made.save(0, x)
        assert ((made.get(0) - x).abs() > x / 2**11).all()

    def test_integers_and_booleans_are_untouched(self):
        table = checkpointer(use_mixed_precision=True)
        whole, mask = torch.tensor([1, 70001]), torch.tensor([True, False])
        table.save(0, (whole, mask))
        assert torch.equal(table.get(0)[0], whole)
        assert torch.equal(table.get(0)[1], mask)

    def test_gradients_are_those_at_the_rounded_activations(self):
        table, layer = checkpointer(use_mixed_precision=True), Sine()
        x = torch.linspace(0.1, 1, 50, requires_grad=True)
        y = table.checkpointed_forward(x, range(6), layer)
        kept = {number: table.get(number) for number in (0, 2, 4)}
        y.sum().backward()
        given = [x, kept[0], layer(kept[0], 1), kept[2], layer(kept[2], 3), kept[4]]
        gradient, exact = torch.ones(50), x.detach().clone().requires_grad_()
        for number in reversed(range(6)):
            leaf = given[number].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(layer(leaf, number), leaf, gradient)
        assert x.grad is not None
        assert torch.equal(x.grad, gradient)
        sequential(exact, range(6), layer).sum().backward()
        assert exact.grad is not None
        assert not torch.equal(x.grad, exact.grad)


@pytest.mark.parametrize("store", [Host(smallest_bytes=0), Disk(smallest_bytes=0)])
def test_checkpoints_can_live_elsewhere(store):
    table = checkpointer(2, store=store)
    x = torch.rand(100, requires_grad=True)
    y = table.checkpointed_forward(x, range(6), Sine())
    assert torch.equal(table.get(4), sequential(x.detach(), range(5), Sine()))
    y.sum().backward()
    twin = x.detach().clone().requires_grad_()
    sequential(twin, range(6), Sine()).sum().backward()
    assert x.grad is not None
    assert twin.grad is not None
    assert torch.equal(x.grad, twin.grad)
