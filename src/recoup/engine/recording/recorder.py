"""The recorder: a dispatch mode that records a region's operators on a tape."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from recoup.backend.autograd.wrappers import are_taken_apart, unwrapped_now, wrappers_in
from recoup.backend.compiler.recognition import leave_uncompiled
from recoup.backend.memory.storages import has_storage, uncounted
from recoup.backend.operators.dispatch import OperatorMode, all_plain, run_complex
from recoup.backend.operators.kernels import (
    KERNELS,
    FirstSight,
    Kernel,
    kernel_of,
    watch_unwrapping,
)
from recoup.backend.operators.properties import (
    Facts,
    crosses_devices,
    draws,
    draws_outside_generators,
    without_contents,
)
from recoup.backend.operators.repeatable import is_repeatable
from recoup.backend.state.rng import (
    generator_of,
    generators_at_hand,
    same_state,
)
from recoup.backend.state.trees import tensors
from recoup.core.restoring import restoring
from recoup.engine.lifetime.operations import TapeOperation
from recoup.engine.lifetime.past_contents import Indices
from recoup.engine.lifetime.values import OUTSIDE, TapeValue
from recoup.engine.recording.operator_calls import (
    NO_TENSORS,
    indices_of,
    record_call,
    replaces,
    targets_of,
    writes_permuted,
)
from recoup.engine.recording.tape import Tape


class Recorder(OperatorMode):
    """Records every operator that runs while it is active on a tape."""

    _first_sight: FirstSight | None = None
    _is_left_to_wrappers = False
    _wrapped = 0

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.paused = False
        watch_unwrapping()

    def pausing(self) -> restoring:
        """Record nothing while the block runs."""
        return _Pausing(self)

    @leave_uncompiled
    def __torch_dispatch__(  # noqa: C901, PLR0912 (written out: every operator's way)
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and record it unless it only makes views."""
        kernel = KERNELS.get(id(func)) or kernel_of(func)
        if types and not all_plain(types) and not self.paused:
            return self._on_wrappers(kernel, types, args, kwargs or {})
        if kernel.passes or self.paused:
            if kernel.is_watched:
                # Inlined: a method would add a frame for each nested region.
                if kernel.reshapes:
                    return self._reshaped(kernel, args, kwargs or {})
                if not self.paused:
                    self._look_for_wrapper(args[0])
            return kernel.run(*args, **kwargs) if kwargs else kernel.run(*args)
        kwargs = kwargs or {}
        if not kernel.simple and not (
            kernel.quiet and not draws(kernel.facts, args, kwargs)
        ):
            if kernel.in_place:
                return self._in_place(kernel, args, kwargs)
            if kernel.statistics:
                return self._with_statistics(kernel, args, kwargs)
            record = self._prove if kernel.is_unproven else self._special
            return record(kernel, args, kwargs)
        if kernel.moves and kwargs.get("device") is not None:
            return self._special(kernel, args, kwargs)
        tape = self.tape
        try:
            operation = record_call(tape, kernel, args, kwargs)
        except NotImplementedError:
            return self._unrecorded(kernel, args, kwargs)
        # Inlined: nearly every operator takes this path.
        if tape.lazy_bits_seen:
            out = run_complex(kernel.run, args, kwargs)
        else:
            out = kernel.run(*args, **kwargs) if kwargs else kernel.run(*args)
        tape.operations.append(operation)
        if kernel.quiet:
            tape.name_results(operation, out, ragged=_seeds(out))
        else:
            tape.name_results(operation, out, tainted=kernel.blank)
        return out

    def _on_wrappers(
        self,
        kernel: Kernel,
        types: tuple[type, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record an operator on wrapper subclasses as operators on inner tensors."""
        if self._is_left_to_wrappers:
            self._is_left_to_wrappers = False
            return NotImplemented
        if not are_taken_apart(types):
            if kernel.passes:
                return kernel.operator(*args, **kwargs)
            return self._unrecorded(kernel, args, kwargs)
        tape = self.tape
        targets = targets_of(kernel.facts, args, kwargs) if kernel.facts.writes else ()
        for wrapper in wrappers_in((args, kwargs)):
            tape.meet_wrapper(
                wrapper, is_written=any(target is wrapper for target in targets)
            )
        self._is_left_to_wrappers = True
        self._wrapped += 1
        try:
            with self:
                return kernel.operator(*args, **kwargs)
        finally:
            self._is_left_to_wrappers = False
            self._wrapped -= 1

    def _count_writes(self, facts: Facts, targets: Sequence[Tensor]) -> None:
        """Increment the versions of written tensors where torch does not.

        Under a dispatch mode, operators on lists of tensors and writes to a wrapper's
        inner tensors bypass the version counters.
        """
        if facts.is_foreach or self._wrapped:
            increment_version(targets)

    def _run(
        self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._first_sight is not None:
            self._first_sight.begin()
        if self.tape.lazy_bits_seen:
            return run_complex(kernel.run, args, kwargs)
        return kernel.run(*args, **kwargs)

    def _prove(
        self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the first call of an operator that may have undeclared writes.

        If it has, this call's results are kept, and it is recorded with its writes from
        its next call on.
        """
        sight = FirstSight(kernel, args, kwargs)
        self._first_sight = sight
        try:
            out = self._special(kernel, args, kwargs)
        finally:
            self._first_sight = None
        written = sight.end()
        if written:
            with sight.undone(written):
                self._before_writes(written)
            for tensor in (*written, *tensors(out)):
                if has_storage(tensor):
                    self.tape.forget(tensor)
            self.tape.unrecorded.append(kernel.facts.name)
        return out

    def _look_for_wrapper(self, inner: Tensor) -> None:
        """Register the wrapper whose inner tensor is being returned, if any.

        The region may continue with the inner tensor, whose version counter misses
        writes to the wrapper.
        """
        wrapper = unwrapped_now(inner, below=_GLOBALS)
        if wrapper is not None:
            self.tape.meet_wrapper(wrapper, is_written=False)

    def _reshaped(
        self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that changes its first argument's geometry."""
        self.tape.attached.part_from(args[0])
        value = self.tape.value_of(args[0])
        if value is not None and value.hold is not None and value.hold.stored:
            # The transfer checks the tensor's version, which may change now.
            value.hold.stored.settle()
        out = kernel.run(*args, **kwargs)
        self.tape.reshape(out)
        return out

    def _in_place(
        self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record an operator that only changes the contents of its first argument.

        A fast path of `_special`, because every layer has such operators.
        """
        tape = self.tape
        target = args[0]
        try:
            before = tape.value_of(target)
            if (
                before is None
                or before.producer == OUTSIDE
                or tape.is_blank(before, target)
            ):
                return self._unrecorded(kernel, args, kwargs, args[:1])
            operation = record_call(tape, kernel, args, kwargs)
        except NotImplementedError:
            return self._unrecorded(kernel, args, kwargs)
        tape.settle_writes()
        tape.protect(target, before)
        out = self._run(kernel, args, kwargs)
        if self._wrapped:
            increment_version(target)
        tape.operations.append(operation)
        tape.overwrite(target, operation, before, resized=False)
        return out

    def _with_statistics(
        self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record batch normalisation, whose replay must not update its statistics.

        A fast path of `_special`.
        """
        if kernel.training_at >= 0 and not args[kernel.training_at]:
            return self._special(kernel, args, kwargs)
        tape = self.tape
        recorded = list(args)
        targets: list[Tensor] = []
        for place in kernel.statistics:
            if args[place] is not None:
                targets.append(args[place])
                recorded[place] = None
        try:
            operation = record_call(tape, kernel, recorded, kwargs)
        except NotImplementedError:
            return self._unrecorded(kernel, args, kwargs)
        self._before_writes(targets)
        out = self._run(kernel, args, kwargs)
        for target in targets:
            tape.forget(target)
        tape.operations.append(operation)
        tape.name_results(operation, out)
        return out

    def _special(
        self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record an operator with writes, randomness or other effects."""
        facts = kernel.facts
        targets = targets_of(facts, args, kwargs) if facts.writes else []
        # A write to every position exactly once reads nothing and is deterministic.
        permuted = facts.may_vary and writes_permuted(self.tape, facts, args)
        overwrites = facts.overwrites or (permuted and replaces(facts, args, kwargs))
        varies = facts.may_vary and not permuted
        if (varies and not is_repeatable(facts.name, args, kwargs)) or self._must_keep(
            facts, args, targets, overwrites=overwrites
        ):
            return self._unrecorded(kernel, args, kwargs, targets)
        recorded = args
        if facts.shape_only and args and has_storage(args[0]):
            return self._shape_only(kernel, args, kwargs)
        if facts.statistics and (facts.training_at < 0 or args[facts.training_at]):
            targets = [args[i] for i in facts.statistics if args[i] is not None]
            recorded = _without_statistics(kernel, args)
        try:
            operation = record_call(
                self.tape,
                kernel,
                recorded,
                kwargs,
                overwritten=targets if overwrites else (),
            )
        except NotImplementedError:
            return self._unrecorded(kernel, args, kwargs)
        earlier = self._before_writes(targets, is_counted=facts.counts_first)
        is_kept = False
        if facts.random:
            out = self._run_random(operation, args, kwargs)
        elif facts.may_draw:
            out, is_kept = self._run_watched(operation, args, kwargs)
        else:
            out = self._run(kernel, args, kwargs)
        self._count_writes(facts, targets)
        if is_kept or (facts.copies and crosses_devices(args, out)):
            self.tape.unrecorded.append(facts.name)
            for target in targets:
                self.tape.forget(target)
            return out
        self.tape.operations.append(operation)
        for target, before in zip(targets, earlier, strict=True):
            self._after_write(facts, operation, target, before, filled=overwrites)
        ragged = facts.ragged
        if facts.random and operation.random is None:
            ragged = (*ragged, *_seeds(out))
        self.tape.name_results(
            operation, out, tainted=facts.uninitialised, ragged=ragged
        )
        return out

    def _shape_only(
        self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a `*_like` operator, whose replay only needs its argument's shape."""
        tape, like = self.tape, args[0]
        named = dict(kwargs, device=kwargs.get("device") or like.device)
        operation = record_call(tape, kernel, (None, *args[1:]), named)
        operation.args[0] = without_contents(like)
        out = self._run_random(operation, args, kwargs)
        tape.operations.append(operation)
        tape.name_results(operation, out, tainted=kernel.facts.uninitialised)
        return out

    def _must_keep(
        self,
        facts: Facts,
        args: tuple[Any, ...],
        targets: list[Tensor],
        *,
        overwrites: bool,
    ) -> bool:
        if facts.opaque or draws_outside_generators(facts, args):
            return True
        # A write to an external tensor happens once, in forward. The operation is
        # recorded only if it also produces or changes values of the region.
        stays = bool(targets) and not facts.statistics and not facts.makes_more
        for target in targets:
            if not has_storage(target):
                return True
            value = self.tape.value_of(target)
            if value is None or facts.statistics:
                continue
            tainted = self.tape.tainted and not overwrites
            if tainted and self.tape.is_blank(value, target):
                return True
            if facts.resizes and self._lies_elsewhere(target, value):
                return True
            if value.producer != OUTSIDE:
                stays = False
        return stays

    def _lies_elsewhere(self, target: Tensor, value: TapeValue) -> bool:
        """Return whether an assignment to `.data` changed a value's tensor.

        Then a resize by an operator could not be detected.
        """
        lay, born = value.geometry, value.born
        if lay is None or born is None or born() is not target:
            return False
        return self.tape.geometry(target) != lay

    def _before_writes(
        self,
        targets: Sequence[Tensor],
        indices: Indices | None = None,
        *,
        is_counted: bool = False,
    ) -> list[TapeValue | None]:
        """Save what an operator will overwrite; return the values before.

        Args:
            targets: What it writes to.
            indices: Which elements of it, if not all.
            is_counted: The version counters have counted the write.
        """
        if is_counted:
            with uncounted(targets):
                return self._before_writes(targets, indices)
        tape = self.tape
        values = [tape.value_of(target) for target in targets]
        if values:
            tape.settle_writes()
        for target, value in zip(targets, values, strict=True):
            tape.protect(target, value, indices)
        return values

    def _after_write(
        self,
        facts: Facts,
        operation: TapeOperation,
        target: Tensor,
        before: TapeValue | None,
        *,
        filled: bool,
    ) -> None:
        tape = self.tape
        own = before is not None and before.producer != OUTSIDE
        if before is None or not own or facts.statistics:
            tape.forget(target)
            if before is not None and before in operation.reads():
                # The replay also writes: to a copy, whose result is unused.
                operation.writes = (
                    *operation.writes,
                    (before, TapeValue(OUTSIDE, None)),
                )
            return
        tape.overwrite(
            target,
            operation,
            before,
            tainted=facts.uninitialised,
            filled=filled,
            resized=facts.resizes,
        )

    def _run_random(
        self,
        operation: TapeOperation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        kernel = operation.kernel
        if not draws(kernel.facts, args, kwargs):
            return self._run(kernel, args, kwargs)
        generator = generator_of(args, kwargs)
        state = generator.get_state()
        out = self._run(kernel, args, kwargs)
        if not same_state(state, generator.get_state()):
            operation.random = (generator, state)
        return out

    def _run_watched(
        self,
        operation: TapeOperation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, bool]:
        """Run an operator of another library, and see whether it draws.

        Its kernel may draw from the generator of its device, or from the CPU's.

        Returns:
            Its results, and whether they must be kept: a replay sets one generator.
        """
        generators = generators_at_hand(args, kwargs)
        before = [(each, each.get_state()) for each in generators]
        out = self._run(operation.kernel, args, kwargs)
        drawn = [
            (each, state)
            for each, state in before
            if not same_state(state, each.get_state())
        ]
        if len(drawn) == 1:
            operation.random = drawn[0]
        return out, len(drawn) > 1

    def _unrecorded(
        self,
        kernel: Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor] | None = None,
    ) -> Any:
        """Run an operator that is not replayed; its results count as external."""
        facts = kernel.facts
        self.tape.unrecorded.append(facts.name)
        if written is None:
            written = targets_of(facts, args, kwargs)
        targets = [target for target in written if has_storage(target)]
        indices = indices_of(facts, args) if targets else None
        self._before_writes(targets, indices, is_counted=facts.counts_first)
        # It may be the first operator on a complex tensor, which was not seen yet.
        if _has_complex(args):
            out = run_complex(kernel.run, args, kwargs)
        else:
            out = self._run(kernel, args, kwargs)
        self._count_writes(facts, targets)
        for target in targets:
            self.tape.forget(target)
        return out


class _Pausing(restoring):
    """Pauses a recorder."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(partial(setattr, recorder, "paused", recorder.paused))
        self._recorder = recorder

    def __enter__(self) -> None:
        super().__enter__()
        self._recorder.paused = True


def _has_complex(args: tuple[Any, ...]) -> bool:
    for argument in args:
        if type(argument) in NO_TENSORS:
            continue
        if isinstance(argument, Tensor) and argument.is_complex():
            return True
    return False


def _seeds(out: Any) -> list[int]:
    """Return the positions of seeds and offsets among a random operator's results.

    They are unwritten if it did not draw (attention without dropout).
    """
    results = out if isinstance(out, (tuple, list)) else (out,)
    return [
        place
        for place, result in enumerate(results)
        if isinstance(result, Tensor) and result.nbytes <= _SEED_BYTES
    ]


_SEED_BYTES = 64
_GLOBALS = globals()


def _without_statistics(kernel: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments for a replay, which must not update running statistics."""
    recorded = list(args)
    nullable = kernel.facts.nullable
    for position in kernel.facts.statistics:
        if position in nullable:
            recorded[position] = None
        elif recorded[position] is not None:
            recorded[position] = recorded[position].clone()
    return tuple(recorded)
