"""Calls and steps of the user's own, metered while they run, and traced if asked for.

Nothing runs twice. The instruments are attached from a call of the model to the end of
the backward that follows, across user code.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recoup.backend.autograd.hook_stacks import has_infrastructure_modes
from recoup.backend.autograd.saved_tensors import follow_backward, hooks_refused
from recoup.backend.memory.ledger import StorageLedger
from recoup.backend.state.trees import tensors_within
from recoup.core.graph import BEFORE, Graph
from recoup.core.growth import resized
from recoup.core.plan import Place, Plan
from recoup.engine.applied.model_blocks import block_names
from recoup.engine.applied.planned_runs import Cuts
from recoup.fitting.following.call_groups import CallCase
from recoup.measurement.steps.training_step import device_of
from recoup.measurement.tracing.call_trace import CallTrace
from recoup.measurement.tracing.live import LiveStep
from recoup.measurement.tracing.observation import cuts_of

if TYPE_CHECKING:
    from recoup.fitting.following.adapted_pass import AdaptedPass


class WatchedStep:
    """Counts the bytes of one step, from `begin` to the end of its backward.

    Args:
        model: The model; it counts with its gradients.
        batch: The tensors of its arguments.
        ended: Called once with the peak in bytes, when backward has ended.
        traced: Trace the step as well, from `trace` on.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Iterable[Tensor],
        ended: Callable[[int], None],
        *,
        traced: bool = False,
    ) -> None:
        self._attach: Callable[[], LiveStep] | None = partial(
            LiveStep,
            device_of(model),
            partial(_gradients_of, weakref.ref(model)),
            traced=traced,
            resident=[*model.parameters(), *model.buffers(), *batch],
            parameters=dict(model.named_parameters()) if traced else {},
        )
        self._live: LiveStep | None = None
        self._ended: Callable[[int], None] | None = ended
        self._thread = threading.get_ident()

    @staticmethod
    def is_possible(*, traced: bool = False) -> bool:
        """Return whether a step can be metered here, or traced."""
        if has_infrastructure_modes() or torch.compiler.is_compiling():
            return False
        return not traced or hooks_refused() is None

    @property
    def has_ended(self) -> bool:
        """Whether its backward has ended."""
        return self._ended is None

    @property
    def is_running(self) -> bool:
        """Whether the instruments are attached, and its backward has not ended."""
        return self._live is not None and not self.has_ended

    def begin(self) -> None:
        """Attach the instruments, once."""
        attach, self._attach = self._attach, None
        if attach is not None:
            self._live = attach()

    def wait_for(self, output: object) -> None:
        """Wait for the backward of a call of the step that returned this."""
        if self._live is not None:
            self._live.returned()
            self._live.unfollow()  # copies of the model have none of the instruments
        for tensor in tensors_within(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_hook(self._arrive)

    def _arrive(self, *gradients: object) -> None:
        del gradients
        if not self.has_ended:
            follow_backward(self)

    def end(self, task: int = -1) -> None:
        """Report the peak: backward is over.

        The meter stays attached: autograd restores the stack of modes when the last
        callback of a backward returns.
        """
        del task
        ended, self._ended = self._ended, None
        if ended is not None and self._live is not None:
            self._live.backward_ended()
            ended(self._live.start_bytes + self._live.peak_bytes)

    def detach(self) -> bool:
        """Take the instruments off; return whether they are off now."""
        if self._live is not None and self._thread == threading.get_ident():
            self._live.finish()
            self._live = None
        return self._live is None


class StepMeter:
    """Meters the steps of a model, one at a time; a copy of it meters none.

    Attributes:
        step: The step whose instruments are attached, or will be.
    """

    def __init__(self) -> None:
        self.step: WatchedStep | None = None
        self._kind: object = None

    def __getstate__(self) -> dict[str, Any]:
        return {"step": None, "_kind": None}

    def running(self, kind: object = None) -> WatchedStep | None:
        """Return what meters the running step, if that is of this kind.

        It is the same step also if the call before has no graph any more.
        """
        step = self.step
        is_mine = step is not None and step.is_running and self._kind is kind
        return step if is_mine else None

    def stop(self) -> bool:
        """Take the instruments off; return False if the step is another thread's."""
        if self.step is not None and self.step.detach():
            self.step = None
        return self.step is None

    def begin(
        self,
        model: nn.Module,
        batch: Iterable[Tensor],
        ended: Callable[[int], None],
        *,
        kind: object = None,
    ) -> WatchedStep | None:
        """Return what is to meter the step that begins now; None: it is impossible."""
        if not self.stop() or not WatchedStep.is_possible():
            return None
        self._kind = kind
        self.step = WatchedStep(model, batch, ended)
        return self.step


class TracedStep(WatchedStep):
    """Traces the one call of a step with every block recomputed, and counts its bytes.

    What autograd saves for parameters that did not require a gradient is not in the
    graph of the measured step, so no plan for that can recompute it. Recomputing every
    block takes little memory, and later plans are made for the graph of this step.

    Args:
        model: The model that the step calls once.
        batch: The tensors of its arguments.
        arguments: The arguments as passed.
        torn: The paths of blocks at which the step is not cut; see `torn`.
        ended: Called once with the peak in bytes, when backward has ended.

    Attributes:
        cuts: The cuts that the call runs with.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Iterable[Tensor],
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
        torn: Collection[str],
        ended: Callable[[int], None],
    ) -> None:
        super().__init__(model, batch, ended, traced=True)
        self.begin()
        assert self._live is not None, "attached just now"
        self._traced = self._live
        cuts = (n for n in cuts_of(model, block_names(model)) if n not in torn)
        self.cuts = Cuts(tuple(cuts), policy=self._traced.tracer)
        self._traced.call(model, "", *arguments)

    def torn(self) -> set[str]:
        """Return the cuts where a value is about to be written over."""
        return self._traced.torn(self.cuts.modules)

    def graph(self, unseen_bytes: int) -> Graph:
        """Return the graph of the step, which has ended.

        Args:
            unseen_bytes: Other memory in use during the step.
        """
        graph = self._traced.graph(self.cuts.modules, ())
        sizes = [storage.bytes for storage in graph.storages]
        return resized(graph, sizes, added_bytes=unseen_bytes)


class CallWatch:
    """Watches one call: traces it if it is the first of its kind."""

    __slots__ = ("_adapted", "_blocks", "_case", "_metered", "_plan", "_trace")

    def __init__(
        self,
        adapted: "AdaptedPass",
        case: CallCase | None,
        plan: Plan,
        metered: WatchedStep | None = None,
    ) -> None:
        self._adapted = adapted
        self._metered = metered
        self._blocks: dict[str, CallTrace] = {}
        self._plan = plan
        self._case = case
        is_new = (
            case is not None
            and not case.group.is_traced
            and not torch.compiler.is_compiling()
        )
        self._trace = CallTrace() if is_new else None

    def begin(self) -> None:
        """Begin to trace or to count."""
        if self._metered is not None:
            self._metered.begin()
        if self._trace is not None:
            self._trace.begin()

    def end(self, output: object, order: Sequence[Place] | None) -> None:
        """Learn from the call."""
        self._end_trace()
        if output is None:
            self.cancel()
        else:
            if self._metered is not None:
                self._metered.wait_for(output)
            self._adapted.ended(
                self._case, self._plan, output, order, self._trace, self._blocks
            )

    def reach(self, block: str, *, entering: bool) -> None:
        """Trace a block that did not run in the measured step."""
        if not entering and block in self._blocks:
            self._blocks[block].end()
        elif entering and block in self._adapted.unmeasured - self._blocks.keys():
            self._blocks[block] = CallTrace()
            self._blocks[block].begin()

    def cancel(self) -> None:
        """Stop tracing and counting."""
        self._end_trace()
        if self._metered is not None:
            self._metered.detach()

    def _end_trace(self) -> None:
        for trace in reversed(self._blocks.values()):
            trace.end()
        if self._trace is not None:
            self._trace.end()


def _gradients_of(model: Callable[[], nn.Module | None]) -> list[Tensor]:
    found = model()
    parameters = () if found is None else found.parameters()
    return [p.grad for p in parameters if p.grad is not None]


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
