"""What issuing a step to an accelerator costs the host, with regions and without."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from recoup.core.footprint import total_footprint
from recoup.core.graph import Graph, Issuing
from recoup.core.restoring import removing
from recoup.core.segments import Segment
from recoup.measurement.steps.training_step import TrainingStep
from recoup.measurement.timing.pace import Pace, synchronize
from recoup.measurement.timing.recording_cost import RECORDING_BY_LEAST
from recoup.measurement.tracing.graphs import recompute_all

STEP_BY_FORWARD = 2.5
"""How much longer a plain step keeps the host than its forward without gradients does:
1.7 times for a ResNet-50 beside an H200, 2.0 for a DenseNet-121, 4.7 for a mixture of
experts, which waits for the device on the way."""

REPLAY_BY_FORWARD = 1.5
"""How much longer it takes to run an operator again than in a forward without
gradients: 1.2 times for that ResNet, 1.6 for the DenseNet."""


class Calls:
    """What a model was called with in a step.

    Args:
        count: How many calls a step has.
    """

    def __init__(self, count: int) -> None:
        self._arguments: deque[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = (
            deque(maxlen=count)
        )

    @contextmanager
    def noted(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Record the calls of models while the block runs."""
        with removing() as handles:
            for model in models:
                register = partial(model.register_forward_pre_hook, prepend=True)
                handles.append(register(self._note, with_kwargs=True))
            yield

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
        for model, args, kwargs in list(self._arguments):
            model(*args, **kwargs)
        return time.perf_counter() - start

    def _note(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._arguments.append((model, args, kwargs))


class Work(NamedTuple):
    """What a plan gives the host to do beside a plain step: how many operators."""

    recorded: int
    replayed: int

    @classmethod
    def of(cls, graph: Graph, segments: Sequence[Segment]) -> "Work":
        """Count it."""
        total = total_footprint(graph, segments)
        replayed = sum(len(replay.operations) for replay in total.replays)
        return cls(total.recorded, replayed)


def issuing_of(
    graph: Graph,
    pace: Pace,
    *,
    plain_forward_seconds: float,
    least_seconds: float = 0.0,
) -> Issuing:
    """Return what issuing the step costs the host.

    A plain step may not fit to be run, so its time is told by its forward without
    gradients, and so is that of an operator that is run again. What a step with every
    block recomputed takes longer than both is recording: in forward, and where backward
    asks for what was recorded. A host that is not waited for may itself wait, for room
    in the device's queue: then it records in no more than the usual time.

    Args:
        graph: The step.
        pace: The pace of the step with every block recomputed.
        plain_forward_seconds: The host's time for a forward without gradients.
        least_seconds: What recording the simplest operator costs this host: no other
            one takes less, whatever the times say.
    """
    work = Work.of(graph, recompute_all(graph))
    host = pace.host_seconds
    forward = min(plain_forward_seconds, host / STEP_BY_FORWARD)
    again = REPLAY_BY_FORWARD * forward / max(1, len(graph.operations))
    least = Issuing(0.0, least_seconds, again).seconds(*work)
    plain = min(STEP_BY_FORWARD * forward, max(0.0, host - least))
    added = host - plain
    least_recording = min(work.recorded * least_seconds, added)
    recording = max(least_recording, added - work.replayed * again)
    replaying = added - recording
    if not pace.is_bound_by_host:
        recording = min(recording, RECORDING_BY_LEAST * least_recording)
    return Issuing(
        plain_seconds=plain,
        recording_seconds=recording / max(1, work.recorded),
        replaying_seconds=replaying / max(1, work.replayed),
    )


def learned(thought: float, pace: Pace) -> float:
    """Return by which factor the host takes longer than was thought.

    A host that issues one plan slower than thought is taken to be slower at everything.
    One that is not waited for is known to be no slower than it was seen to be.

    Args:
        thought: What the host was thought to take for a plan.
        pace: Its pace.

    Examples:
        >>> learned(2.0, Pace(seconds=4.0, host_seconds=4.0))
        2.0
        >>> learned(2.0, Pace(seconds=8.0, host_seconds=4.0))
        1.0
    """
    if not thought or (not pace.is_bound_by_host and thought <= pace.host_seconds):
        return 1.0
    return pace.host_seconds / thought
