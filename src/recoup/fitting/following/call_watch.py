"""What watches one call of a fitted model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from recoup.core.plan import Place, Plan
from recoup.fitting.following.call_groups import CallCase
from recoup.fitting.following.watched_step import WatchedStep
from recoup.measurement.tracing.call_trace import CallTrace

if TYPE_CHECKING:
    from recoup.fitting.following.adapted_pass import AdaptedPass


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
