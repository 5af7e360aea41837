"""The dry step: observed on tensors without memory, its times worked out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.operators.fakes import NEEDS_CONTENTS, FakeMeter, Shadows
from recoup.core.device_figures import Figures
from recoup.core.graph import Graph
from recoup.errors import RecoupError, UnsupportedError
from recoup.measurement.steps.training_step import training_step, untouched
from recoup.measurement.timing.host_cost import recording_seconds
from recoup.measurement.timing.roofline import Roofline
from recoup.measurement.tracing.observation import observe

_HOST = torch.device("cpu")


def measure_dry(
    model: nn.Module,
    batch: Any = None,
    *,
    figures: Figures,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    names: Sequence[str] | None = None,
) -> Graph:
    """Return the graph of a step that is not computed.

    The step runs twice on stand-ins for the model's tensors and the batch's, which have
    shapes and no memory. The model has its own tensors again afterwards.

    Raises:
        UnsupportedError: What the step does depends on numbers in its tensors.
    """
    training_step(model, batch, loss=loss, step=step)
    # With a busy accelerator, recording does not add to the time of the step.
    recording = recording_seconds() if figures.name == "cpu" else 0.0
    shadows = Shadows(_HOST)
    given = shadows.of_batch(batch)
    with shadows.instead_of(model), _explained(), shadows.mode:
        stood_in = training_step(model, given, loss=loss, step=step)
        with untouched(stood_in) as repeated:
            graph = observe(
                repeated,
                FakeMeter,
                lambda: Roofline(figures),
                recording_seconds=recording,
                names=names,
            ).graph
    return graph.map_passes(
        lambda each: replace(
            each,
            link_bytes_per_second=figures.link_bytes_per_second,
            estimated_for=figures.name,
        )
    )


@contextmanager
def _explained() -> Iterator[None]:
    """Say of errors inside the block what they have to do with dry measurement."""
    try:
        yield
    except NEEDS_CONTENTS as error:
        asked = getattr(error, "func", None)
        raise UnsupportedError(
            "this step cannot be measured dry: what it does depends on the numbers in "
            f"its tensors{f', which {asked} looks at' if asked else ''}. Measure it "
            "for real, on any machine where one step at the least memory fits: leave "
            "out dry=True."
        ) from error
    except RecoupError:
        raise
    except Exception as error:
        error.add_note(
            "This happened in a dry measurement, in which tensors have shapes but no "
            "contents: see whether the step runs without dry=True."
        )
        raise
