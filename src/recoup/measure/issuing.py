"""What issuing a step to an accelerator costs the host, with regions and without."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from recoup.core.footprint import total_footprint
from recoup.core.graph import Graph, Issuing
from recoup.measure.graphs import recompute_all
from recoup.measure.pace import Pace, synchronize
from recoup.measure.training import TrainingStep

STEP_BY_FORWARD = 2.5
"""How much longer a plain step keeps the host than its forward without gradients does:
2.4 times for a ResNet, 3.4 for a GPT, both of layers that compute nothing to speak of.
"""

REPLAY_BY_RECORDING = 0.5
"""What running an operator again costs at the least, by what recording one does."""

FORWARD_BY_FORWARD = 1.25
"""How much longer its forward with gradients does: 1.2 and 1.3 times for the two."""


class Calls:
    """What a model was called with in a step, and how long that kept the host.

    Args:
        count: How many calls a step has.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._arguments: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque(
            maxlen=count
        )
        self._seconds: list[float] = []
        self._started = 0.0

    @contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Take note of the calls of a model while the block runs."""
        handles = [
            model.register_forward_pre_hook(
                self._begin, prepend=True, with_kwargs=True
            ),
            model.register_forward_hook(self._end),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def host_seconds(self) -> float:
        """The least time for which all calls of one step kept the host."""
        sums = [
            sum(self._seconds[n : n + self._count])
            for n in range(0, len(self._seconds), self._count)
        ]
        return min(sums, default=0.0)

    def again(self, step: TrainingStep) -> float:
        """Call the model so again without gradients; return the host's time for it.

        Needs no memory to speak of.

        Returns:
            Infinity if the model cannot be run without gradients.
        """
        try:
            return min(self._timed_again(step) for _ in range(2))
        except RuntimeError:  # it takes gradients in its forward
            return float("inf")

    @torch.no_grad()
    def _timed_again(self, step: TrainingStep) -> float:
        step.begin()
        synchronize(step.device)
        start = time.perf_counter()
        for args, kwargs in self._arguments:
            step.model(*args, **kwargs)
        return time.perf_counter() - start

    def _begin(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._arguments.append((args, kwargs))
        self._started = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self._seconds.append(time.perf_counter() - self._started)


def issuing_of(
    graph: Graph,
    pace: Pace,
    *,
    forward_seconds: float,
    plain_forward_seconds: float,
    least_seconds: float = 0.0,
) -> Issuing:
    """Return what issuing the step costs the host.

    A plain step may not fit to be run, so its time is told by its forward without
    gradients; what a step with every block recomputed takes longer is recording, as far
    as its forward has that, and replays. These are not free, whatever that says.

    Args:
        graph: The step.
        pace: The pace of the step with every block recomputed.
        forward_seconds: The host's time in forward there.
        plain_forward_seconds: The host's time for a forward without gradients.
        least_seconds: What recording the simplest operator costs this host.
    """
    total = total_footprint(graph, recompute_all(graph))
    replayed = sum(len(replay.operations) for replay in total.replays)
    least_recording = total.recorded * least_seconds
    least_added = least_recording + replayed * least_seconds * REPLAY_BY_RECORDING
    host = pace.host_seconds
    plain = min(STEP_BY_FORWARD * plain_forward_seconds, max(0.0, host - least_added))
    added = host - plain
    recording = forward_seconds - FORWARD_BY_FORWARD * plain_forward_seconds
    recording = min(max(recording, least_recording), added)
    return Issuing(
        plain_seconds=plain,
        recording_seconds=recording / max(1, total.recorded),
        replaying_seconds=(added - recording) / max(1, replayed),
    )


def adjusted(
    issuing: Issuing, predicted_seconds: float, found_seconds: float
) -> Issuing:
    """Return what issuing costs if a plan kept the host for another time than thought.

    What recording and replays add is taken to be wrong by one factor.

    Args:
        issuing: What was thought.
        predicted_seconds: What the plan was predicted to keep the host for by it.
        found_seconds: What it did.

    Examples:
        >>> adjusted(Issuing(4.0, 1.0, 0.5), predicted_seconds=6.0, found_seconds=7.0)
        Issuing(plain_seconds=4.0, recording_seconds=1.5, replaying_seconds=0.75)
    """
    added = predicted_seconds - issuing.plain_seconds
    if added <= 0:
        return issuing
    factor = max(0.0, found_seconds - issuing.plain_seconds) / added
    return Issuing(
        issuing.plain_seconds,
        issuing.recording_seconds * factor,
        issuing.replaying_seconds * factor,
    )
