"""Scopes, marks, modules and policies say where kept values live."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup import (
    CheckpointScope,
    Device,
    Host,
    KeepCostly,
    checkpoint_module,
    keep,
    recompute,
)
from recoup.errors import UnsupportedError, UsageError
from recoup.tiers import Tier, tier_usage
from tests.support.counting import Alive
from tests.support.watching import CountingBackend, Memory, Replayed

HOST = Host(smallest_bytes=0)
LENGTH, DOUBLE = 1000, 8
SIZE_BYTES = LENGTH * DOUBLE


def vector() -> Tensor:
    return torch.randn(LENGTH, dtype=torch.float64, requires_grad=True)


def three(x: Tensor) -> Tensor:
    """Save the input and two tensors between."""
    return x.sin().sin().sin()


class Moved:
    """Counts what the host tier moves in a block."""

    def __enter__(self) -> "Moved":
        self._before = tier_usage()["host"]
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def out_bytes(self) -> int:
        return tier_usage()["host"].out_bytes - self._before.out_bytes

    @property
    def back_bytes(self) -> int:
        return tier_usage()["host"].back_bytes - self._before.back_bytes

    @property
    def live_bytes(self) -> int:
        return tier_usage()["host"].live_bytes - self._before.live_bytes


class TestAScope:
    def test_it_moves_all_that_is_saved(self):
        x = vector()
        with Moved() as moved:
            with CheckpointScope("block", store=HOST):
                y = three(x)
            assert moved.live_bytes == 2 * SIZE_BYTES
            y.sum().backward()
        assert (moved.out_bytes, moved.back_bytes) == (2 * SIZE_BYTES,) * 2
        assert moved.live_bytes == 0

    def test_it_recomputes_nothing(self):
        x = vector()
        with Replayed() as replayed:
            with CheckpointScope("block", store=HOST):
                y = three(x)
            y.sum().backward()
        assert replayed.total == 0

    def test_what_was_moved_is_dead_on_the_device_before_the_scope_ends(self):
        x = vector()
        with Alive() as alive, CheckpointScope("block", store=HOST):
            y = three(x)
            assert alive.sizes == [y.nbytes]

    def test_with_a_policy_it_moves_what_the_policy_keeps(self):
        a = torch.randn(30, 30, requires_grad=True)
        with Moved() as moved, Replayed() as replayed:
            with CheckpointScope("block", store=HOST, policy=KeepCostly()):
                y = (a @ a).sin().sin()
            assert moved.live_bytes == a.nbytes
            y.sum().backward()
        assert dict(replayed.operators) == {"sin": 1}

    def test_three_views_of_one_storage_move_once(self):
        x = vector()
        with Moved() as moved:
            with CheckpointScope("block", store=HOST):
                first, second, third = (x * 2)[:999].chunk(3)
                y = first.sin() * second.cos() * third.exp()
            out_bytes = moved.out_bytes
            y.sum().backward()
        # The storage of x * 2, and the factors of the products.
        smaller = 999 // 3 * DOUBLE
        assert out_bytes == SIZE_BYTES + 4 * smaller
        assert moved.back_bytes == out_bytes

    def test_a_tensor_saved_in_two_scopes_moves_once(self):
        x = vector()
        with Moved() as moved:
            with CheckpointScope("first", store=HOST):
                y = x.exp()
            with CheckpointScope("second", store=HOST):
                z = y.sin()
        assert moved.out_bytes == SIZE_BYTES
        z.sum().backward()
        assert x.grad is not None
        with torch.no_grad():
            assert torch.equal(x.grad, x.exp().cos() * x.exp())

    def test_leaves_and_what_has_no_graph_do_not_move(self):
        weight, data = vector(), torch.ones(LENGTH, dtype=torch.float64)
        with Moved() as moved, CheckpointScope("block", store=HOST):
            y = weight * data
        assert moved.out_bytes == 0
        y.sum().backward()

    def test_parameters_and_their_views_do_not_move(self):
        layer, data = nn.Linear(100, 100), torch.ones(1, 100)
        with Moved() as moved, CheckpointScope("block", store=HOST):
            y = layer(data) + layer.weight.T.sum(0)
        assert moved.out_bytes == 0
        y.sum().backward()

    def test_an_activation_from_outside_moves(self):
        x = vector()
        h = x * 2
        with Moved() as moved, CheckpointScope("block", store=HOST):
            y = h.sin()
        assert moved.out_bytes == SIZE_BYTES
        memory = Memory(h)
        del h
        assert memory.is_freed
        y.sum().backward()

    def test_tiny_tensors_do_not_move(self):
        x = vector()
        with Moved() as moved:
            with CheckpointScope("block", store=Host(smallest_bytes=SIZE_BYTES + 1)):
                three(x)
            assert moved.out_bytes == 0
            with CheckpointScope("block", store=Host(smallest_bytes=SIZE_BYTES)):
                three(x)
            assert moved.out_bytes == 2 * SIZE_BYTES

    def test_a_mark_to_recompute_wins_over_the_store(self):
        x = vector()
        with Moved() as moved, Replayed() as replayed:
            with CheckpointScope("block", store=HOST):
                y = recompute(x.sin()).sin().sin()
            y.sum().backward()
        assert dict(replayed.operators) == {"sin": 1}
        assert moved.out_bytes == SIZE_BYTES

    def test_a_scope_around_one_without_a_store_moves_what_that_holds(self):
        x = vector()
        with Moved() as moved:
            with CheckpointScope("outer", store=HOST):
                h = x.sin()
                with CheckpointScope("inner"):
                    y = three(h)
            assert moved.live_bytes == SIZE_BYTES
            y.sum().backward()

    def test_it_can_be_told_to_keep_on_the_device(self):
        x = vector()
        scope = CheckpointScope("block", store=Device())
        with Moved() as moved, scope:
            three(x)
        assert moved.out_bytes == 0

    @pytest.mark.parametrize("wrong", ["host", Host, 1])
    def test_a_store_that_is_no_tier_is_refused(self, wrong):
        with pytest.raises(UsageError, match="expected a tier as store="):
            CheckpointScope("block", store=wrong)
        with pytest.raises(UsageError, match="expected a tier as store="):
            keep(torch.ones(1), store=wrong)
        with pytest.raises(UsageError, match="expected a tier as store="):
            checkpoint_module(nn.Tanh(), store=wrong)


class TestAMark:
    def test_a_kept_tensor_lives_where_the_mark_says(self):
        x = vector()
        with Moved() as moved, Replayed() as replayed:
            with CheckpointScope("block"):
                y = keep(x.sin().sin(), store=HOST).sin().sin()
            assert moved.live_bytes == SIZE_BYTES
            y.sum().backward()
        # The first sine and the third are computed again; the second was kept.
        assert dict(replayed.operators) == {"sin": 2}

    def test_a_kept_tensor_that_nobody_needs_does_not_move(self):
        x = vector()
        with Moved() as moved, CheckpointScope("block"):
            keep(x + 1, store=HOST).sum()
        assert moved.out_bytes == 0

    def test_a_mark_after_the_tensor_was_saved_moves_it_too(self):
        x = vector()
        with Moved() as moved, CheckpointScope("block"):
            h = x.sin()
            y = h.sin()
            keep(h, store=HOST)
        assert moved.out_bytes == SIZE_BYTES
        y.sum().backward()


class TestAModule:
    def test_it_takes_a_store(self):
        model = checkpoint_module(nn.Sequential(nn.Tanh(), nn.Tanh()), store=HOST)
        with Moved() as moved:
            model(vector()).sum().backward()
        assert moved.out_bytes == moved.back_bytes == 2 * SIZE_BYTES

    def test_a_compiled_one_says_that_it_cannot(self):
        compiled = torch.compile(nn.Tanh(), backend=CountingBackend())
        assert isinstance(compiled, nn.Module)
        with pytest.raises(UnsupportedError, match="compiled"):
            checkpoint_module(compiled, store=HOST)


@dataclass
class Planned:
    """Gives its answers in order."""

    answers: list[Any]
    inputs: Tier | None = None

    def keeps(self, operator: str, nbytes: int) -> Any:
        return self.answers.pop(0)

    def keeps_input(self, nbytes: int) -> Tier | None:
        return self.inputs


class TestAPolicy:
    def test_it_names_a_tier_for_each_value(self):
        x = vector()
        # sin a b c d e, each saving its input: x, a, b, c, d.
        plan = Planned([HOST, None, True, Device(), False])
        with Moved() as moved, Replayed() as replayed:
            scope = CheckpointScope("block", policy=plan, verify="always")
            with scope:
                y = x.sin().sin().sin().sin().sin()
            assert moved.live_bytes == SIZE_BYTES
            assert scope.memory_bytes == 3 * SIZE_BYTES  # x, c, d
            y.sum().backward()
        assert dict(replayed.operators) == {"sin": 1}
        assert moved.back_bytes == SIZE_BYTES

    def test_it_names_a_tier_for_activations_from_outside(self):
        x = vector()
        h = x * 2
        with Moved() as moved:
            with CheckpointScope("block", policy=Planned([False], HOST)):
                y = h.sin()
            assert moved.live_bytes == SIZE_BYTES
            # Needed by the replay alone.
            with CheckpointScope("block", policy=Planned([False] * 2, HOST)):
                z = (h + 1).sin()
            assert moved.live_bytes == SIZE_BYTES
            (y + z).sum().backward()
        assert moved.live_bytes == 0


class TestNothingIsLeft:
    def test_after_a_graph_dropped_without_backward(self):
        x = vector()
        with Moved() as moved, Alive() as alive:
            with CheckpointScope("block", store=HOST):
                y = three(x)
            assert moved.live_bytes > 0
            del y
            assert (moved.live_bytes, alive.sizes) == (0, [])

    def test_after_an_error_in_forward(self):
        def fail(x: Tensor) -> None:
            with CheckpointScope("block", store=HOST):
                three(x)
                raise ZeroDivisionError

        with Moved() as moved:
            with pytest.raises(ZeroDivisionError):
                fail(vector())
            assert moved.out_bytes > moved.live_bytes == 0

    def test_after_an_error_in_backward(self):
        def fail(gradient: Tensor) -> None:
            raise ZeroDivisionError

        x = vector()
        with Moved() as moved, Alive() as alive:
            with CheckpointScope("block", store=HOST):
                h = x.sin()
                h.register_hook(fail)
                y = h.sin().sin()
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
            del y, h
            assert (moved.live_bytes, alive.sizes) == (0, [])

    def test_between_two_backwards_through_one_graph(self):
        x = vector()
        with Moved() as moved, Alive() as alive:
            with CheckpointScope("block", store=HOST):
                y = three(x)
            for count in (1, 2):
                x.grad = None
                y.sum().backward(retain_graph=True)
                assert moved.live_bytes == 2 * SIZE_BYTES
                assert moved.back_bytes == count * 2 * SIZE_BYTES
                assert alive.sizes == [SIZE_BYTES] * 2  # y and the gradient

    def test_of_a_value_that_one_of_its_two_users_asked_for(self):
        x = vector()
        with Alive() as alive:
            with CheckpointScope("block", store=HOST):
                h = x.exp()
                results = [h.sin(), h.cos()]
            del h
            torch.autograd.grad(results[0].sum(), x, retain_graph=True)
            assert alive.sizes == [SIZE_BYTES] * 2  # the results

    def test_after_clearing_the_checkpoints(self):
        x = vector()
        scope = CheckpointScope("block", store=HOST)
        with Moved() as moved:
            with scope:
                y = three(x)
            for node in scope.nodes:
                node.clear_saved_activations()
            assert moved.live_bytes == 0
        del y


class TestWrites:
    def test_what_was_saved_survives_a_later_write_in_the_region(self):
        x = vector()
        with CheckpointScope("block", store=HOST):
            h = x * 2
            y = h.sin()
            with torch.no_grad():
                h.zero_()
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, ((x * 2).cos() * 2).detach())

    def test_a_write_through_data_is_seen_as_plain_autograd_sees_it(self):
        x = vector()
        with CheckpointScope("block", store=HOST):
            h = x * 2
            y = h.sin()
            h.data.mul_(3)
            z = h.sin()
        (y + z).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, ((x * 2 * 3).cos() * 2 * 2).detach())
