"""The scaler: torch's arithmetic within bounds, and the outcome of every step."""

import copy
import logging
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recoup import GradientScaler
from recoup.backend.operators.dispatch import OperatorMode
from recoup.errors import UsageError


class Problem:
    """One weight with a given gradient."""

    def __init__(self, **options) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5, **options)

    def iterate(self, scaler, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        scaler.scale((self.weight * factor).sum()).backward()
        scaler.step(self.optimizer)
        scaler.update()


def trace(scaler, factors) -> list[float]:
    problem, scales = Problem(), []
    for factor in factors:
        problem.iterate(scaler, factor)
        scales.append(scaler.get_scale())
    return scales


def test_it_is_a_torch_scaler_with_the_defaults_of_the_original_guide():
    scaler = GradientScaler()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.get_scale() == 65536
    assert scaler.get_growth_interval() == 2000
    assert scaler.get_growth_factor() == 2
    assert scaler.get_backoff_factor() == 0.5
    assert (scaler.min_scale, scaler.max_scale) == (1.0, 2.0**32)


@given(
    overflows=st.lists(st.booleans(), max_size=40),
    interval=st.integers(1, 4),
    exponent=st.integers(0, 32),
)
def test_the_scale_follows_torch_except_at_the_bounds(overflows, interval, exponent):
    options = {"init_scale": 2.0**exponent, "growth_interval": interval}
    ours = GradientScaler("cpu", **options)
    theirs = torch.amp.GradScaler("cpu", **options)
    one, other = Problem(), Problem()
    inside = True
    for overflow in overflows:
        factor = math.inf if overflow else 1.0
        one.iterate(ours, factor)
        other.iterate(theirs, factor)
        bounded = min(max(theirs.get_scale(), 1.0), 2.0**32)
        inside = inside and bounded == theirs.get_scale()
        if inside:
            assert ours.get_scale() == theirs.get_scale()
        assert 1.0 <= ours.get_scale() <= 2.0**32
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
        # What the host believes is what the device has.
        assert ours.known_scale == ours.get_scale()
    if inside:
        assert torch.equal(one.weight, other.weight)


@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=30),
    growth=st.floats(1.01, 1e6),
    backoff=st.floats(1e-6, 0.99),
    bounds=st.tuples(st.floats(1e-30, 1.0), st.floats(1.0, 3e38)),
)
def test_the_host_knows_the_scale_for_any_factors(overflows, growth, backoff, bounds):
    scaler = GradientScaler(
        "cpu", 1.0, growth, backoff, 2, min_scale=bounds[0], max_scale=bounds[1]
    )
    problem = Problem()
    for overflow in overflows:
        problem.iterate(scaler, math.inf if overflow else 0.0)
        assert scaler.known_scale == scaler.get_scale()
        copied = GradientScaler("cpu")
        copied.load_state_dict(scaler.state_dict())
        assert copied.known_scale == scaler.known_scale
    scaler.update(1.0)
    assert scaler.known_scale == scaler.get_scale() == 1.0


def test_the_host_does_not_know_the_decision_of_a_fused_optimizer():
    scaler, problem = GradientScaler("cpu", 4.0, growth_interval=1), Problem(fused=True)
    assert scaler.known_scale == 4.0
    problem.iterate(scaler)
    assert scaler.known_scale is None
    assert scaler.get_scale() == 8.0


def test_the_scale_falls_for_gradients_that_were_checked_and_not_used():
    # Two optimizers, one of which is unscaled, found to overflow, and not stepped.
    scaler, one, other = GradientScaler("cpu", 8.0), Problem(), Problem()
    scaler.scale(one.weight.sum()).backward()
    scaler.scale((other.weight * math.inf).sum()).backward()
    scaler.unscale_(other.optimizer)
    scaler.step(one.optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert scaler.known_scale in (None, 4.0)
    assert scaler.skipped_updates == 1


def test_160_overflows_in_a_row_and_then_recovery():
    ours = GradientScaler("cpu", growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", growth_interval=2)
    assert trace(theirs, [math.inf] * 160)[-1] == 2.0**-144
    assert trace(ours, [math.inf] * 160)[-1] == 1.0
    assert trace(ours, [1.0] * 10)[-1] == 2.0**5
    # Six more, and torch's is 0, from which it never recovers.
    assert trace(theirs, [math.inf] * 6)[-1] == 0.0
    assert trace(theirs, [1.0] * 10)[-1] == 0.0


def test_growth_stops_at_the_maximum():
    scaler = GradientScaler("cpu", init_scale=2.0**30, growth_interval=1)
    scales = trace(scaler, [1e-20] * 5)
    assert scales == [2.0**31, 2.0**32, 2.0**32, 2.0**32, 2.0**32]


def test_growth_happens_exactly_at_the_interval_and_an_overflow_resets_it():
    scaler = GradientScaler("cpu", init_scale=8.0, growth_interval=3)
    inf = math.inf
    assert trace(scaler, [1, 1, inf, 1, 1, 1, 1]) == [8, 8, 4, 4, 4, 8, 8]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_every_kind_of_nonfinite_gradient_is_skipped(value):
    scaler, problem = GradientScaler("cpu"), Problem(momentum=0.9)
    problem.iterate(scaler)
    before = copy.deepcopy(problem.optimizer.state_dict()), problem.weight.clone()
    problem.iterate(scaler, value)
    assert scaler.step_was_skipped()
    assert torch.equal(problem.weight, before[1])
    state, known = problem.optimizer.state_dict()["state"], before[0]["state"]
    assert torch.equal(state[0]["momentum_buffer"], known[0]["momentum_buffer"])
    problem.iterate(scaler)
    assert not scaler.step_was_skipped(problem.optimizer)


def test_sparse_gradients_are_checked():
    for bad in (False, True):
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        scaler = GradientScaler("cpu", init_scale=2.0)
        loss = (table(torch.tensor([1, 1])) * (math.inf if bad else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        assert scaler.step_was_skipped() is bad


def test_gradients_without_elements_are_finite():
    weight = nn.Parameter(torch.ones(0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradientScaler("cpu")
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.step_was_skipped()


def test_a_static_scale_stays_and_steps_are_still_skipped():
    scaler, problem = (
        GradientScaler("cpu", init_scale=1024.0, dynamic=False, growth_interval=1),
        Problem(),
    )
    problem.iterate(scaler)
    moved = problem.weight.detach().clone()
    problem.iterate(scaler, math.inf)
    assert scaler.step_was_skipped()
    assert torch.equal(problem.weight, moved)
    assert scaler.get_scale() == 1024.0
    assert (scaler.total_updates, scaler.skipped_updates) == (2, 1)


def test_statistics_begin_at_zero_and_count_every_iteration():
    scaler = GradientScaler("cpu")
    assert (scaler.total_updates, scaler.skipped_updates) == (0, 0)
    assert scaler.overflow_rate == 0.0
    trace(scaler, [math.inf] * 3)
    assert scaler.overflow_rate == 1.0
    trace(scaler, [1.0])
    assert scaler.overflow_rate == 0.75


def test_two_optimizers_are_distinguished():
    scaler, good, bad = GradientScaler("cpu"), Problem(), Problem()
    loss = good.weight.sum() + (bad.weight * math.inf).sum()
    scaler.scale(loss).backward()
    scaler.step(bad.optimizer)
    scaler.step(good.optimizer)
    scaler.update()
    assert scaler.step_was_skipped(bad.optimizer)
    assert not scaler.step_was_skipped(good.optimizer)
    assert scaler.step_was_skipped()
    assert scaler.skipped_updates == 1


def test_an_optimizer_of_an_earlier_iteration_is_refused():
    scaler, first, second = GradientScaler("cpu"), Problem(), Problem()
    first.iterate(scaler, math.inf)
    second.iterate(scaler)
    assert not scaler.step_was_skipped()
    with pytest.raises(UsageError, match="taken none of that optimizer"):
        scaler.step_was_skipped(first.optimizer)


@pytest.mark.parametrize("unscale", [False, True])
def test_step_was_skipped_works_with_a_fused_optimizer(unscale):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = GradientScaler("cpu", init_scale=4.0)
    answers, weights = [], []
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        answers.append(scaler.step_was_skipped())
        weights.append(weight.detach().clone())
    assert answers == [False, True, False]
    assert torch.equal(weights[0], weights[1])
    assert scaler.skipped_updates == 1
    assert scaler.get_scale() == 2.0


def test_fused_overflows_are_counted_without_reads_in_between():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = GradientScaler("cpu")
    for factor in (math.inf, 1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.total_updates, scaler.skipped_updates) == (4, 2)


class Reads(OperatorMode):
    """Count the operators that copy a number to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
def test_it_reads_from_the_device_as_often_as_the_scaler_of_torch(fused):
    counts = []
    for kind in (torch.amp.GradScaler, GradientScaler):
        problem, scaler = Problem(fused=fused), kind("cpu")
        with Reads() as reads:
            for _ in range(5):
                problem.iterate(scaler)
        counts.append(reads.count)
    assert counts[0] == counts[1] == (0 if fused else 5)


def test_overflows_are_logged_a_limited_number_of_times(caplog):
    scaler = GradientScaler("cpu", init_scale=8.0)
    with caplog.at_level(logging.WARNING, logger="recoup.precision"):
        trace(scaler, [math.inf] * 4)
        assert caplog.messages[:2] == [
            "Gradient overflow detected. Reducing scale to 4",
            "Gradient overflow detected. Reducing scale to 2",
        ]
        assert "at its minimum of 1" in caplog.messages[2]
        trace(scaler, [math.inf] * 996)
    assert len(caplog.messages) == 10 + 10


def test_a_finite_step_logs_nothing(caplog):
    trace(GradientScaler("cpu"), [1.0] * 3)
    assert caplog.messages == []


def test_the_state_round_trips():
    scaler = GradientScaler("cpu", growth_interval=3, min_scale=2.0, max_scale=2.0**20)
    trace(scaler, [1.0, math.inf, 1.0])
    other = GradientScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert trace(other, [1.0] * 3) == trace(scaler, [1.0] * 3)


def test_a_state_of_torch_is_loaded_and_clamped():
    theirs = torch.amp.GradScaler("cpu")
    trace(theirs, [math.inf] * 170)
    for started in (False, True):
        ours = GradientScaler("cpu")
        if started:
            trace(ours, [1.0])
        ours.load_state_dict(theirs.state_dict())
        assert ours.get_scale() == 1.0


def test_the_scaler_of_torch_loads_our_state():
    ours, theirs = GradientScaler("cpu"), torch.amp.GradScaler("cpu")
    trace(ours, [math.inf])
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == 32768.0


def test_it_is_copied_and_pickled_between_iterations():
    scaler = GradientScaler("cpu")
    trace(scaler, [math.inf, 1.0])
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == scaler.state_dict()
        assert trace(other, [math.inf]) == [16384.0]


def test_missing_gradients_are_reported():
    scaler, problem = GradientScaler("cpu"), Problem()
    scaler.scale(torch.ones(()))
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(UsageError, match="no gradients"):
            call(problem.optimizer)
    # Nothing is left behind: the same scaler goes on.
    problem.iterate(scaler)
    assert not scaler.step_was_skipped()


def test_parameters_in_float16_are_refused():
    layer = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = GradientScaler("cpu")
    scaler.scale(layer(torch.ones(1, 2).half()).sum()).backward()
    with pytest.raises(UsageError, match="keep the parameters in float32"):
        scaler.unscale_(optimizer)


def test_a_fused_optimizer_may_have_parameters_in_float16_as_in_torch():
    # It divides by the scale itself, in float32.
    ends = []
    for kind in (torch.amp.GradScaler, GradientScaler):
        torch.manual_seed(0)
        layer = nn.Linear(2, 2).half()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, fused=True)
        scaler = kind("cpu", 8.0)
        scaler.scale(layer(torch.ones(1, 2).half()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        ends.append(layer.weight)
    assert torch.equal(*ends)


def test_a_closure_is_refused_by_position_and_by_name():
    scaler, problem = GradientScaler("cpu"), Problem()
    scaler.scale(problem.weight.sum()).backward()
    for args, kwargs in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
        with pytest.raises(UsageError, match="takes no closure"):
            scaler.step(problem.optimizer, *args, **kwargs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_of_none_is_accepted(fused):
    problem = Problem(fused=fused)
    scaler = GradientScaler("cpu")
    for args, kwargs in (((None,), {}), ((), {"closure": None})):
        before = problem.weight.detach().clone()
        scaler.scale(problem.weight.sum()).backward()
        scaler.step(problem.optimizer, *args, **kwargs)
        scaler.update()
        assert not torch.equal(problem.weight, before)


def test_a_nan_scale_is_refused():
    scaler = GradientScaler("cpu")
    state = scaler.state_dict()
    with pytest.raises(UsageError, match="not a number"):
        scaler.load_state_dict({**state, "scale": math.nan, "growth_interval": 7})
    assert scaler.state_dict() == state


def test_an_update_without_a_step_is_refused():
    scaler = GradientScaler("cpu")
    with pytest.raises(UsageError, match="found no scaled gradients"):
        scaler.update()
    scaler.scale(torch.ones(()))
    with pytest.raises(UsageError, match="found no scaled gradients"):
        scaler.update()
    with pytest.raises(UsageError, match="taken none"):
        scaler.step_was_skipped()


def test_a_scale_set_by_hand_must_be_within_the_bounds():
    scaler, problem = GradientScaler("cpu"), Problem()
    problem.iterate(scaler)
    scaler.update(16)
    assert scaler.get_scale() == 16.0
    with pytest.raises(UsageError, match="between finite bounds"):
        scaler.update(0.5)
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor(0.25))
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0.5},
        {"init_scale": math.nan},
        {"init_scale": 2.0**33},
        {"min_scale": 0.0},
        {"max_scale": math.inf},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
    ],
)
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(UsageError):
        GradientScaler("cpu", **options)


def test_a_missing_device_is_refused_unless_disabled():
    with pytest.raises(UsageError, match="no such device here"):
        GradientScaler("xpu")
    assert not GradientScaler("xpu", enabled=False).is_enabled()


def test_a_disabled_scaler_does_nothing():
    scaler, problem = GradientScaler("cpu", enabled=False), Problem()
    problem.iterate(scaler)
    assert torch.equal(problem.weight, torch.full((3,), 0.5))
    assert not scaler.step_was_skipped()
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


def test_float16_training_uses_it_on_every_device(device):
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradientScaler(device.type)
    losses = []
    x = torch.randn(16, 8, device=device)
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = (model(x) - x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert scaler.total_updates == 30


@pytest.mark.parametrize("interval", [2, 5, 9])
def test_progress_is_loaded_without_settings_and_growth_continues(interval):
    scaler = GradientScaler("cpu", 8.0, growth_interval=20, max_scale=64.0)
    problem = Problem()
    for number in range(7):
        problem.iterate(scaler, math.inf if number == 2 else 1.0)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 4)
    other = GradientScaler("cpu", 32.0, growth_interval=interval, backoff_factor=0.25)
    settings = {"growth_interval": interval, "backoff_factor": 0.25, "max_scale": 2**32}
    other.load_progress(scaler.state_dict())
    assert other.state_dict().items() >= settings.items()
    assert (other.get_scale(), other.total_updates, other.skipped_updates) == (4, 7, 1)
    # Good steps of before count; as many as suffice now make it grow at the next one.
    for _ in range(max(1, interval - 4)):
        assert other.get_scale() == 4.0
        problem.iterate(other)
    assert other.get_scale() == 8.0
