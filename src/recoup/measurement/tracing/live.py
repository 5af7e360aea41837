"""Observe the user's own step while it runs: its bytes, and optionally its trace.

Nothing runs twice. The instruments stay attached from the first call of a model to the
end of its backward, across user code. So they are at the bottom of torch's stacks,
below modes and hooks that the user enters and leaves meanwhile.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from recoup.backend.autograd.hook_stacks import (
    enter_at_bottom,
    has_infrastructure_modes,
    leave_anywhere,
)
from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    current_backward,
    follow_backward,
    hooks_refused,
)
from recoup.backend.memory.ledger import storages_in
from recoup.backend.memory.meters import MemoryMeter, StorageMeter, device_meter
from recoup.backend.operators.timers import OperatorTimer, Timer
from recoup.backend.state.trees import tensors_within
from recoup.core.graph import Graph
from recoup.engine.recording.observers import Watched
from recoup.engine.recording.region import Region
from recoup.measurement.steps.training_step import device_of
from recoup.measurement.timing.host_cost import recording_seconds
from recoup.measurement.tracing.graphs import step_graph, torn_blocks
from recoup.measurement.tracing.trace import Trace
from recoup.measurement.tracing.tracer import StepTracer


class LiveMeter(StorageMeter):
    """Count the bytes of the user's own step, without tensors made after it.

    Once backward has begun, tensors made outside of backward belong to user code after
    the step, such as copies of gradients and an optimizer's state.

    Attributes:
        is_over: Whether counting has ended.
    """

    is_over = False
    _has_backward = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator; count what it returned if it belongs to the step."""
        in_backward = current_backward() != -1
        if self.is_over or (self._has_backward and not in_backward):
            return func(*args, **(kwargs or {}))
        self._has_backward = in_backward
        return super().__torch_dispatch__(func, types, args, kwargs)


class LiveTracer(StepTracer):
    """Trace the user's own step, without repeating operators for timing.

    Values saved in the user's own regions cannot be planned; the bytes that these hold
    and recompute are part of the measured bytes.

    Attributes:
        highest_bytes: The most bytes in use so far, including replays.
        is_over: Whether tracing has ended.
    """

    def __init__(
        self,
        meter: MemoryMeter,
        timer: Timer,
        resident: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        super().__init__(
            meter, timer, storages_in(resident), reruns=False, parameters=parameters
        )
        self.highest_bytes = 0
        self.is_over = False
        self._replay_bytes = 0
        self._thread = threading.get_ident()

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator; trace it unless the step is over."""
        if self.is_over or (self._in_backward and current_backward() == -1):
            return func(*args, **(kwargs or {}))
        self.note_peak()
        moments, before_bytes = self.trace.backward_bytes, self._meter.live_bytes
        count = len(moments)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._replay_bytes and len(moments) > count:
            moments[-1] = max(moments[-1], before_bytes + self._replay_bytes)
            self._replay_bytes = 0
        return out

    def note_peak(self) -> None:
        """Record the peak before it is reset."""
        self.highest_bytes = max(self.highest_bytes, self._meter.peak_bytes)

    def began(self, region: Watched) -> None:
        """Record the tensors saved in a region of this thread."""
        if threading.get_ident() == self._thread:
            super().began(region)

    def hooks(self, region: Region) -> tuple[Pack, Unpack]:
        """Return the region's hooks, extended to record saved tensors."""
        if region.options.policy is self:
            return super().hooks(region)

        def unpack(packed: Any) -> Tensor:
            self.note_peak()
            self._meter.reset_peak()
            found = region.unpack(packed)
            above_bytes = self._meter.peak_bytes - self._meter.live_bytes
            self._replay_bytes = max(self._replay_bytes, above_bytes)
            return found

        pack, _ = region.hooks()
        return self._noting(
            pack, unpack, is_plannable=False, collector=region.collector
        )


class LiveStep:
    """Instruments on the user's own step, from construction to `finish`.

    Args:
        device: The device whose bytes are counted.
        gradients: Function that returns the current gradients. Those that exist before
            the step count as part of it.
        traced: Whether to trace the step, not only count its bytes.
        resident: Other tensors to count that outlive the step, such as parameters.
        parameters: Parameters whose gradients are recorded, by path.
        ended: Callback for the end of backward, with the peak in bytes.

    Attributes:
        tracer: The tracer, if the step is traced.
        has_ended: Whether a backward of the step has ended.
        start_bytes: Bytes in use before the step, without the gradients.
        peak_bytes: The most bytes that the step has added so far.
        fixed_bytes: Bytes that autograd saves in calls that no plan may change.
    """

    _is_attached = False

    def __init__(
        self,
        device: torch.device,
        gradients: Callable[[], Sequence[Tensor]],
        *,
        traced: bool,
        resident: Sequence[Tensor] = (),
        parameters: Mapping[str, Tensor] = MappingProxyType({}),
        ended: Callable[[int], None] | None = None,
    ) -> None:
        self._gradients = gradients
        self._ended = ended
        self.has_ended = False
        self._thread = threading.get_ident()
        self._meter = device_meter(device)
        self._live: LiveMeter | None = None
        if isinstance(self._meter, StorageMeter):
            self._meter = self._live = LiveMeter(device)
        self._timer = OperatorTimer(device)
        self._handles: list[RemovableHandle] = []
        self._followed: set[int] = set()
        self._prefix: str | None = None
        self.tracer = (
            LiveTracer(self._meter, self._timer, resident, parameters)
            if traced
            else None
        )
        self._is_attached = True
        self._of_gradients: list[RemovableHandle] = []
        if self.tracer is not None:
            self.tracer.attach(at_bottom=True)
            for name, parameter in parameters.items():
                if parameter.requires_grad:
                    note = partial(_note_gradient, self.tracer, name)
                    handle = parameter.register_post_accumulate_grad_hook(note)
                    self._of_gradients.append(handle)
        if self._live is not None:
            # The user enters and leaves modes meanwhile.
            enter_at_bottom(self._live)
        else:
            self._meter.__enter__()
        carried = gradients()
        self._meter.track(*resident, *carried)
        self.start_bytes = self._meter.live_bytes - bytes_of(carried)
        self.peak_bytes = self.fixed_bytes = self._left_bytes = 0

    @staticmethod
    def is_possible(*, traced: bool = False) -> bool:
        """Return whether a step can be metered, or traced, on this thread now."""
        if has_infrastructure_modes() or torch.compiler.is_compiling():
            return False
        return not traced or hooks_refused() is None

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        batch: Iterable[Tensor],
        ended: Callable[[int], None],
        *,
        traced: bool = False,
    ) -> "LiveStep":
        """Attach instruments that count a model, its gradients and its batch."""
        return cls(
            device_of(model),
            partial(_gradients_of, weakref.ref(model)),
            traced=traced,
            resident=[*model.parameters(), *model.buffers(), *batch],
            parameters=dict(model.named_parameters()) if traced else {},
            ended=ended,
        )

    @property
    def is_running(self) -> bool:
        """Whether the instruments are attached and backward has not ended."""
        return self._is_attached and not self.has_ended

    @property
    def left_bytes(self) -> int:
        """Live bytes that the step allocated, without gradients.

        If the meter is process-wide, their number at the end of backward.
        """
        return self._left_bytes if self._live is None else self._left_now()

    def _left_now(self) -> int:
        live_bytes = self._meter.live_bytes - self.start_bytes
        return max(0, live_bytes - bytes_of(self._gradients()))

    def call(self, model: nn.Module, prefix: str, *arguments: object) -> None:
        """Record module boundaries in the call of a model that begins now.

        Prepends the prefix, if not empty, to paths in the trace.
        """
        if self.tracer is None:
            return
        self._prefix = prefix
        self.tracer.call_model(prefix)
        self._record("", True, model, *arguments)
        if id(model) in self._followed:
            return
        self._followed.add(id(model))
        for name, module in model.named_modules():
            enter, leave = (
                partial(self._record, name, entering) for entering in (True, False)
            )
            if name:
                self._handles.append(
                    module.register_forward_pre_hook(
                        enter, with_kwargs=True, prepend=True
                    )
                )
            self._handles.append(
                module.register_forward_hook(leave, with_kwargs=True, prepend=True)
            )

    def _record(
        self,
        name: str,
        entering: bool,  # noqa: FBT001
        _: nn.Module,
        *passed: object,
    ) -> None:
        if self._prefix is not None and self.tracer is not None:
            path = ".".join(filter(None, (self._prefix, name)))
            self.tracer.reach(path, passed, entering=entering)

    def wait_for(self, output: object) -> None:
        """End the call of the model; follow the backward of its output."""
        self._prefix = None
        self.unfollow()  # so that copies of the model have no instruments
        for tensor in tensors_within(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_hook(self._arrive)

    def _arrive(self, *_: object) -> None:
        if self._is_attached:
            follow_backward(self)

    def unfollow(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._followed = set()

    def end(self, task: int = -1) -> None:
        """Read the peak; stop tracing once autograd has released all saved tensors.

        May run in an autograd thread. The meter stays attached: autograd restores the
        stack of modes when the last callback of a backward returns.
        """
        del task
        self.has_ended = True
        self._read_peak()
        self._left_bytes = self._left_now()
        saves = [] if self.tracer is None else self.tracer.trace.saves
        if all(save.released is not None for save in saves):
            self._stop_tracing()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self.start_bytes + self.peak_bytes)

    def finish(self) -> bool:
        """Detach everything; return False if another thread must do so."""
        if self._is_attached and self._thread != threading.get_ident():
            return False
        self._stop_tracing()
        if not self.peak_bytes:
            self._read_peak()
        self._detach()
        return True

    def __del__(self) -> None:
        # A manager may be dropped with its model during a step. Nothing else would then
        # remove the instruments from the thread's stacks.
        if self._is_attached:
            self._stop_tracing()
            self._detach()

    def _detach(self) -> None:
        if not self._is_attached or self._thread != threading.get_ident():
            return
        self._is_attached = False
        if self.tracer is not None:
            self.tracer.detach()
        if self._live is not None:
            leave_anywhere(self._live)
        else:
            self._meter.__exit__(None, None, None)

    def _read_peak(self) -> None:
        highest_bytes = self._meter.peak_bytes
        if self.tracer is not None:
            self.tracer.note_peak()
            highest_bytes = self.tracer.highest_bytes
        self.peak_bytes = max(self.peak_bytes, highest_bytes - self.start_bytes)

    def _stop_tracing(self) -> None:
        if self.tracer is None or self.tracer.is_over:
            return
        self.tracer.is_over = True
        self.tracer.stop()
        self.unfollow()
        for handle in self._of_gradients:
            handle.remove()
        self._of_gradients = []

    @property
    def _traced(self) -> LiveTracer:
        assert self.tracer is not None, "the step was traced"
        return self.tracer

    @property
    def planned_calls(self) -> set[int]:
        """The calls in which regions can begin and end."""
        return {boundary.model_call for boundary in self._traced.trace.boundaries}

    def torn(self, cuts: Collection[str]) -> set[str]:
        """Return the cuts where a value is soon overwritten."""
        return torn_blocks(self._traced.trace, cuts)

    def graph(self, cuts: Collection[str], fixed_calls: Collection[int]) -> Graph:
        """Return the graph of the step.

        Args:
            cuts: The paths at which it was cut, each prefixed with its call's number.
            fixed_calls: Calls that no plan may change, with their measured bytes.
        """
        [trace, *_] = self._traced.close()
        self.fixed_bytes = _fix(trace, fixed_calls)
        return step_graph(
            [trace],
            self._timer.seconds,
            blocks=cuts,
            recording_seconds=_recording_seconds(),
        )


def _gradients_of(model: Callable[[], nn.Module | None]) -> list[Tensor]:
    found = model()
    parameters = () if found is None else found.parameters()
    return [p.grad for p in parameters if p.grad is not None]


def _note_gradient(tracer: LiveTracer, name: str, _: Tensor) -> None:
    tracer.add_gradient(name)


def _fix(trace: Trace, calls: Collection[int]) -> int:
    """Exclude calls from planning; return the bytes that they save."""
    storages: set[int] = set()
    for call in calls:
        inside = [b for b in trace.boundaries if b.model_call == call]
        if inside:
            for save in trace.saves[inside[0].saves : inside[-1].saves]:
                storages.add(trace.values[save.value].storage)
                save.value = 0
    trace.boundaries = [b for b in trace.boundaries if b.model_call not in calls]
    return sum(trace.storages[number].bytes for number in storages)


def bytes_of(found: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, every storage once."""
    return sum(storage.nbytes() for storage in storages_in(list(found)))


@cache
def _recording_seconds() -> float:
    """Return `recording_seconds`, measured in a thread without the user's modes."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(recording_seconds()))
    thread.start()
    thread.join()
    return found[0]
