"""Times of operators: the least of those that are taken for one."""

import time

import torch

from recoup.backend.timers import OperatorTimer


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
