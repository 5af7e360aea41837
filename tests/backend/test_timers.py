"""Times of operators: the least of those that are taken for one."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recoup.backend.operators.timers import REPEATS, Latency, OperatorTimer


def test_what_is_joined_takes_the_least_time_of_all(device):
    timer = OperatorTimer(device)
    x = torch.ones(10, device=device)

    def sleep(seconds: float) -> int:
        return timer.time(lambda: (time.sleep(seconds), x + 1))

    _ = x + 1
    slow, other, fast = sleep(0.05), sleep(0.05), sleep(0.0)
    assert min(timer.seconds(slow), timer.seconds(other)) > timer.seconds(fast)
    timer.join(slow, fast)
    timer.join(slow, other)
    assert timer.seconds(slow) == timer.seconds(fast)
    assert timer.seconds(other) > timer.seconds(fast)


@pytest.mark.parametrize("repeats", [1, REPEATS])
@given(
    once=st.floats(0, 1),
    more=st.floats(0, 3),
    found=st.floats(0, 100),
    longer=st.floats(0, 1),
)
def test_an_operator_between_events_that_are_further_apart_took_no_less(
    repeats, once, more, found, longer
):
    latency = Latency(once, once + more)
    less = latency.busy_seconds(found, repeats)
    took = latency.busy_seconds(found + longer, repeats)
    assert took >= less - 1e-9
    # Nothing jumps: at most twice as much more as the events are further apart.
    assert took - less <= 2 * longer / repeats + 1e-9


@pytest.mark.cuda
def test_kernels_of_an_idle_device_take_what_they_take_on_a_busy_one():
    device = torch.device("cuda")
    x = torch.ones(1 << 26, device=device)
    few = x[:8]
    timer = OperatorTimer(device)
    for tensor in (x, few):  # in place: new memory would take its time
        tensor.mul_(1)
    torch.cuda.synchronize()
    alone = timer.time(lambda: x.mul_(1))
    small = timer.time(lambda: few.mul_(1))
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _ = x @ x
    start.record()
    for _ in range(20):
        x.mul_(1)
    stop.record()
    stop.synchronize()
    busy_seconds = start.elapsed_time(stop) / 1000 / 20
    assert timer.seconds(alone) == pytest.approx(busy_seconds, rel=0.15)
    assert timer.seconds(small) < 1e-5
