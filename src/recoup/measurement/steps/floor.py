"""The measured step: traced at floor memory, with every block recomputed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from recoup.backend.memory.meters import device_meter
from recoup.backend.memory.streams import link_bytes_per_second
from recoup.backend.operators.fingerprints import fingerprints_within
from recoup.backend.operators.timers import OperatorTimer
from recoup.backend.state.trees import tensors
from recoup.core.graph import Graph
from recoup.engine.applied.planned_runs import Cuts
from recoup.errors import UsageError
from recoup.measurement.steps.training_step import TrainingStep
from recoup.measurement.timing.host_cost import (
    Calls,
    calibrated,
    issued,
    least_recording_seconds,
    recording_seconds,
)
from recoup.measurement.timing.pace import pace_of, seconds_of
from recoup.measurement.tracing.observation import cut, observe


@dataclass(frozen=True, slots=True)
class Cost:
    """The measured cost of one real step.

    Attributes:
        peak_bytes: The most bytes in use at any moment.
        seconds: Its duration, until the device had finished.
    """

    peak_bytes: int
    seconds: float


def run_step(step: TrainingStep, *, resident: Sequence[object] = ()) -> Cost:
    """Run a step once and return its cost.

    The run starts without gradients, or with zero ones if the step accumulates. On a
    device without an allocator that counts, a dispatch mode measures the peak, which
    makes the step slower.
    """
    step.begin()
    with device_meter(step.device) as meter:
        meter.track(*step.resident(), *tensors(list(resident)))
        seconds = seconds_of(step.run, step.device)
        peak_bytes = meter.peak_bytes
    step.drop_gradients()
    return Cost(peak_bytes, seconds)


@contextmanager
def verifying_within(
    budget_bytes: int, step: TrainingStep, *, resident: Sequence[object] = ()
) -> Iterator[None]:
    """Limit the memory of verification to the free part of the budget in the block.

    Fingerprints need workspace in proportion to their tensor, or little if little is
    free. The live bytes are read for each fingerprint.
    """
    with device_meter(step.device) as meter:
        meter.track(*step.resident(), *tensors(list(resident)))
        with fingerprints_within(lambda: budget_bytes - meter.live_bytes):
            yield


def measure_floor(
    step: TrainingStep,
    *,
    names: Sequence[str] | None = None,
    resident: Sequence[object] = (),
) -> Graph:
    """Run a step in which every block is recomputed, and return its graph.

    Runs the step four times: once to warm up, once traced, twice timed. On an
    accelerator also once more, and twice the model's forward without gradients.

    Raises:
        UsageError: A named block does not exist, the step does not call the model, or
            the model has no memory.
    """
    if any(parameter.is_meta for parameter in step.model.parameters()):
        raise UsageError(
            "expected a model on a device that computes, got one on the meta device; "
            "move it to a real one, or measure it dry: recoup.measure(..., dry=True)."
        )
    is_host = step.device.type == "cpu"
    graph, cuts, model_calls = observe(
        step,
        lambda: device_meter(step.device),
        lambda: OperatorTimer(step.device),
        recording_seconds=recording_seconds() if is_host else 0.0,
        names=names,
        resident=resident,
    )
    calls = Calls(model_calls)
    roots = {name for each in graph.passes for name in each.roots}
    with (
        cut(step, Cuts(cuts)),
        calls.noted([step.model.get_submodule(name) for name in sorted(roots)]),
    ):
        pace = pace_of(step)
    link = link_bytes_per_second(step.device)
    graph = graph.map_passes(lambda each: replace(each, link_bytes_per_second=link))
    if is_host:
        return calibrated(graph, pace.seconds)
    return issued(
        graph,
        pace,
        plain_forward_seconds=calls.again(step),
        least_seconds=least_recording_seconds(),
    )
