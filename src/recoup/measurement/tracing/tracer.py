"""Trace one training step: its operators, saved tensors and memory."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recoup.backend.autograd.hook_stacks import (
    enter_at_bottom,
    leave_anywhere,
    push_hooks_at_bottom,
    take_out_hooks,
)
from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    ambient_hooks,
    current_backward,
    is_in_backward,
    push_hooks,
)
from recoup.backend.memory.ledger import storages_in
from recoup.backend.memory.meters import MemoryMeter
from recoup.backend.operators.dispatch import OperatorMode
from recoup.backend.operators.fakes import makes_no_memory
from recoup.backend.operators.fingerprints import is_fingerprinting
from recoup.backend.operators.properties import Facts, facts_of
from recoup.backend.operators.timers import Timer
from recoup.backend.state.trees import tensors
from recoup.core.graph import BEFORE, Boundary
from recoup.engine.lifetime.handover import Collector
from recoup.engine.lifetime.values import Hold
from recoup.engine.recording.observers import Watched, subscribe, unsubscribe
from recoup.engine.recording.region import STATE_BYTES, Region
from recoup.engine.replay.recomputing import is_recomputing
from recoup.measurement.tracing.saved import KeptTensor
from recoup.measurement.tracing.trace import (
    Lifetimes,
    Trace,
    TracedOperation,
    TracedSave,
)


def _is_ours() -> bool:
    """Return whether recoup runs the operator, to recompute or to verify a value."""
    return is_recomputing() or is_fingerprinting()


class StepTracer(OperatorMode):
    """Record a step while it runs, in regions or without.

    It is also the policy of the regions, so it sees what these could hold. A step that
    calls the model again after a backward has several passes, with one trace each.

    Args:
        meter: Memory meter, entered already.
        timer: Timer of the operators.
        resident: Storages that outlive the step, recorded with zero bytes.
        reruns: Whether to run operators again for better times.
        parameters: The parameters whose gradients are recorded, by path.
    """

    def __init__(
        self,
        meter: MemoryMeter,
        timer: Timer,
        resident: Iterable[torch.UntypedStorage] = (),
        *,
        reruns: bool = True,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._parameters = dict(parameters or {})
        self.trace = Trace()
        self.traces = [self.trace]
        self._resident = list(resident)
        self._reruns = reruns
        self._meter = meter
        self._timer = timer
        self._timings: dict[Any, int] = {}
        self._facts: dict[Any, Facts] = {}
        self._lifetimes = Lifetimes(self.trace, self._resident)
        self._in_backward = False
        self._plain_hooks = self._plain()
        self._model_call: int | None = None
        self._calls: Counter[tuple[str, bool]] = Counter()

    def attach(self, *, at_bottom: bool = False) -> None:
        """Start tracing operators on this thread and tensors saved outside regions.

        Args:
            at_bottom: Whether to stay below all modes and hooks of the thread, so that
                user code may enter and leave its own meanwhile.
        """
        if at_bottom:
            push_hooks_at_bottom(*self._plain_hooks)
            enter_at_bottom(self)
        else:
            push_hooks(*self._plain_hooks)
            self.__enter__()
        subscribe(self)

    def stop(self) -> None:
        """Stop following regions; may be called on any thread."""
        unsubscribe(self)

    def detach(self) -> None:
        """Remove the tracer from any position of this thread's stacks."""
        take_out_hooks(self._plain_hooks[0])
        leave_anywhere(self)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and record it."""
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = facts_of(func)
        if facts.passes or _is_ours() or makes_no_memory(kwargs):
            return func(*args, **kwargs)
        if not self._in_backward and current_backward() != -1:
            self._in_backward = True
            # The step may drop gradients of earlier passes after forward.
            before = self.trace.gradients
            self.trace.gradients = {
                n: before[n] for n in self._carried() if n in before
            }
        self._lifetimes.bury()
        if self._in_backward:
            ran = self._run(facts, partial(func, *args, **kwargs))
            self.trace.backward_bytes.append(ran.peak_bytes)
            self.trace.backward_own_bytes.append(ran.own_bytes)
            self.trace.backward_timings.append(ran.timing)
            return ran.out
        return self._forward(facts, func, args, kwargs)

    def keeps(self, operator: str, nbytes: int) -> bool:
        """Record that a region could hold a value of the last operator."""
        del operator, nbytes
        if self.trace.operations and not self._in_backward:
            self.trace.operations[-1].asked += 1
        return False

    def began(self, region: Watched) -> None:
        """Record the tensors saved in a region."""
        if isinstance(region, Region):
            region.tracer = self

    def ended(self, region: Watched) -> None:
        """Do nothing."""

    def hooks(self, region: Region) -> tuple[Pack, Unpack]:
        """Return the region's hooks, extended to record saved tensors."""
        return self._noting(*region.hooks(), collector=region.collector)

    def _plain(self) -> tuple[Pack, Unpack]:
        """Return hooks that record and keep tensors, for use outside regions."""
        pack, unpack = self._noting(KeptTensor, KeptTensor.fetch)
        pack.is_transparent = True  # pyright: ignore[reportFunctionMemberAccess]
        return pack, unpack

    def call_model(self, root: str | None) -> None:
        """Record the start of a call of the model, or of a part.

        Args:
            root: The path of the called module, or None for a call without gradients,
                which cannot be planned.
        """
        if root is None:
            self._model_call = None
            return
        if self._in_backward and current_backward() == -1:
            self._lifetimes.bury()
            self.trace = Trace()
            self.traces.append(self.trace)
            self._lifetimes = Lifetimes(self.trace, self._resident)
            self._in_backward = False
        if not self.trace.roots:
            self.trace.gradients = dict.fromkeys(self._carried(), BEFORE)
            self._calls.clear()
        self._model_call = len(self.trace.roots)
        self.trace.roots.append(root)

    def _carried(self) -> list[str]:
        """Return the paths of the parameters that have a gradient now."""
        return [name for name, p in self._parameters.items() if p.grad is not None]

    def add_gradient(self, name: str) -> None:
        """Record that backward has added to the gradient of a parameter."""
        self.trace.gradients.setdefault(name, self.trace.moment)

    def reach(self, module: str, passed: object, *, entering: bool) -> None:
        """Record that a module is entered or left.

        Ignored inside the model's own saved-tensor hooks, where no region may begin or
        end.
        """
        if self._model_call is None:
            return
        call = self._calls[module, entering]
        self._calls[module, entering] += 1
        if entering and call and is_in_backward():
            self.trace.called_again[module] = None
        hooks = ambient_hooks()
        if not self._in_backward and hooks and getattr(hooks[0], "is_noting", False):
            trace = self.trace
            for tensor in tensors(passed):
                self._lifetimes.follow(tensor)
            trace.boundaries.append(
                Boundary(
                    len(trace.operations),
                    len(trace.saves),
                    module,
                    call,
                    entering,
                    self._model_call,
                )
            )

    def close(self) -> list[Trace]:
        """Return the trace of each pass, after the step and the mode have ended.

        A pass without backward has nothing to plan: its moments are added to another
        pass.
        """
        self._lifetimes.bury()
        passes = [t for t in self.traces if t.boundaries and t.backward_bytes]
        for number, trace in enumerate(self.traces):
            if passes and trace not in passes:
                before = [t for t in self.traces[:number] if t in passes]
                (before or passes)[-1 if before else 0].add_moments(trace)
        return passes or self.traces[:1]

    def _noting(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        *,
        is_plannable: bool = True,
        collector: Collector | None = None,
    ) -> tuple[Pack, Unpack]:
        """Return hooks that record saved tensors; unplannable ones as value 0."""
        # By id: a packed object need not be hashable.
        numbers: dict[int, tuple[Trace, int]] = {}

        def note(tensor: Tensor) -> Any:
            if self._in_backward and current_backward() == -1:  # another forward
                packed = pack(tensor)
                numbers.pop(id(packed), None)
                return packed
            trace = self.trace
            number = len(trace.saves)
            value = self._lifetimes.value_of(tensor) if is_plannable else 0
            trace.saves.append(TracedSave(value))
            packed = pack(tensor)
            trace.saves[number].by_region = isinstance(packed, Hold)
            numbers[id(packed)] = (trace, number)
            weakref.finalize(packed, _release, trace, number)
            return packed

        def fetch(packed: Any) -> Tensor:
            known = numbers.get(id(packed))
            found = unpack(packed)
            if known is None:
                return found
            trace, number = known
            save = trace.saves[number]
            if trace is not self.trace:
                save.is_later = save.used is None
            elif save.used is None:
                save.used = trace.moment
                self._lifetimes.follow_copy(save, found)
            return found

        note.is_noting = is_plannable  # pyright: ignore[reportFunctionMemberAccess]
        note.collector = collector  # pyright: ignore[reportFunctionMemberAccess]
        return note, fetch

    def _forward(
        self, facts: Facts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        trace = self.trace
        moment = len(trace.operations)
        # A replay of `*_like` does not need the contents of its argument.
        given = storages_in((args[1:] if facts.shape_only else args, kwargs))
        reads = [self._lifetimes.value_in(storage) for storage in given]
        ran = self._run(facts, partial(func, *args, **kwargs))
        states = _state_sizes(facts, args)
        written = _written(facts, args, kwargs)
        makes = [self._lifetimes.overwrite(storage, moment) for storage in written]
        for storage in storages_in(ran.out):
            if not self._lifetimes.knows(storage):
                nbytes = self._counted_bytes(storage)
                makes.append(self._lifetimes.admit(storage, nbytes=nbytes, born=moment))
        trace.operations.append(
            TracedOperation(
                name=facts.name,
                reads=list(dict.fromkeys(reads)),
                makes=makes,
                timing=ran.timing,
                peak_bytes=ran.peak_bytes,
                own_bytes=ran.own_bytes,
                workspace_bytes=ran.workspace_bytes,
                state_bytes=sum(map(self._meter.counted_bytes, states)),
            )
        )
        return ran.out

    def _run(self, facts: Facts, call: partial[Any]) -> "Ran":
        """Run an operator, and measure it."""
        self._meter.reset_peak()
        before_bytes = self._meter.live_bytes
        out, timing = self._timer.run(call)
        peak_bytes = self._meter.peak_bytes
        workspace_bytes = max(0, peak_bytes - self._meter.live_bytes)
        timing = self._time_again(facts, call, timing)
        return Ran(out, timing, peak_bytes, peak_bytes - before_bytes, workspace_bytes)

    def _counted_bytes(self, storage: torch.UntypedStorage) -> int:
        return self._meter.counted_bytes(storage.nbytes())

    def _time_again(self, facts: Facts, call: partial[Any], timing: int) -> int:
        """Return a better timing of an operator, because its first run is slower.

        An operator that must not be repeated gets the time of its fastest equal call in
        the step.
        """
        if facts.opaque:
            return timing
        key = (call.func, _shapes((call.args, tuple(call.keywords.items()))))
        known = self._timings.get(key)
        if not self._reruns or facts.writes or facts.random or facts.statistics:
            if known is None:
                self._timings[key] = timing
                return timing
            self._timer.join(known, timing)
        elif known is None:
            known = self._timings[key] = self._timer.again(call, timing)
        return known


class Ran(NamedTuple):
    """The result of an operator, and its measurements."""

    out: Any
    timing: int = 0
    peak_bytes: int = 0
    own_bytes: int = 0
    workspace_bytes: int = 0


def _release(trace: Trace, number: int) -> None:
    trace.saves[number].released = trace.moment - 1


def _written(
    facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.UntypedStorage]:
    found: list[Any] = []
    for place in facts.writes:
        if isinstance(place, str):
            found.append(kwargs.get(place))
        elif place < len(args):
            found.append(args[place])
    return storages_in(found)


def _state_sizes(facts: Facts, args: tuple[Any, ...]) -> list[int]:
    """Return the sizes of running statistics that an operator updates, in bytes."""
    if facts.training_at >= 0 and not args[facts.training_at]:
        return []
    sizes = (s.nbytes() for s in storages_in([args[at] for at in facts.statistics]))
    return [nbytes for nbytes in sizes if nbytes <= STATE_BYTES]


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        # Compressed sparse tensors have no strides.
        strides = tree.stride() if tree.layout is torch.strided else tree.layout
        return (tree.dtype, tuple(tree.shape), strides)
    if isinstance(tree, tuple | list):
        return tuple(_shapes(branch) for branch in tree)
    return repr(tree)
