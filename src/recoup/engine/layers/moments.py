"""Moments: how generators and autocast stood, to run layers again as they ran then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from recoup.backend.autograd.autocast import AutocastState, autocast_as, autocast_states
from recoup.backend.compiler.recognition import original_of
from recoup.backend.state.global_generators import (
    RandomStates,
    random_states,
    restore_random_states,
)
from recoup.backend.state.rng import devices_in_use
from recoup.backend.state.snapshots import buffers_restored
from recoup.core.restoring import restoring


@dataclass(frozen=True, slots=True)
class Moment:
    """How Python's, NumPy's and torch's generators, and autocast, stood at one moment.

    Costs some thirty kilobytes, and as many microseconds to take one.

    Examples:
        >>> moment = Moment.now()
        >>> first = torch.rand(3)
        >>> with moment.again():
        ...     second = torch.rand(3)
        >>> torch.equal(first, second), torch.equal(first, torch.rand(3))
        (True, False)
    """

    devices: tuple[torch.device, ...]
    random: RandomStates
    autocast: tuple[AutocastState, ...]

    @classmethod
    def now(cls) -> Self:
        """Take note of how things stand."""
        devices = tuple(devices_in_use())
        return cls(
            devices=devices,
            random=random_states(*devices),
            autocast=autocast_states({device.type for device in devices}),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the block as at that moment, then put generators back as they are."""
        now = random_states(*self.devices)
        with (
            restoring(partial(restore_random_states, now, *self.devices)),
            autocast_as(self.autocast),
        ):
            restore_random_states(self.random, *self.devices)
            yield


@contextmanager
def leaving_no_trace(
    function: Callable[..., Any], moment: Moment | None
) -> Iterator[None]:
    """Run a function in the block as at a moment; put back what it moves on.

    These are the generators and the buffers of the modules that the function refers
    to. The buffers begin as they are now: what they were then is not kept.

    Args:
        function: What the block calls.
        moment: When it was called before; by default it draws numbers as if now.
    """
    functions = (function, original_of(function))
    with buffers_restored(*functions), (moment or Moment.now()).again():
        yield
