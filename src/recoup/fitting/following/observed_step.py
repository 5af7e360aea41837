"""One step of the user's own that trains other parameters: traced while it runs.

What autograd saves for parameters that did not require a gradient is not in the graph
of the measured step, so no plan for that can recompute it. The step runs with every
block recomputed, which takes little memory, and its graph is what later plans are for.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.autograd.saved_tensors import follow_backward
from recoup.backend.state.trees import tensors_within
from recoup.core.graph import Graph
from recoup.core.growth import resized
from recoup.engine.applied.model_blocks import block_names
from recoup.engine.applied.planned_runs import Cuts
from recoup.measurement.steps.training_step import device_of
from recoup.measurement.tracing.live import LiveStep
from recoup.measurement.tracing.observation import cuts_of


class ObservedStep:
    """Instruments on one step, from construction to `finish`.

    Args:
        model: The model that the step calls once.
        batch: What it is called with.
        arguments: The same, as they were passed.
        torn: The paths of blocks at which the step is not cut; see `torn`.
        ended: Called once with the peak in bytes, when backward has ended.

    Attributes:
        cuts: What the call runs with.
        is_running: Its backward has not ended.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Iterable[Tensor],
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
        torn: Collection[str],
        ended: Callable[[int], None],
    ) -> None:
        self._ended = ended
        self._thread = threading.get_ident()
        self.is_running = True
        resident = [*model.parameters(), *model.buffers(), *batch]
        self._live = LiveStep(
            device_of(model),
            partial(_gradients_of, weakref.ref(model)),
            traced=True,
            resident=resident,
            parameters=dict(model.named_parameters()),
        )
        cuts = (n for n in cuts_of(model, block_names(model)) if n not in torn)
        self.cuts = Cuts(tuple(cuts), policy=self._live.tracer)
        self._live.call(model, "", *arguments)

    @staticmethod
    def is_possible() -> bool:
        """Return whether a step can be observed here."""
        return LiveStep.is_possible() and not torch.compiler.is_compiling()

    def begin(self) -> None:
        """Do nothing: the instruments are attached."""

    def wait_for(self, output: object) -> None:
        """Wait for the backward of the call that returned this."""
        self._live.returned()
        self._live.unfollow()  # copies of the model have none of the instruments
        for tensor in tensors_within(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_hook(self._arrive)

    def _arrive(self, *gradients: object) -> None:
        del gradients
        if self.is_running:
            follow_backward(self)

    def end(self, task: int = -1) -> None:
        """Report the peak: backward is over."""
        del task
        if self.is_running:
            self.is_running = False
            self._live.backward_ended()
            self._ended(self._live.start_bytes + self._live.peak_bytes)

    def detach(self) -> bool:
        """Take the instruments off; return whether they are off now."""
        if self._thread != threading.get_ident():
            return False
        self._live.finish()
        return True

    def torn(self) -> set[str]:
        """Return the cuts where a value is about to be written over."""
        return self._live.torn(self.cuts.modules)

    def graph(self, unseen_bytes: int) -> Graph:
        """Return the graph of the step, which has ended.

        Args:
            unseen_bytes: What else is in memory during the step.
        """
        graph = self._live.graph(self.cuts.modules, ())
        sizes = [storage.bytes for storage in graph.storages]
        return resized(graph, sizes, added_bytes=unseen_bytes)


def _gradients_of(model: Callable[[], nn.Module | None]) -> list[Tensor]:
    found = model()
    parameters = () if found is None else found.parameters()
    return [p.grad for p in parameters if p.grad is not None]
