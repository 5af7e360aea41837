"""The manager that chooses: within its budget, evenly, monotonically, and exactly."""

# A gradient is maybe None to pyright.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import threading
import warnings

import pytest
import torch
from torch import nn

from recoup import CheckpointManager, CheckpointProfiler, CheckpointScope, keep
from recoup.backend.memory.meters import StorageMeter
from recoup.errors import BudgetWarning, UsageError
from tests.support.twin import leftovers

MEBIBYTE = 1 << 20


def layer(width=32):
    return nn.Sequential(
        nn.Linear(width, 8 * width), nn.Tanh(), nn.Linear(8 * width, width)
    )


def network(layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(layers)))


X = torch.linspace(-1, 1, 128 * 32).reshape(128, 32)


def step(model):
    model.zero_grad()
    model(X).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def added_bytes(model):
    """What a step adds to memory at its peak."""
    model.zero_grad()
    with StorageMeter() as meter:
        meter.track(model, X)
        before = meter.live_bytes
        model(X).square().sum().backward()
        return meter.peak_bytes - before


def limited(mebibytes, share=1.0):
    return CheckpointManager(
        max_memory_mb=mebibytes, memory_threshold=share, auto_checkpoint=True
    )


class TestAModel:
    @pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code
    def test_a_model_that_is_compiled_afterwards_is_chosen_for(self):
        torch.compiler.reset()
        model = network()
        plain = step(model)
        manager = limited(1, 0.9)
        compiled = torch.compile(manager.apply(model), backend="eager")
        for _ in range(2):
            with CheckpointProfiler() as profiler:
                assert all(map(torch.equal, plain, step(compiled)))
            assert profiler.checkpoint_count() > 0
        manager.remove()

    def test_a_step_in_the_context_stays_within_the_budget(self):
        model = network()
        plain_bytes, plain = added_bytes(model), step(model)
        manager = limited(1, 0.9)
        assert plain_bytes > manager.budget_bytes
        with manager:
            first = step(model)
            second_bytes = added_bytes(model)
        assert second_bytes <= manager.budget_bytes
        assert all(map(torch.equal, plain, first))
        manager.remove()
        assert added_bytes(model) == plain_bytes
        assert list(leftovers()) == []

    def test_the_first_call_in_the_context_is_planned_already(self):
        model = network()
        manager = limited(1, 0.9)
        with manager:
            loss = model(X).square().sum()
            assert manager.nodes
            loss.backward()
        manager.remove()

    def test_applied_to_a_model_with_keyword_arguments(self):
        class Keywords(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(layer() for _ in range(6))

            def forward(self, *, features):
                for each in self.layers:
                    features = each(features)
                return {"features": features}

        model = Keywords()
        manager = limited(1, 0.9)
        assert manager.apply(model) is model
        model(features=X)["features"].square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        manager.remove()
        assert manager.planned_bytes <= manager.budget_bytes
        model.zero_grad()
        model(features=X)["features"].square().sum().backward()
        assert all(
            torch.equal(one, p.grad)
            for one, p in zip(found, model.parameters(), strict=True)
        )

    def test_less_memory_never_means_less_recomputation(self):
        sizes = []
        for share in (1.0, 0.8, 0.6):
            manager = limited(2, share)
            model = network(8)
            with manager:
                step(model)
                sizes.append(added_bytes(model))
            manager.remove()
        assert sizes == sorted(sizes, reverse=True)

    def test_what_cannot_fit_gets_the_smallest_plan_and_a_warning(self):
        model = network()
        manager = CheckpointManager(
            max_memory_mb=1, memory_threshold=0.01, auto_checkpoint=True
        )
        with (
            pytest.warns(BudgetWarning, match="mb=1.*smallest plan"),
            manager,
        ):
            found = step(model)
        manager.remove()
        assert all(map(torch.equal, found, step(model)))

    def test_marks_and_scopes_of_the_user_win(self):
        kept = []

        class Marked(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(layer() for _ in range(6))

            def forward(self, x):
                for each in self.layers:
                    with CheckpointScope("mine"):
                        x = keep(each(x))
                        kept.append(x)
                return x

        model = Marked()
        plain = step(model)
        manager = limited(1)
        with manager, warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            assert all(map(torch.equal, step(model), plain))
        manager.remove()

    def test_without_gradients_nothing_is_measured(self):
        model = network(2)
        manager = limited(1)
        with manager, torch.no_grad():
            model(X)
        assert manager.planned_bytes == 0
        assert not model._forward_pre_hooks

    def test_a_call_that_fails_leaves_what_the_plain_one_does(self):
        def fail(manage):
            torch.manual_seed(0)
            model = nn.Sequential(layer(), nn.BatchNorm1d(32), nn.Dropout(0.5), layer())
            manager = limited(8)
            if manage:
                manager.apply(model)
            model[3].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(X)
            manager.remove()
            return [torch.random.get_rng_state(), *model.state_dict().values()]

        assert all(map(torch.equal, fail(manage=True), fail(manage=False)))
        assert list(leftovers()) == []

    def test_apply_needs_the_switch_and_a_model(self):
        with pytest.raises(UsageError, match="expected auto_checkpoint=True for apply"):
            CheckpointManager().apply(network(1))
        with pytest.raises(TypeError, match="expected a model, got str"):
            limited(1).apply("model")


class Keyword(nn.Module):
    """A network that is called by keyword, and fails if it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x, *, scale):
        if scale is None:
            raise ValueError("no scale")
        return self.layers(x) * scale


class TestCalls:
    def call(self, model):
        model.zero_grad()
        model(X, scale=2.0).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    @pytest.mark.parametrize("applied", [False, True])
    def test_a_model_is_called_by_keyword(self, applied):
        model, manager = Keyword(), limited(1)
        expected = self.call(model)
        with manager:
            if applied:
                manager.apply(model)
            found = self.call(model)
        manager.remove()
        assert manager.planned_bytes
        assert all(map(torch.equal, expected, found))

    def test_the_first_call_after_apply_is_within_the_budget_already(self):
        model, manager = network(), limited(1)
        plain_bytes = added_bytes(model)
        manager.apply(model)
        regions = []
        with CheckpointProfiler() as profiler:
            regions.append(step(model))
        manager.remove()
        assert plain_bytes > manager.planned_bytes
        assert profiler.checkpoint_count() > 0

    @pytest.mark.parametrize("applied", [False, True])
    def test_a_model_whose_first_call_fails_is_planned_for_at_the_next(self, applied):
        model, manager = Keyword(), limited(1)
        with manager:
            if applied:
                manager.apply(model)
            with pytest.raises(ValueError, match="no scale"):
                model(X, scale=None)
            assert not manager.planned_bytes
            self.call(model)
        assert manager.planned_bytes
        manager.remove()

    def test_what_computed_the_input_is_left_alone(self):
        model, manager = network(), limited(1)
        weight = torch.linspace(-1, 1, 32, requires_grad=True)

        def run():
            weight.grad = None
            model.zero_grad()
            model((X * weight).exp()).square().sum().backward()
            return [weight.grad, *(p.grad.clone() for p in model.parameters())]

        expected = run()
        with manager:
            found = run()
        manager.remove()
        assert all(map(torch.equal, expected, found))

    def test_models_of_other_threads_are_left_alone(self):
        models, manager = [network() for _ in range(3)], limited(1)
        expected = step(models[0])
        found = [[] for _ in models]

        def train(number):
            for _ in range(3):
                found[number] = step(models[number])

        with manager:
            threads = [threading.Thread(target=train, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert all(all(map(torch.equal, expected, each)) for each in found)
        assert not manager.planned_bytes
        assert list(leftovers()) == []

    def test_a_model_that_is_applied_twice_is_planned_for_once(self):
        model, manager = network(), limited(1)
        expected = step(model)
        manager.apply(manager.apply(model))
        assert all(map(torch.equal, expected, step(model)))
        manager.remove()
        assert list(leftovers()) == []
