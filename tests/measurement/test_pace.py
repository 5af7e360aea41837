"""The pace of a step: laps of a device, and what the host takes to issue one."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recoup.backend.operators.timers import Laps
from recoup.measurement.steps.training_step import training_step
from recoup.measurement.timing import pace
from recoup.measurement.timing.pace import Pace, judged, pace_of, usual


class Issued:
    """A device that takes note of when it is waited for, and of what it is given."""

    type = "elsewhere"

    def __init__(self) -> None:
        self.given: list[str] = []


class Clock:
    """A clock that moves only when somebody sleeps by it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    return clock


def test_beside_a_device_steps_are_timed_in_a_row_after_one_that_does_not_count(
    monkeypatch,
):
    device = Issued()

    class Counted(Laps):
        def mark(self) -> None:
            device.given.append("mark")

        def seconds(self) -> list[float]:
            device.given.append("wait")
            return [0.3, 0.2]

    monkeypatch.setattr(pace, "Laps", Counted)
    step = training_step(nn.Linear(2, 2), torch.ones(1, 2), loss=torch.sum)

    def run() -> None:
        device.given.append("run")

    assert pace.pace_of(replace(step, run=run, device=device)).seconds == 0.2
    assert device.given == ["run", "mark"] * 3 + ["wait"]


@pytest.mark.parametrize(
    ("lap", "expected"),
    [
        (10.0, 10.0),  # the device is busy: it does not notice what lies between
        (0.055, 0.03),  # it waits for the host, and for that too
    ],
)
def test_putting_a_step_back_is_no_part_of_it(monkeypatch, clock, lap, expected):
    class Known(Laps):
        def mark(self) -> None: ...

        def seconds(self) -> list[float]:
            return [lap, lap]

    class Slow:
        def begin(self, *, waiting: bool) -> None:
            clock.sleep(0.025)

    monkeypatch.setattr(pace, "Laps", Known)
    step = training_step(nn.Linear(2, 2), torch.ones(1, 2), loss=torch.sum)
    step = replace(
        step, run=lambda: clock.sleep(0.03), device=Issued(), repetition=Slow()
    )
    found = pace_of(step)
    assert found.host_seconds == pytest.approx(0.03)
    assert found.seconds == pytest.approx(expected)


def test_on_the_cpu_host_and_device_are_one(clock):
    naps = iter([0.03, 0.01, 0.02])
    step = training_step(nn.Linear(2, 2), torch.ones(1, 2), loss=torch.sum)
    step = replace(step, run=lambda: clock.sleep(next(naps)))
    found = pace_of(step, repeats=3)
    assert found.seconds == found.host_seconds
    assert found.seconds == pytest.approx(0.01)
    assert found.is_bound_by_host


def test_a_device_that_works_longer_than_the_host_is_not_bound_by_it():
    assert not Pace(1.0, 0.5).is_bound_by_host
    assert Pace(1.0, 0.98).is_bound_by_host


@given(
    host=st.lists(st.floats(0.1, 1), min_size=3, max_size=5),
    between=st.floats(0, 0.1),
    device=st.floats(0.05, 5),
)
def test_a_pace_is_the_slower_of_both_and_no_more_than_was_seen(host, between, device):
    laps = [max(device, seconds + between) for seconds in host[1:]]
    found = judged(laps, host, [between] * len(host))
    assert found.host_seconds <= found.seconds <= max(laps) * (1 + 1e-9)
    assert found.seconds >= min(host[1:])
    if not found.is_bound_by_host:
        assert found.seconds == min(laps)
    if device > 1.05 * (max(host) + between):
        assert found == Pace(device, min(host))
    if max(host) < 1.3 * min(host) and device < min(host):
        assert found.is_bound_by_host


def test_one_slow_run_of_the_host_does_not_make_the_device_slow():
    assert judged([0.16, 0.13], [0.12, 0.15, 0.125], [0.005] * 3).is_bound_by_host


@given(
    times=st.lists(st.floats(0.1, 1), min_size=2, max_size=9),
    expected=st.floats(0.05, 2),
)
def test_an_expectation_moves_as_far_as_times_contradict_it(times, expected):
    found = usual(times, expected)
    middle = usual(times)
    rounding = 1e-12
    assert min(times) - rounding <= found <= max(times) + rounding
    within_a_quarter = (len(times) - 1) / 4 + 1
    if found > expected:
        assert sum(each < found - rounding for each in times) <= within_a_quarter
        assert found <= middle + rounding
    elif found < expected:
        assert sum(each > found + rounding for each in times) <= within_a_quarter
        assert found >= middle - rounding


def test_times_that_agree_say_more_than_what_was_expected():
    assert usual([0.3] * 5, expected=0.2) == 0.3
    assert usual([0.3], expected=0.2) == 0.3


def test_a_host_that_varies_does_not_correct_what_lies_among_its_times():
    host = [0.12, 0.15, 0.12, 0.18, 0.13]
    laps = [each + 0.005 for each in host[1:]]
    assert judged(laps, host, [0.005] * 5, 0.14) == Pace(0.14, 0.14)
    assert judged(laps, host, [0.005] * 5, 0.30).seconds == pytest.approx(0.1575)
    assert judged(laps, host, [0.005] * 5).seconds == pytest.approx(0.14)
