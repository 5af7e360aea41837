"""Environment: what is around steps when they are run again.

Autocast and random state are as forward had them; buffers of modules stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recoup.backend.autograd.autocast import autocast_as, autocast_states
from recoup.backend.state.rng import default_states, same_state
from recoup.backend.state.walk import reach

RandomStates = list[tuple[torch.Generator, Tensor]]


class Environment:
    """What a loop found around it.

    Args:
        leaves: Leaves of the state, whose devices matter.
        function: What is run; generators that it sees are put back with torch's own.

    Attributes:
        draws: Whether the steps draw random numbers; True until it is known.
    """

    def __init__(self, leaves: list[Any], function: Any = None) -> None:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        self._devices = [d for d in devices if d.type not in ("cpu", "meta")]
        states = autocast_states({device.type for device in self._devices})
        # Each tape casts weights for itself; a cache would hold the graph of another.
        self._autocast = tuple(replace(state, cache=False) for state in states)
        self._casts = any(state.enabled for state in states)
        self._own: list[torch.Generator] = reach(function, kind=torch.Generator)
        self._begin = self._states()
        self.draws = True

    def settle(self) -> None:
        """Find out, after the first sweep, whether the steps drew random numbers."""
        now = self._states()
        self.draws = not all(
            same_state(before, after)
            for (_, before), (_, after) in zip(self._begin, now, strict=True)
        )
        if not self.draws:
            self._begin = []

    def random_states(self) -> RandomStates | None:
        """Return the states to come back to, if that matters."""
        return self._states() if self.draws else None

    def _states(self) -> RandomStates:
        own = [(generator, generator.get_state()) for generator in self._own]
        return default_states(self._devices) + own

    def rewind(self, states: RandomStates | None) -> None:
        """Come back to earlier states; by default to those at the beginning."""
        if self.draws:
            for generator, state in self._begin if states is None else states:
                generator.set_state(state)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Run the block under the autocast of forward."""
        if not self._casts and not torch.is_autocast_enabled("cpu"):
            yield
            return
        with autocast_as(self._autocast):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the block as forward ran; leave the generators as they are now."""
        before = self.random_states()
        try:
            with self.casting():
                yield
        finally:
            for generator, state in before or ():
                generator.set_state(state)
