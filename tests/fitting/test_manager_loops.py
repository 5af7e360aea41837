"""Laws of managed loops: bitwise, within the budget or warned, nothing run twice."""

# A gradient is maybe None to pyright.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import dataclasses
import gc
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from recoup import CheckpointManager, CheckpointScope, keep
from recoup.backend.memory.meters import StorageMeter
from recoup.errors import BudgetWarning, UsageError
from recoup.fitting.managing.managed_steps import ManagedStep
from tests.fitting.test_manager import MEBIBYTE, X, limited, network, step
from tests.support.counting import Operators
from tests.support.managed_loops import KINDS, loop_of
from tests.support.twin import leftovers

STEPS = 6


def managed(budget_bytes, **options):
    """Return a manager with a budget in bytes."""
    mebibytes = max(1, math.ceil(budget_bytes / MEBIBYTE))
    share = budget_bytes / (mebibytes * MEBIBYTE)
    return CheckpointManager(
        max_memory_mb=mebibytes, memory_threshold=share, auto_checkpoint=True, **options
    )


def train(loop, manager=None):
    """Return the peak of each step, as a meter around the whole loop sees it."""
    peaks = []
    with StorageMeter() as meter:
        meter.track(*loop.models, *loop.batches)
        before = meter.live_bytes
        for number in range(STEPS):
            meter.reset_peak()
            if manager is None:
                loop.step(number)
            else:
                with manager:
                    loop.step(number)
            peaks.append(meter.peak_bytes - before)
    return peaks


@pytest.mark.parametrize(("seed", "share"), [(0, 0.8), (1, 0.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_is_bitwise_the_plain_one_and_within_its_budget_or_warned(
    kind, seed, share
):
    plain = loop_of(kind, seed)
    plain_peaks = train(plain)
    expected = plain.state()
    loop = loop_of(kind, seed)
    manager = managed(int(share * max(plain_peaks)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peaks = train(loop, manager)
        planned_bytes = manager.planned_bytes
    manager.remove()
    assert all(map(torch.equal, expected, loop.state()))
    assert max(peaks) <= manager.budget_bytes or caught
    # Once it is learnt, what was planned for the step is what it takes at most.
    assert max(peaks[-2:]) <= max(manager.budget_bytes, planned_bytes)
    assert list(leftovers()) == []


class Counting(nn.Module):
    """Counts its calls; the loss is outside of it."""

    def __init__(self):
        super().__init__()
        self.layers = network()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


class TestObserving:
    @pytest.mark.parametrize("has_backward", [True, False])
    def test_a_manager_that_is_dropped_within_a_step_leaves_nothing(self, has_backward):
        def begin_a_step():
            model = network()
            with limited(1, 0.9):
                loss = model(X).square().sum()
            if has_backward:
                loss.backward()
            assert list(leftovers()) != []  # no optimizer and no further call so far

        begin_a_step()
        gc.collect()
        assert list(leftovers()) == []

    @pytest.mark.parametrize("applied", [False, True])
    def test_the_model_runs_once_in_each_step(self, applied):
        model, manager = Counting(), limited(1, 0.9)
        if applied:
            manager.apply(model)
        for number in range(3):
            if applied:
                step(model)
            else:
                with manager:
                    step(model)
            assert model.calls == number + 1
        manager.remove()

    def test_forward_runs_no_operator_twice(self):
        model, manager = network(), limited(1)
        with Operators() as plain:
            model(X)
        with manager, Operators() as observed:
            loss = model(X).square().sum()
        loss.backward()
        manager.remove()
        assert observed.counts["addmm"] == plain.counts["addmm"] == 12
        assert observed.counts["tanh"] == plain.counts["tanh"] == 6

    def test_a_loss_outside_the_model_counts(self):
        torch.manual_seed(0)
        model = nn.Sequential(network(8), nn.Linear(32, 400))
        target = torch.zeros(len(X), dtype=torch.long)

        def run():
            model.zero_grad()
            with StorageMeter() as meter:
                functional.cross_entropy(model(X), target).backward()
            return meter.peak_bytes

        plain_bytes = run()
        manager = managed(plain_bytes - 400_000)
        with manager:
            peaks = [run() for _ in range(3)]
        [seen] = manager.steps
        manager.remove()
        assert seen.plain_bytes == plain_bytes
        assert seen.measured_bytes is not None
        assert max(peaks) <= manager.budget_bytes
        assert peaks[-1] <= seen.measured_bytes <= seen.planned_bytes

    def test_backward_may_come_after_the_context(self):
        model, manager = network(), limited(1, 0.9)
        expected = step(model)
        for _ in range(3):
            model.zero_grad()
            with manager:
                output = model(X)
            output.square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        measured_bytes = manager.steps[0].measured_bytes
        assert measured_bytes is not None
        assert measured_bytes <= manager.budget_bytes
        manager.remove()
        assert all(map(torch.equal, expected, found))
        assert list(leftovers()) == []

    def test_modes_and_hooks_of_the_user_may_end_in_the_middle_of_it(self):
        model, manager = network(), limited(1, 0.9)
        expected = step(model)
        seen = []
        manager.apply(model)
        for _ in range(3):
            model.zero_grad()
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t: seen.append(t.shape) or t, lambda t: t
            )
            with FlopCounterMode(display=False) as around:
                with hooks:
                    x = X.clone().requires_grad_().exp().log()
                output = model(x)
                with hooks:
                    loss = output.square().sum()
            assert around.get_total_flops() > 0
            loss.backward()
        manager.remove()
        assert len(seen) == 9
        assert list(leftovers()) == []
        assert len(expected) == len(list(model.parameters()))

    def test_a_write_that_autograd_refuses_is_refused_in_the_observed_step(self):
        model, manager = network(2), limited(4)
        manager.apply(model)
        scale = torch.ones(32, requires_grad=True)
        output = model(X)
        loss = (output * scale).exp()
        loss.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()
        manager.remove()

    def test_a_step_above_its_budget_says_what_it_needs_once(self):
        model = network()
        manager = managed(100_000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                with manager:
                    step(model)
            needed = manager.planned_bytes
        manager.remove()
        assert len(caught) == 1
        assert "does not fit into 97.66 KiB" in str(caught[0].message)
        assert needed > manager.budget_bytes


class TestReports:
    def test_a_step_is_plain_data_and_printable(self):
        found = ManagedStep(("GPT",), 8 << 20, 12 << 20, 7 << 20, 6 << 20, 0.25)
        assert str(found) == (
            "GPT: planned 7 MiB of 8 MiB, measured 6 MiB, plain 12 MiB; recomputes 25%"
        )
        assert found.fits
        assert not dataclasses.replace(found, measured_bytes=9 << 20).fits
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.measured_bytes = 0  # pyright: ignore[reportAttributeAccessIssue]

    def test_before_the_first_step_there_is_nothing_to_report(self):
        manager = limited(1)
        assert manager.steps == ()
        assert (manager.planned_bytes, manager.measured_bytes) == (0, None)


def regions_in(manager, model):
    model.zero_grad()
    loss = model(X).square().sum()
    count = len(manager.nodes)
    loss.backward()
    return count


class TestSwitches:
    def test_the_very_next_call_obeys_each_of_them(self):
        model, manager = network(), limited(4)
        with manager:
            step(model)
            assert regions_in(manager, model) == 0
            manager.max_memory_mb = 1
            assert regions_in(manager, model) > 0
            manager.auto_checkpoint = False
            assert regions_in(manager, model) == 0
            manager.auto_checkpoint = True
            assert regions_in(manager, model) > 0
            manager.max_memory_mb, manager.memory_threshold = 8, 0.125
            assert regions_in(manager, model) > 0
            manager.memory_threshold = 1.0
            assert regions_in(manager, model) == 0
        manager.remove()

    def test_a_lower_budget_is_kept_by_the_very_next_step(self):
        model, manager = network(), limited(4)
        with manager:
            step(model)
            step(model)
            manager.max_memory_mb = 1
            with StorageMeter() as meter:
                step(model)
        manager.remove()
        copies = sum(p.nbytes for p in model.parameters())
        assert meter.peak_bytes <= manager.budget_bytes + copies

    @pytest.mark.parametrize("ratio", [0, -1, True, "1"])
    def test_a_cap_on_recomputation_is_above_zero(self, ratio):
        with pytest.raises(UsageError, match="max_recompute_ratio above 0"):
            CheckpointManager(max_recompute_ratio=ratio)

    def test_a_cap_comes_before_the_budget(self):
        model = network()
        for cap in (None, 0.5, 0.2):
            manager = managed(750_000, max_recompute_ratio=cap)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    with manager:
                        step(model)
            [seen] = manager.steps
            manager.remove()
            assert cap is None or seen.recompute_ratio <= cap
            assert cap is None or seen.planned_bytes > manager.budget_bytes
            assert bool(caught) or seen.fits

    def test_with_a_cap_no_operator_is_recomputed_twice(self):
        model = network(8)
        manager = managed(300_000, max_recompute_ratio=5.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            for _ in range(3):
                with manager:
                    step(model)
            model.zero_grad()
            with manager, Operators() as plain:
                loss = model(X).square().sum()
            forward = len(plain.names)
            regions: list[Any] = [node.region for node in manager.nodes]
            loss.backward()
            manager.remove()
        assert regions
        assert all(region.replays == 1 for region in regions)
        assert sum(region.replayed_operators for region in regions) <= forward


class TestTheUsersOwn:
    def test_scopes_inside_the_model_are_counted(self):
        class Scoped(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = network(8)

            def forward(self, x):
                for number, each in enumerate(self.layers):
                    if number % 3:
                        x = each(x)
                        continue
                    with CheckpointScope("mine"):
                        x = each(x)
                return x

        torch.manual_seed(0)
        model, plain_bytes = Scoped(), 0
        for share in (1.0, 0.9, 0.85):
            manager = managed(int(share * plain_bytes) if plain_bytes else 1 << 30)
            with manager:
                peaks = []
                for _ in range(3):
                    model.zero_grad()
                    with StorageMeter() as meter:
                        model(X).square().sum().backward()
                    peaks.append(meter.peak_bytes)
            manager.remove()
            plain_bytes = plain_bytes or peaks[-1]
            assert peaks[-1] <= manager.budget_bytes

    def test_a_mark_wins_over_the_plan(self):
        class Marked(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = network(8)

            def forward(self, x):
                for number, each in enumerate(self.layers):
                    x = each(x)
                    if number == 3:
                        x = keep(x)
                        self.kept = x.untyped_storage().data_ptr()
                return x

        model, manager = Marked(), managed(700_000)
        with manager, warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            step(model)
            step(model)
            model.zero_grad()
            output = model(X)
            held = [
                tensor.untyped_storage().data_ptr()
                for node in manager.nodes
                for tensor in node.saved_activations
            ]
            output.square().sum().backward()
        manager.remove()
        assert model.kept in held
