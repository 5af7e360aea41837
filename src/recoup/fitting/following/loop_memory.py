"""Memory that a training loop keeps: open graphs, earlier gradients, outputs."""

import threading
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from recoup.backend.autograd.saved_tensors import current_backward
from recoup.backend.memory.storages import StorageWatch, watches_of
from recoup.backend.state.model_state import StateReader
from recoup.backend.state.trees import tensors_within
from recoup.core.plan import Plan
from recoup.core.simulation import Kept, LoopKept
from recoup.core.units import print_bytes

GRADIENTS = "gradients"
OUTPUT = "output"

_MOST_CHECKED = 256
"""So many different combinations are remembered, to be checked once."""

_NOTHING = (0, 0, 0, 0, 0)


def reasons_of(kept: LoopKept) -> dict[str, str]:
    """Return in words what a loop keeps, by kind."""
    found: dict[str, str] = {}
    gradient_bytes = max(sum(part.gradients.values()) for part in kept)
    other_bytes = max(part.other_bytes for part in kept)
    if gradient_bytes:
        where = "backward" if kept.backward.gradients else "forward"
        found[GRADIENTS] = (
            f"gradients of earlier steps during {where} ({print_bytes(gradient_bytes)})"
        )
    if other_bytes:
        where = "backward" if kept.backward.other_bytes else "the next forward"
        found[OUTPUT] = (
            f"an output that is referenced during {where} ({print_bytes(other_bytes)})"
        )
    return found


def advice_for(kept: LoopKept) -> str:
    """Return what to do so that a loop keeps no more than the measured step."""
    found: list[str] = []
    if kept.backward.gradients:
        found.append(
            "call recoup.fit with accumulate=True if you accumulate gradients, "
            "otherwise zero_grad(set_to_none=True) before forward"
        )
    elif kept.call.gradients:
        found.append("call zero_grad(set_to_none=True) before forward")
    if any(part.other_bytes for part in kept):
        found.append(
            "keep only the loss (`del output` before backward), or call recoup.fit "
            "with step= a function that keeps the output"
        )
    return "; ".join(found)


class LoopMemory:
    """What the training loop keeps from call to call, seen at the start of backward.

    While `recoup.fit` measures, it learns which outputs the measured step keeps. From
    `finish_measuring` on it reports other kept memory. In each step it looks at
    a few parameters and at the outputs, however many parameters there are.

    Args:
        check: Compares what a call needs with the budget: its case, its plan, and what
            is kept.
    """

    def __init__(self, check: Callable[[Any, Plan, LoopKept], None]) -> None:
        self._check = check
        self._open: WeakValueDictionary[int, _Call] = WeakValueDictionary()
        self._numbers = 0
        self._is_measuring = True
        self._measured_outputs: set[int] = set()
        self._measured_previous: set[int] = set()
        self._previous: list[StorageWatch] = []
        self._task = -1
        self._checked: dict[object, Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: it has no open calls."""
        state: dict[str, Any] = {**vars(self), "_previous": [], "_checked": {}}
        del state["_open"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy."""
        vars(self).update(state, _open=WeakValueDictionary())

    def finish_measuring(self) -> None:
        """Report from now on what the measured step did not keep."""
        self._is_measuring = False
        self._previous = []

    def forget(self) -> None:
        """Check everything again: the plan has changed."""
        self._checked.clear()

    def open_calls(self) -> int:
        """Return how many calls of this thread wait for their backward."""
        return len(self._calls_of(threading.get_ident())) if self._open else 0

    def _calls_of(self, thread: int) -> list["_Call"]:
        return [call for call in list(self._open.values()) if call.thread == thread]

    def opened(
        self,
        case: Any,
        plan: Plan,
        output: object,
        reader: StateReader | None,
        *,
        is_measured_plan: bool,
    ) -> None:
        """Wait for the backward of a call."""
        found = tensors_within(output)
        nodes = [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]
        if not nodes:
            return
        previous: dict[int, StorageWatch] = {}
        if self._previous and not self.open_calls():
            previous = {n: one for n, one in enumerate(self._previous) if one.is_alive}
        self._numbers += 1
        call = _Call(
            self,
            self._numbers,
            case,
            plan,
            reader,
            is_measured_plan,
            watches_of(found),
            previous,
        )
        self._open[self._numbers] = call
        for node in nodes:
            node.register_hook(call.arrive)

    def backward_began(self, call: "_Call") -> None:
        """Look at what the loop keeps, once in each backward."""
        calls = self._calls_of(call.thread)
        if self._open.pop(call.number, None) is None:
            return
        task, self._task = self._task, current_backward()
        if task == self._task or call.reader is None:
            return
        outputs = self._previous = [watch for each in calls for watch in each.outputs]
        alive = {
            number: watch
            for number, watch in enumerate(outputs)
            # Another plan than the measured one may keep the output's memory itself.
            if watch.is_alive and (call.is_measured_plan or watch.is_referenced)
        }
        first = calls[0]
        if self._is_measuring:
            self._measured_outputs.update(alive)
            self._measured_previous.update(first.previous)
            return
        previous_bytes = remaining_bytes = output_bytes = 0
        for number, watch in first.previous.items():
            if number not in self._measured_previous:
                previous_bytes += watch.nbytes
                remaining_bytes += watch.nbytes if watch.is_alive else 0
        for number, watch in alive.items():
            if number not in self._measured_outputs:
                output_bytes += watch.nbytes
        seen = (
            first.carried,
            call.reader.carries_gradients(),
            previous_bytes,
            remaining_bytes,
            output_bytes,
        )
        if seen == _NOTHING:
            return
        key = (id(call.case), *seen)
        if self._checked.get(key) is call.plan:
            return
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        self._checked[key] = call.plan
        self._check(call.case, call.plan, _kept(call.reader, *seen))


def _kept(
    reader: StateReader,
    in_forward: int,
    in_backward: int,
    previous_bytes: int,
    remaining_bytes: int,
    output_bytes: int,
) -> LoopKept:
    now = reader.gradient_bytes() if in_backward else {}
    then = dict[str, int]()
    if in_forward:
        # Gradients that were dropped since then had the sizes of the parameters.
        then = now or reader.trained_bytes()
    return LoopKept(
        Kept(then, previous_bytes),
        Kept(then, remaining_bytes),
        Kept(now, remaining_bytes + output_bytes),
    )


class _Call:
    """A call of the model whose backward is to come; the graph keeps it alive."""

    def __init__(  # noqa: PLR0913 (what is known of a call)
        self,
        memory: LoopMemory,
        number: int,
        case: Any,
        plan: Plan,
        reader: StateReader | None,
        is_measured_plan: bool,  # noqa: FBT001
        outputs: list[StorageWatch],
        previous: dict[int, StorageWatch],
    ) -> None:
        # A graph that the user keeps does not keep the model.
        self._memory = weakref.ref(memory)
        self.number, self.case, self.plan, self.reader = number, case, plan, reader
        self.is_measured_plan = is_measured_plan
        self.outputs, self.previous = outputs, previous
        self.carried = 0 if reader is None else reader.carries_gradients()
        self.thread = threading.get_ident()

    def arrive(self, *gradients: object) -> None:
        """Close the call: backward has reached it."""
        del gradients
        memory = self._memory()
        if memory is not None:
            memory.backward_began(self)
