"""Steps that call several models: they share the budget, which may change."""

# A gradient is maybe None to pyright.
# pyright: reportOptionalMemberAccess=false

import contextlib
import warnings

import pytest
import torch
from torch import nn

from recoup.backend.memory.meters import StorageMeter
from recoup.errors import BudgetWarning
from tests.fitting.test_manager import added_bytes, limited, network, step
from tests.support.twin import leftovers


class Loop:
    """Models that a step calls one after the other, and then a loss."""

    def __init__(self, models, loss=None):
        self.models, self.loss = models, loss
        self.batch = torch.linspace(-1, 1, 512 * 32).reshape(512, 32)

    def backward(self):
        y = self.batch
        for model in self.models:
            y = model(y)
        loss = y.square().sum() if self.loss is None else self.loss(y, torch.zeros(1))
        loss.backward()

    def clear(self):
        for model in self.models:
            model.zero_grad()

    def __call__(self):
        self.clear()
        self.backward()
        return [p.grad.clone() for model in self.models for p in model.parameters()]

    def added_bytes(self):
        self.clear()
        with StorageMeter() as meter:
            meter.track(*self.models, self.batch)
            before = meter.live_bytes
            self.backward()
            return meter.peak_bytes - before


def loops():
    yield Loop([network(4), network(4)])
    yield Loop(list(network(8)))
    yield Loop([network(3)] * 3)


class Squares(nn.Module):
    """A loss that holds next to nothing."""

    def forward(self, y, target):
        return (y.mean() - target).square().sum()


class TestSeveralModels:
    @pytest.mark.parametrize("number", range(3))
    @pytest.mark.parametrize("share", [1.0, 0.75])
    def test_they_share_the_budget_from_the_second_step_on(self, number, share):
        run, manager = list(loops())[number], limited(4, share)
        plain_bytes, expected = run.added_bytes(), run()
        assert plain_bytes > manager.budget_bytes
        with manager:
            for _ in range(3):
                assert all(map(torch.equal, expected, run()))
            assert manager.planned_bytes <= manager.budget_bytes
            assert run.added_bytes() <= manager.budget_bytes
        manager.remove()
        assert run.added_bytes() == plain_bytes
        assert list(leftovers()) == []

    @pytest.mark.parametrize("number", range(3))
    def test_a_smaller_batch_stays_within_it_too(self, number):
        run, manager = list(loops())[number], limited(4, 0.75)
        with manager:
            run()
            run()
            run.batch = run.batch[:450].clone()
            assert run.added_bytes() <= manager.budget_bytes
        manager.remove()

    def test_applied_models_share_it_as_well(self):
        run, manager = Loop([network(4), network(4)]), limited(4)
        for model in run.models:
            manager.apply(model)
        run()
        run()
        assert run.added_bytes() <= manager.budget_bytes
        manager.remove()

    @pytest.mark.parametrize("number", range(3))
    def test_less_memory_never_means_less_recomputation(self, number):
        run, sizes = list(loops())[number], []
        for share in (1.0, 0.85, 0.7):
            manager = limited(4, share)
            with manager:
                run()
                run()
                sizes.append(run.added_bytes())
            manager.remove()
        assert sizes == sorted(sizes, reverse=True)

    def test_what_cannot_fit_is_named_in_a_warning(self):
        run, manager = Loop([network(4), network(4)]), limited(2, 0.95)
        with manager:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BudgetWarning)
                run()
            with pytest.warns(BudgetWarning, match="Sequential does not fit"):
                run()
        manager.remove()

    def test_models_whose_backward_is_done_leave_all_but_their_gradients(self):
        models, manager = [network(), network()], limited(2)
        with manager:
            for _ in range(3):
                for model in models:
                    step(model)
        alone = limited(2)
        planned = max(each.plain_bytes for each in manager.steps)
        manager.remove()
        with alone:
            step(models[0])
        [one] = alone.steps
        alone.remove()
        gradients = sum(p.nbytes for p in models[1].parameters())
        assert planned == one.plain_bytes + gradients

    def test_another_step_is_said_to_be_one_and_observed(self):
        run, manager = Loop([network()]), limited(3)
        with manager:
            run()
            run.loss = Squares()
            with pytest.warns(
                BudgetWarning, match="got other models or larger batches"
            ):
                run()
            run()
            run()
        names = {each.models: each for each in manager.steps}
        manager.remove()
        assert set(names) == {("Sequential",), ("Sequential", "Squares")}
        measured_bytes = names["Sequential", "Squares"].measured_bytes
        assert measured_bytes is not None
        assert measured_bytes <= manager.budget_bytes

    def test_what_was_planned_is_what_all_take_together(self):
        model, manager = network(), limited(8)
        run = Loop([model], nn.MSELoss())
        with manager, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of shapes that differ
            run()
            assert run.added_bytes() <= manager.planned_bytes
            assert manager.measured_bytes == manager.planned_bytes
        manager.remove()


class TestANewBudget:
    @pytest.mark.parametrize("inside", [True, False])
    def test_the_next_call_is_planned_for_it(self, inside):
        model, manager = network(), limited(4)
        plain_bytes, expected = added_bytes(model), step(model)
        manager.apply(model)
        with manager if inside else contextlib.nullcontext():
            step(model)
            assert added_bytes(model) == plain_bytes
            manager.max_memory_mb = 1
            assert all(map(torch.equal, expected, step(model)))
            assert added_bytes(model) <= manager.budget_bytes < plain_bytes
            smaller_bytes = manager.planned_bytes
            manager.memory_threshold = 0.85
            assert added_bytes(model) <= manager.budget_bytes
            assert manager.planned_bytes < smaller_bytes
            manager.max_memory_mb = 8
            assert added_bytes(model) == plain_bytes
        manager.remove()

    def test_it_holds_for_all_that_run_together(self):
        run, manager = Loop([network(4), network(4)]), limited(8)
        with manager:
            run()
            run()
            manager.max_memory_mb = 4
            assert run.added_bytes() <= manager.budget_bytes
        manager.remove()
