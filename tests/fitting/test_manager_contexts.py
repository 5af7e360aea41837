"""Contexts of managers: nested, on several threads, and of several managers."""

import copy
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from recoup import CheckpointProfiler
from recoup.errors import BudgetWarning
from tests.fitting.test_manager import added_bytes, limited, network, step


def hooks_of_all_modules():
    hooks = torch.nn.modules.module
    return len(hooks._global_forward_pre_hooks) + len(hooks._global_forward_hooks)


class TestContexts:
    def test_a_context_that_is_entered_again_ends_with_the_outermost(self):
        model, manager = network(), limited(1)
        expected = step(model)
        with manager:
            with manager:
                pass
            assert all(map(torch.equal, expected, step(model)))
            assert manager.planned_bytes
        assert hooks_of_all_modules() == 0
        manager.remove()

    def test_a_context_inside_a_model_takes_its_layers_for_no_models(self):
        manager = limited(1)

        class Inside(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = network()

            def forward(self, x):
                with manager:
                    return self.layers(x)

        model = Inside()
        manager.auto_checkpoint = False
        expected = step(model)
        manager.auto_checkpoint = True
        with manager:
            assert all(map(torch.equal, expected, step(model)))
            assert [step.models for step in manager.steps] == [("Inside",)]
        manager.remove()

    def test_a_context_on_several_threads_ends_with_the_last(self):
        models, manager = [network() for _ in range(3)], limited(1)
        expected = step(models[0])
        found = [[] for _ in models]
        together = threading.Barrier(len(models))

        def train(number):
            with manager:
                together.wait()
                for _ in range(3):
                    found[number] = step(models[number])
                together.wait()

        threads = [threading.Thread(target=train, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(all(map(torch.equal, expected, each)) for each in found)
        assert len(manager._managed) == 3
        assert hooks_of_all_modules() == 0
        manager.remove()

    def test_a_removed_manager_watches_no_more(self):
        model, manager = network(), limited(1)
        with manager, manager:
            manager.remove()
            assert hooks_of_all_modules() == 0
            step(model)
        assert not manager.planned_bytes
        assert hooks_of_all_modules() == 0

    def test_of_nested_managers_the_innermost_chooses(self):
        model, outer, inner = network(), limited(2), limited(1)
        expected = step(model)
        with outer, inner:
            for _ in range(2):
                assert all(map(torch.equal, expected, step(model)))
            assert added_bytes(model) <= inner.budget_bytes
        assert inner.planned_bytes
        with outer:
            with pytest.warns(BudgetWarning, match="another Checkpoint") as caught:
                step(model)
            step(model)
        assert len(caught) == 1
        assert caught[0].filename.endswith("test_manager.py"), "where it is called"
        assert not outer.planned_bytes
        inner.remove()
        with outer:
            step(model)
        assert outer.planned_bytes
        outer.remove()

    def test_a_model_that_waits_for_another_manager_is_chosen_for_once(self):
        model, first, second = network(), limited(1), limited(1)
        expected = step(model)
        first.apply(model)
        with second, pytest.warns(BudgetWarning, match="another CheckpointManager"):
            assert all(map(torch.equal, expected, step(model)))
        assert (first.planned_bytes > 0) + (second.planned_bytes > 0) == 1
        first.remove()
        second.remove()

    @pytest.mark.parametrize("copied", [False, True])
    def test_the_next_manager_plans_for_a_model_whose_manager_is_gone(self, copied):
        model = network()
        expected = step(model)
        with limited(2):
            for _ in range(2):
                step(model)
        if copied:
            model = copy.deepcopy(model)
        for _ in range(2):
            with limited(1) as manager:
                for _ in range(3):
                    assert all(map(torch.equal, expected, step(model)))
                assert added_bytes(model) <= manager.budget_bytes
            [planned] = manager.steps
            assert planned.budget_bytes == manager.budget_bytes

    def test_a_model_is_not_kept_alive(self):
        model, manager = network(), limited(1)
        with manager:
            step(model)
        model = weakref.ref(model)
        assert model() is None
        other = network()
        with manager:
            step(other)
        assert len(manager._managed) == 1
        manager.remove()

    def test_a_planned_model_can_be_copied(self):
        model, manager = network(), limited(1)
        expected = step(model)
        with manager:
            step(model)
        twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        manager.remove()
        for each in (twin, stored):
            with CheckpointProfiler() as profiler:
                assert all(map(torch.equal, expected, step(each)))
            assert profiler.checkpoint_count() > 0
