"""Calls of a fitted model and their steps, watched while they run."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recoup.backend.memory.ledger import StorageLedger, tensor_bytes
from recoup.core.graph import BEFORE, Graph
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


class StepMeter:
    """Meters the steps of a model, one at a time; a copy of it meters none.

    Attributes:
        step: The step whose instruments are attached.
    """

    def __init__(self) -> None:
        self.step: LiveStep | None = None
        self._kind: object = None

    def __getstate__(self) -> dict[str, Any]:
        return {"step": None, "_kind": None}

    def running(self, kind: object = None) -> LiveStep | None:
        """Return what meters the running step, if that is of this kind.

        It is the same step also if the call before has no graph any more.
        """
        step = self.step
        is_mine = step is not None and step.is_running and self._kind is kind
        return step if is_mine else None

    def stop(self) -> bool:
        """Take the instruments off; return False if the step is another thread's."""
        if self.step is not None and self.step.finish():
            self.step = None
        return self.step is None

    def begin(
        self,
        model: nn.Module,
        batch: Iterable[Tensor],
        ended: Callable[[int], None],
        *,
        kind: object = None,
    ) -> LiveStep | None:
        """Return the meter of the step that begins now; None: it is impossible."""
        if not self.stop() or not LiveStep.is_possible():
            return None
        self._kind = kind
        self.step = LiveStep.of_model(model, batch, ended)
        return self.step


def observe_step(
    model: nn.Module,
    batch: Iterable[Tensor],
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    torn: Collection[str],
    ended: Callable[[int], None],
) -> tuple[LiveStep, Cuts]:
    """Trace the call that begins now with every block recomputed, but for torn ones.

    The graph of the measured step lacks the values that autograd saves for parameters
    unfrozen since, so no plan for it can recompute them. Recomputing every block takes
    little memory, and later plans are made for the graph of this step.
    """
    live = LiveStep.of_model(model, batch, ended, traced=True)
    names = (n for n in cuts_of(model, block_names(model)) if n not in torn)
    live.call(model, "", *arguments)
    return live, Cuts(tuple(names), policy=live.tracer)


class CallWatch:
    """Watches one call: traces it if it is the first of its kind."""

    __slots__ = ("_adapted", "_blocks", "_case", "_metered", "_plan", "_trace")

    def __init__(
        self,
        adapted: "AdaptedPass",
        case: CallCase | None,
        plan: Plan,
        metered: LiveStep | None = None,
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
        """Begin to trace."""
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
            self._metered.finish()

    def _end_trace(self) -> None:
        for trace in reversed(self._blocks.values()):
            trace.end()
        if self._trace is not None:
            self._trace.end()


def unseen_bytes(
    graph: Graph, model: nn.Module, found: Sequence[tuple[str, Tensor]]
) -> int:
    """Return the bytes that the measured step counts and later meters do not.

    That is memory besides the model and its batch, as an optimizer's state. An
    accelerator's allocator sees everything.
    """
    if device_of(model).type != "cpu":
        return 0
    ledger = StorageLedger()
    ledger.add_all([*model.parameters(), *model.buffers(), *(t for _, t in found)])
    carried = {name for name, first in graph.gradients if first == BEFORE}
    carried_bytes = sum(
        tensor_bytes(parameter)
        for name, parameter in model.named_parameters()
        if name in carried
    )
    resident_bytes = min(graph.other_bytes, default=0) - carried_bytes
    return max(0, resident_bytes - ledger.live_bytes)


def expected_excess(
    step: Graph, predicted_bytes: int, peak_bytes: int, budget_bytes: int
) -> int:
    """Return the bytes by which plans are expected to exceed their prediction.

    In proportion to the excess of one measured step.
    """
    resident_bytes = min(step.other_bytes)
    taken_bytes = max(1, peak_bytes - resident_bytes)
    share = (predicted_bytes - resident_bytes) / taken_bytes
    return max(0, int((budget_bytes - resident_bytes) * (1 - share)))
