"""Runtime: the functions that loops of a rewritten function call."""

import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recoup.backend.state.snapshots import StateSnapshot
from recoup.backend.state.walk import reach
from recoup.errors import RecoupError, UnsupportedError
from recoup.loops.loop import checkpointed_loop
from recoup.loops.rewriting.writes import (
    Undefined,
    WriteError,
    Writes,
    sources_of,
    watched,
)
from recoup.loops.state_trees import flatten
from recoup.loops.steps import ConcreteError, KindError, Listed
from recoup.schedules.online import Online
from recoup.schedules.revolve import Revolve

Carry = tuple[Any, ...]
Body = Callable[[Carry, Any], tuple[str | None, Any, tuple[Any, ...]]]
Ended = tuple[str | None, Any, tuple[Carry]]


def run_plainly(
    body: Body, carry: Carry, items: Iterable[Any], lists: Sequence[list[Any]]
) -> Ended:
    """Run a `for` loop; return its end signal, its value, and the carry."""
    for item in items:
        signal, after, row = body(carry, item)
        if signal == "return":
            return signal, after, (carry,)
        carry = after
        if signal == "break":
            return signal, None, (carry,)
        for listed, value in zip(lists, row, strict=False):
            listed.append(value)
    return None, None, (carry,)


def run_while_plainly(
    body: Body, carry: Carry, test: Callable[[Carry], Any], lists: Sequence[list[Any]]
) -> Ended:
    """Run a `while` loop; return its end signal, its value, and the carry."""
    while test(carry):
        signal, value, (carry,) = run_plainly(body, carry, (None,), lists)
        if signal is not None:
            return signal, value, (carry,)
    return None, None, (carry,)


def bound(function: Any) -> Any:
    """Return the function with its closure variables fixed at their present values.

    By backward the enclosing function has continued, and may have changed them.
    """
    cells = [_copied(cell) for cell in function.__closure__ or ()]
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, tuple(cells)
    )


def _copied(cell: types.CellType) -> types.CellType:
    try:
        return types.CellType(cell.cell_contents)
    except ValueError:  # unbound
        return types.CellType()


UNDEFINED = Undefined()


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of the loops of a rewritten function.

    Attributes:
        num_checkpoints: States to hold; None for the square root of the steps.
        strategy: "auto" (at equal distances), "revolve", "dynamic" (as for an unknown
            length) or "none" (not checkpointed).
        memory_budget: Bytes that may be held instead.
        min_loop_size: Shorter loops run plain.
        name: The function, for messages.
        raises: Whether an unsupported loop raises; else it runs plain, with a
            warning.
    """

    num_checkpoints: int | None = None
    strategy: str = "auto"
    memory_budget: int | str | None = None
    min_loop_size: int = 100
    name: str = "function"
    raises: bool = False


class Runtime:
    """Runs the loops of one rewritten function."""

    undefined = UNDEFINED

    def __init__(self, options: LoopOptions) -> None:
        self._options = options

    def value(self, read: Callable[[], Any]) -> Any:
        """Return a variable's value, or a marker if it is unbound."""
        try:
            return read()
        except NameError:
            return UNDEFINED

    def run_for(  # noqa: PLR0913 (each is a fact about the loop)
        self,
        body: Body,
        carry: Carry,
        items: Any,
        *,
        lists: Sequence[list[Any]],
        line: int,
        stops: bool,
        names: Sequence[str],
        changed: Sequence[str] = (),
        kept: Sequence[str] = (),
        changes_items: bool = False,
    ) -> Ended:
        """Run a `for` loop; return its end signal, its value, and the carry."""
        body = bound(body)
        sources = [] if isinstance(items, (list, tuple)) else sources_of(items)
        items = _sequence(items, line)
        total, first = len(items), 0
        if self._is_plain(total):
            return run_plainly(body, carry, iter(items), lists)
        if stops and _is_jax((carry, items)):
            self._refuse_to_stop(line)
            return run_plainly(body, carry, iter(items), lists)
        if changes_items and not isinstance(items, range):
            self._complain(WriteError("it writes to what it iterates over"), line)
            return run_plainly(body, carry, iter(items), lists)
        if not _is_settled(carry):
            signal, value, (carry,) = run_plainly(body, carry, (items[0],), lists)
            if signal is not None:
                return signal, value, (carry,)
            first = 1
        if not _has_arrays((carry, items)) and not lists:
            return run_plainly(body, carry, itertools.islice(items, first, None), lists)
        before = _snapshot([body], (carry, items))
        try:
            with _naming(self._options.name, line):
                writes = Writes(carry, names, changed, kept, [body, items], sources)
                if stops:
                    return self._stopped(
                        body,
                        writes,
                        lambda _: True,
                        lambda index: items[first + index],
                        total - first,
                    )
                return self._run_known(body, writes, items, first, lists)
        except KindError as error:
            before.restore()
            self._complain(error, line)
            rest = itertools.islice(items, first, None)
            return run_plainly(body, carry, rest, lists)

    def run_while(  # noqa: PLR0913 (each is a fact about the loop)
        self,
        body: Body,
        carry: Carry,
        test: Callable[[Carry], Any],
        *,
        lists: Sequence[list[Any]],
        line: int,
        stops: bool,
        names: Sequence[str],
        changed: Sequence[str] = (),
        kept: Sequence[str] = (),
    ) -> Ended:
        """Run a `while` loop; return its end signal, its value, and the carry."""
        body, test = bound(body), bound(test)
        if self._options.strategy == "none":
            return run_while_plainly(body, carry, test, lists)
        if stops and _is_jax(carry):
            self._refuse_to_stop(line)
            return run_while_plainly(body, carry, test, lists)
        if not _is_settled(carry):
            if not test(carry):
                return None, None, (carry,)
            signal, value, (carry,) = run_plainly(body, carry, (None,), lists)
            if signal is not None:
                return signal, value, (carry,)
        if not _has_arrays(carry) and not lists:
            return run_while_plainly(body, carry, test, lists)
        before = _snapshot([body, test], carry)
        try:
            with _naming(self._options.name, line):
                writes = Writes(carry, names, changed, kept, [body, test])
                return self._run_to_condition(body, writes, test, lists, stops)
        except KindError as error:
            before.restore()
            self._complain(error, line)
            return run_while_plainly(body, carry, test, lists)

    def _refuse_to_stop(self, line: int) -> None:
        message = (
            f"the loop at line {line} of {self._options.name!r} is not checkpointed "
            "and runs plain: over JAX arrays it may not break or return; put its end "
            "into the condition of a while loop."
        )
        if self._options.raises:
            raise UnsupportedError(message)
        warn_about(message)

    def _complain(self, error: KindError, line: int) -> None:
        if self._options.raises:
            raise error
        loop = f"the loop at line {line} of {self._options.name!r}"
        if isinstance(error, WriteError):
            warn_about(
                f"{loop} is not checkpointed and runs plain: {error}; change it, or "
                "call checkpointed_loop."
            )
        elif isinstance(error, ConcreteError):
            warn_about(f"{loop} runs plain: {error}")
        else:
            warn_about(
                f"{loop} runs plain: one of its variables is an array at one time and "
                "something else at another, changes its structure, or hides arrays; "
                "begin with arrays, in tuples, lists and dictionaries."
            )

    def _run_to_condition(
        self,
        body: Body,
        writes: Writes,
        test: Callable[[Carry], Any],
        lists: Sequence[list[Any]],
        stops: bool,  # noqa: FBT001 (passed on)
    ) -> Ended:
        if stops:
            return self._stopped(body, writes, test, lambda _: None, None)
        step = _step(watched(body, writes), lists)
        final, _ = checkpointed_loop(
            self._named(step),
            writes.given,
            condition=test,
            with_outputs=bool(lists),
            schedule=self._online(),
        )
        return None, None, (_with_rows(final, lists, writes),)

    def _run_known(
        self,
        body: Body,
        writes: Writes,
        items: Any,
        first: int,
        lists: Sequence[list[Any]],
    ) -> Ended:
        steps = len(items) - first
        step = self._named(_step(watched(body, writes), lists))
        options: dict[str, Any] = {**self._plan(steps), "with_outputs": bool(lists)}
        if isinstance(items, range):
            begin, stride = items.start + first * items.step, items.step

            def indexed(carry: Carry, index: Any) -> Any:
                return step(carry, index, begin + index * stride)

            counted, inputs = self._named(indexed), None
        else:
            rest = items[first:] if first else items
            counted, inputs = step, rest if _is_array(rest) else Listed(rest)
        final, _ = checkpointed_loop(
            counted, writes.given, steps, inputs=inputs, with_index=True, **options
        )
        return None, None, (_with_rows(final, lists, writes),)

    def _stopped(
        self,
        body: Body,
        writes: Writes,
        test: Callable[[Carry], Any],
        item: Callable[[int], Any],
        most: int | None,
    ) -> Ended:
        """Run a loop that may break; its last iteration runs outside of it.

        The iteration that ends the loop returns its carry unchanged, and runs once more
        afterwards, where its value may be anything.
        """
        watched_body = watched(body, writes)

        def step(state: tuple[Carry, int, bool]) -> tuple[Carry, int, bool]:
            carry, index, _ = state
            signal, after, _ = watched_body(carry, item(index), index)
            return (after, index + 1, False) if signal is None else (carry, index, True)

        def goes_on(state: tuple[Carry, int, bool]) -> bool:
            return not state[2] and state[1] != most and bool(test(state[0]))

        (carry, index, stopped), _ = checkpointed_loop(
            self._named(step),
            (writes.given, 0, False),
            condition=goes_on,
            schedule=self._online(),
        )
        carry = writes.write_back(carry)
        if not stopped:
            return None, None, (carry,)
        return run_plainly(body, carry, (item(index),), ())

    def _named(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Give the step the name of the user's function, for messages."""
        step.__qualname__ = self._options.name
        return step

    def _plan(self, steps: int) -> dict[str, Any]:
        options = self._options
        if options.memory_budget is not None:
            return {"budget": options.memory_budget}
        if options.strategy == "revolve":
            held = options.num_checkpoints
            held = int(steps**0.5) if held is None else held
            return {"schedule": Revolve(steps, slots=held + 1)}
        return {"num_checkpoints": options.num_checkpoints}

    def _online(self) -> Online:
        held = self._options.num_checkpoints
        return Online(slots=32 if held is None else held + 1)

    def _is_plain(self, steps: int) -> bool:
        options = self._options
        return options.strategy == "none" or steps < max(options.min_loop_size, 1)


@contextmanager
def _naming(name: str, line: int) -> Iterator[None]:
    """Add the loop and its function to errors of recoup."""
    try:
        yield
    except RecoupError as error:
        error.add_note(f"in the loop at line {line} of {name!r}, which was rewritten")
        raise


def warn_about(message: str) -> None:
    """Warn the caller of the public function."""
    warnings.warn(message, UserWarning, stacklevel=4)


def _step(body: Callable[..., Any], lists: Sequence[list[Any]]) -> Callable[..., Any]:
    # Not the lists themselves: elements added later are no captures of the step.
    has_rows = bool(lists)

    def step(carry: Carry, index: Any = None, item: Any = None) -> Any:
        _, after, row = body(carry, item, index)
        return (after, row) if has_rows else after

    return step


def _snapshot(functions: list[Any], state: Any) -> StateSnapshot:
    """Return the state, besides variables, that the steps of a loop may change."""
    leaves, _ = flatten(state)
    devices = {tensor.device for tensor in reach(*functions, *leaves, kind=Tensor)}
    return StateSnapshot(*functions, *leaves, devices=devices)


def _with_rows(final: Any, lists: Sequence[list[Any]], writes: Writes) -> Carry:
    if not lists:
        return writes.write_back(final)
    carry, rows = final
    carry = writes.write_back(carry)
    for listed, stacked in zip(lists, rows or (), strict=False):
        listed.extend(stacked)
    for listed, variable in zip(lists, writes.row_objects(carry), strict=False):
        if variable is not None:
            listed[-1] = variable
    return carry


def _sequence(items: Any, line: int) -> Any:
    if isinstance(items, (range, list, tuple)) or _is_array(items):
        return items
    if isinstance(items, (itertools.count, itertools.cycle, itertools.repeat)):
        raise UnsupportedError(
            f"the loop at line {line} iterates over {type(items).__name__}, which has "
            "no end; use `while`, or a range."
        )
    return list(items)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and value.ndim > 0


def _has_arrays(tree: Any) -> bool:
    leaves, _ = flatten(tree)
    return any(hasattr(leaf, "dtype") for leaf in leaves)


def _is_settled(carry: Carry) -> bool:
    """Return whether every variable is already an array.

    Others may become arrays in the first iteration, as `total = 0.0` does; that
    iteration then runs outside of the loop.
    """
    leaves, _ = flatten(carry)
    return all(hasattr(leaf, "dtype") for leaf in leaves)


def _is_jax(tree: Any) -> bool:
    jax = sys.modules.get("jax")
    leaves, _ = flatten(tree)
    return jax is not None and any(isinstance(leaf, jax.Array) for leaf in leaves)
