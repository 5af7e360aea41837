"""The bytes of one step of the user's own, counted while it runs.

Nothing runs twice. A meter is active from a call of the model to the end of the
backward that follows, across user code, so it lies at the bottom of torch's stack of
modes.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from recoup.backend.autograd.hook_stacks import has_infrastructure_modes
from recoup.backend.autograd.saved_tensors import follow_backward
from recoup.backend.memory.ledger import StorageLedger
from recoup.backend.state.trees import tensors_within
from recoup.core.graph import BEFORE, Graph
from recoup.measurement.steps.training_step import device_of
from recoup.measurement.tracing.live import (
    LiveMeter,
    attach_meter,
    detach_meter,
    live_meter,
)


class MeteredStep:
    """Counts the bytes of one step, from `begin` to the end of its backward.

    Args:
        model: The model; it counts with its gradients.
        batch: What it is called with.
        device: Where bytes are counted.
        ended: Called once with the peak in bytes, when backward has ended.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Iterable[Tensor],
        device: torch.device,
        ended: Callable[[int], None],
    ) -> None:
        self._meter = live_meter(device)
        self._meter.track(model, *batch)
        self._ended: Callable[[int], None] | None = ended
        self._thread = threading.get_ident()
        self._is_attached = False

    @staticmethod
    def is_possible() -> bool:
        """Return whether a step can be metered here."""
        return not has_infrastructure_modes() and not torch.compiler.is_compiling()

    @property
    def is_running(self) -> bool:
        """Whether the step has begun, and its backward has not ended."""
        return self._is_attached and self._ended is not None

    def begin(self) -> None:
        """Start to count, if that has not begun."""
        if self._is_attached:
            return
        self._is_attached = True
        attach_meter(self._meter)

    def wait_for(self, output: object) -> None:
        """Wait for the backward of a call of the step that returned this."""
        for tensor in tensors_within(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_hook(self._arrive)

    def _arrive(self, *gradients: object) -> None:
        del gradients
        if self._ended is not None:
            follow_backward(self)

    def end(self, task: int = -1) -> None:
        """Report the peak: backward is over.

        The meter stays where it is and counts nothing more: autograd restores the
        stack of modes when the last callback of a backward returns.
        """
        del task
        ended, self._ended = self._ended, None
        peak_bytes = self._meter.peak_bytes
        if isinstance(self._meter, LiveMeter):
            self._meter.is_over = True
        if ended is not None:
            ended(peak_bytes)

    def detach(self) -> bool:
        """Take the meter off the stack; return whether it is off now."""
        if self._is_attached and self._thread == threading.get_ident():
            self._is_attached = False
            self._ended = None
            if isinstance(self._meter, LiveMeter):
                self._meter.is_over = True
            detach_meter(self._meter)
        return not self._is_attached

    def __del__(self) -> None:
        # A model may be dropped in the middle of a step: nobody else would then take
        # the meter off the stack of the thread.
        self.detach()


def unseen_bytes(
    graph: Graph, model: nn.Module, found: Sequence[tuple[str, Tensor]]
) -> int:
    """Return what the measured step counts and a meter of a later step does not see.

    That is memory besides the model and its batch, as an optimizer's state. An
    accelerator's allocator sees everything.
    """
    if device_of(model).type != "cpu":
        return 0
    ledger = StorageLedger()
    ledger.add_all([*model.parameters(), *model.buffers(), *(t for _, t in found)])
    carried = {name for name, first in graph.gradients if first == BEFORE}
    carried_bytes = sum(p.nbytes for n, p in model.named_parameters() if n in carried)
    resident_bytes = min(graph.other_bytes, default=0) - carried_bytes
    return max(0, resident_bytes - ledger.live_bytes)


def expected_excess(
    step: Graph, predicted_bytes: int, peak_bytes: int, budget_bytes: int
) -> int:
    """Return what plans for a budget are expected to take beyond their prediction.

    In proportion to what one step took beyond its own.
    """
    resident_bytes = min(step.other_bytes)
    taken_bytes = max(1, peak_bytes - resident_bytes)
    share = (predicted_bytes - resident_bytes) / taken_bytes
    return max(0, int((budget_bytes - resident_bytes) * (1 - share)))
