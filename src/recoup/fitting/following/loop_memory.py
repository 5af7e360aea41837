"""Memory that a training loop keeps: open graphs, earlier gradients, outputs."""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
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
"""The most combinations that are remembered, so that each is checked once."""


def reasons_of(kept: LoopKept) -> dict[str, str]:
    """Return the memory that a loop keeps in words, by kind."""
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


class EarlierOutputs:
    """Outputs of passes whose backward has begun, as long as their memory exists.

    All passes of a step share one: in each of them the memory counts that the loop
    keeps of any earlier one.

    Attributes:
        watches: Those that were alive when last looked at, by address.
    """

    def __init__(self) -> None:
        self.watches: dict[int, StorageWatch] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has made no outputs."""
        return {"watches": {}}

    def add(self, outputs: Iterable[StorageWatch]) -> None:
        """Watch the outputs of one more pass."""
        for watch in outputs:
            self.watches.setdefault(watch.address, watch)

    def alive(self) -> dict[int, StorageWatch]:
        """Return those whose memory exists; looks at each that is kept."""
        known = list(self.watches.items())  # another thread may add some
        self.watches = {n: one for n, one in known if one.is_alive}
        return dict(self.watches)

    def clear(self) -> None:
        """Forget all."""
        self.watches = {}


class LoopMemory:
    """The memory that the training loop keeps, seen at the start of backward.

    While `recoup.fit` measures, it learns which outputs the measured step keeps. From
    `finish_measuring` on it reports other kept memory. In each step it looks at
    a few parameters and at the outputs that the loop keeps, at a cost that does not
    depend on the number of parameters.

    Args:
        check: Function that compares the needs of a call (its case, its plan, the kept
            memory) with the budget. Returns the bytes that may be kept in addition, or
            None if nothing more is to be checked.

    Attributes:
        earlier: The outputs of earlier passes.
    """

    def __init__(self, check: Callable[[Any, Plan, LoopKept], int | None]) -> None:
        self._check = check
        self.earlier = EarlierOutputs()
        self._open: WeakValueDictionary[int, _Call] = WeakValueDictionary()
        self._numbers = 0
        self._is_measuring = True
        self._measured_outputs: set[int] = set()
        self._measured_previous_bytes = 0
        self._measured_remaining_bytes = 0
        self._task = -1
        self._checked: dict[object, tuple[Plan, _Bytes | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no open calls."""
        state: dict[str, Any] = {**vars(self), "_checked": {}}
        del state["_open"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy."""
        vars(self).update(state, _open=WeakValueDictionary())

    def finish_measuring(self) -> None:
        """Report from now on memory that the measured step did not keep."""
        self._is_measuring = False
        self.earlier.clear()

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
        previous: Mapping[int, StorageWatch] = {}
        if self.earlier.watches and not self.open_calls():
            previous = self.earlier.alive()
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
        """Check the memory that the loop keeps, once in each backward."""
        calls = self._calls_of(call.thread)
        if self._open.pop(call.number, None) is None:
            return
        task, self._task = self._task, current_backward()
        if task == self._task or call.reader is None:
            return
        outputs = [watch for each in calls for watch in each.outputs]
        alive = {
            number: watch
            for number, watch in enumerate(outputs)
            # Another plan than the measured one may keep the output's memory itself.
            if watch.is_alive and (call.is_measured_plan or watch.is_referenced)
        }
        first = calls[0]
        self.earlier.add(outputs)
        previous_bytes = _bytes_of(first.previous.values())
        remaining_bytes = _bytes_of(w for w in first.previous.values() if w.is_alive)
        if self._is_measuring:
            self._measured_outputs.update(alive)
            known = self._measured_previous_bytes, self._measured_remaining_bytes
            self._measured_previous_bytes = max(known[0], previous_bytes)
            self._measured_remaining_bytes = max(known[1], remaining_bytes)
            return
        kept = _Bytes(
            max(0, previous_bytes - self._measured_previous_bytes),
            max(0, remaining_bytes - self._measured_remaining_bytes),
            _bytes_of(
                watch
                for number, watch in alive.items()
                if number not in self._measured_outputs
                and watch.address not in first.previous
            ),
        )
        self._compare(call, first.carried, kept)

    def _compare(self, call: "_Call", carried: int, kept: "_Bytes") -> None:
        """Compare the loop's memory with the budget, unless it is known to fit."""
        assert call.reader is not None, "there is none before the first call"
        carries = call.reader.carries_gradients()
        if not (carried or carries or any(kept)):
            return
        key = (id(call.case), carried, carries)
        plan, most = self._checked.get(key, (None, None))
        if plan is call.plan and (most is None or kept.is_within(most)):
            return
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        # Also if the warning is an error, it is said once.
        self._checked[key] = (call.plan, None)
        room_bytes = self._check(
            call.case, call.plan, _kept(call.reader, carried, carries, kept)
        )
        if room_bytes is not None:
            self._checked[key] = (call.plan, kept.grown(room_bytes))


class _Bytes(NamedTuple):
    """The bytes of outputs that a loop keeps and the measured step did not.

    Attributes:
        previous: Of earlier passes, during the first call.
        remaining: Of those, from the start of backward.
        own: Of the pass itself, during its backward.
    """

    previous: int
    remaining: int
    own: int

    def is_within(self, most: "_Bytes") -> bool:
        """Return whether no part of a step has more to keep than in another one."""
        return (
            self.previous <= most.previous
            and self.remaining <= most.remaining
            and self.remaining + self.own <= most.remaining + most.own
        )

    def grown(self, nbytes: int) -> "_Bytes":
        """Return these bytes with `nbytes` more in each part of a step."""
        return _Bytes(self.previous + nbytes, self.remaining + nbytes, self.own)


def _bytes_of(watches: Iterable[StorageWatch]) -> int:
    return sum(watch.nbytes for watch in watches)


def _kept(
    reader: StateReader,
    in_forward: int,
    in_backward: int,
    kept: _Bytes,
) -> LoopKept:
    now = reader.gradient_bytes() if in_backward else {}
    then = dict[str, int]()
    if in_forward:
        # Gradients that were dropped since then had the sizes of the parameters.
        then = now or reader.trained_bytes()
    return LoopKept(
        Kept(then, kept.previous),
        Kept(then, kept.remaining),
        Kept(now, kept.remaining + kept.own),
    )


class _Call:
    """A call of the model whose backward is to come; the graph keeps it alive."""

    def __init__(  # noqa: PLR0913 (the properties of a call)
        self,
        memory: LoopMemory,
        number: int,
        case: Any,
        plan: Plan,
        reader: StateReader | None,
        is_measured_plan: bool,  # noqa: FBT001
        outputs: list[StorageWatch],
        previous: Mapping[int, StorageWatch],
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
