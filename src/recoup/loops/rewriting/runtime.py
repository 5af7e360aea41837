"""Runtime: the functions that loops of a rewritten function call."""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recoup.backend.state.snapshots import StateSnapshot
from recoup.backend.state.walk import reach
from recoup.core.callers import user_stacklevel
from recoup.errors import RecoupError, UnsupportedError, UsageError
from recoup.loops.loop import checkpointed_loop
from recoup.loops.rewriting.source_loop import (
    Body,
    Carry,
    Ended,
    SourceLoop,
    bound,
)
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

UNDEFINED = Undefined()
_STRATEGIES = ("auto", "revolve", "dynamic", "none")


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of the loops of a rewritten function; see `grad`.

    Attributes:
        name: The function, for messages.
        enabled: Whether its loops are checkpointed.
        strategy: "auto" (at equal distances), "revolve", "dynamic" (as for an unknown
            length) or "none" (not checkpointed).
        num_checkpoints: States to hold; None for the square root of the steps.
        memory_budget: Bytes that may be held instead.
        min_loop_size: Shorter loops run plain.
        on_unsupported: "raise", or "warn": an unsupported loop runs plain.

    Raises:
        UsageError: An option is unknown, or two exclude each other.
    """

    name: str
    enabled: bool = True
    strategy: str = "auto"
    num_checkpoints: int | None = None
    memory_budget: int | str | None = None
    min_loop_size: int = 100
    on_unsupported: str = "warn"

    def __post_init__(self) -> None:
        if self.on_unsupported not in ("warn", "raise"):
            raise UsageError(
                f'expected on_unsupported="warn" or "raise", got '
                f"{self.on_unsupported!r}."
            )
        if self.strategy not in _STRATEGIES:
            raise UsageError(
                f"expected strategy to be one of {', '.join(_STRATEGIES)}, got "
                f"{self.strategy!r}."
            )
        if self.memory_budget is not None and self.num_checkpoints:
            raise UsageError(
                "expected memory_budget or num_checkpoints, got both; leave one out."
            )


class Runtime:
    """Runs the loops of one rewritten function.

    The result of a loop is its end signal, its value, and the carry.
    """

    undefined = UNDEFINED

    def __init__(self, options: LoopOptions) -> None:
        self._options = options

    def value(self, read: Callable[[], Any]) -> Any:
        """Return a variable's value, or a marker if it is unbound."""
        try:
            return read()
        except NameError:
            return UNDEFINED

    def run_for(
        self, body: Body, carry: Carry, items: Any, *, line: int, **facts: Any
    ) -> Ended:
        """Run a `for` loop; `facts` are further fields of `SourceLoop`."""
        sources = [] if isinstance(items, (list, tuple)) else sources_of(items)
        items = _sequence(items, line)
        loop = SourceLoop(bound(body), items, None, sources, line=line, **facts)
        return self._run(loop, carry)

    def run_while(
        self, body: Body, carry: Carry, test: Callable[[Carry], Any], **facts: Any
    ) -> Ended:
        """Run a `while` loop; `facts` are further fields of `SourceLoop`."""
        return self._run(SourceLoop(bound(body), None, bound(test), (), **facts), carry)

    def _run(self, loop: SourceLoop, carry: Carry) -> Ended:
        if self._is_plain(loop):
            return loop.run_plainly(carry)
        if loop.stops and _is_jax(loop.given(carry)):
            self.refuse(
                f"the loop at line {loop.line} of {self._options.name!r} is not "
                "checkpointed and runs plain: over JAX arrays it may not break or "
                "return; put its end into the condition of a while loop."
            )
            return loop.run_plainly(carry)
        if loop.changes_items and not isinstance(loop.items, range):
            self._complain(WriteError("it writes to what it iterates over"), loop.line)
            return loop.run_plainly(carry)
        first = 0
        if not _is_settled(carry):
            if not loop.goes_on(carry):
                return None, None, (carry,)
            signal, value, (carry,) = loop.run_once(carry, loop.item(0))
            if signal is not None:
                return signal, value, (carry,)
            first = 1
        if not _has_arrays(loop.given(carry)) and not loop.lists:
            return loop.run_plainly(carry, first)
        before = _snapshot(loop.functions, loop.given(carry))
        try:
            with _naming(self._options.name, loop.line):
                writes = Writes(loop, carry)
                if loop.stops:
                    return self._stopped(loop, writes, first)
                return self._run_checkpointed(loop, writes, first)
        except KindError as error:
            before.restore()
            self._complain(error, loop.line)
            return loop.run_plainly(carry, first)

    def refuse(self, message: str) -> None:
        """Warn, or raise `UnsupportedError` if the options say so."""
        if self._options.on_unsupported == "raise":
            raise UnsupportedError(message)
        warnings.warn(message, UserWarning, stacklevel=user_stacklevel())

    def _complain(self, error: KindError, line: int) -> None:
        if self._options.on_unsupported == "raise":
            raise error
        loop = f"the loop at line {line} of {self._options.name!r}"
        if isinstance(error, WriteError):
            self.refuse(
                f"{loop} is not checkpointed and runs plain: {error}; change it, or "
                "call checkpointed_loop."
            )
        elif isinstance(error, ConcreteError):
            self.refuse(f"{loop} runs plain: {error}")
        else:
            self.refuse(
                f"{loop} runs plain: one of its variables is an array at one time and "
                "something else at another, changes its structure, or hides arrays; "
                "begin with arrays, in tuples, lists and dictionaries."
            )

    def _run_checkpointed(self, loop: SourceLoop, writes: Writes, first: int) -> Ended:
        step = self._named(_step(watched(loop.body, writes), loop.lists))
        options: dict[str, Any] = {"with_outputs": bool(loop.lists)}
        items = loop.items
        if loop.test is not None:
            options |= {"condition": loop.test, "schedule": self._online()}
        else:
            steps = len(items) - first
            options |= {**self._plan(steps), "seq_length": steps, "with_index": True}
        if isinstance(items, range):
            begin, stride = items.start + first * items.step, items.step
            unindexed = step

            def indexed(carry: Carry, index: Any) -> Any:
                return unindexed(carry, index, begin + index * stride)

            step = self._named(indexed)
        elif items is not None:
            rest = items[first:] if first else items
            options["inputs"] = rest if _is_array(rest) else Listed(rest)
        final, _ = checkpointed_loop(step, writes.given, **options)
        return None, None, (_with_rows(final, loop.lists, writes),)

    def _stopped(self, loop: SourceLoop, writes: Writes, first: int) -> Ended:
        """Run a loop that may break; its last iteration runs outside of it.

        The iteration that ends the loop returns its carry unchanged, and runs once more
        afterwards, where its value may be anything.
        """
        # Not the loop itself: all that the step can reach counts as captured.
        body, items = watched(loop.body, writes), loop.items
        most = None if items is None else len(items) - first

        def step(state: tuple[Carry, int, bool]) -> tuple[Carry, int, bool]:
            carry, index, _ = state
            item = None if items is None else items[first + index]
            signal, after, _ = body(carry, item, index)
            return (after, index + 1, False) if signal is None else (carry, index, True)

        def goes_on(state: tuple[Carry, int, bool]) -> bool:
            return not state[2] and state[1] != most and loop.goes_on(state[0])

        (carry, index, stopped), _ = checkpointed_loop(
            self._named(step),
            (writes.given, 0, False),
            condition=goes_on,
            schedule=self._online(),
        )
        carry = writes.write_back(carry)
        if not stopped:
            return None, None, (carry,)
        return loop.run_once(carry, loop.item(first + index))

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

    def _is_plain(self, loop: SourceLoop) -> bool:
        least = max(self._options.min_loop_size, 1)
        is_short = loop.test is None and len(loop.items) < least
        return is_short or self._options.strategy == "none"


@contextmanager
def _naming(name: str, line: int) -> Iterator[None]:
    """Add the loop and its function to errors of recoup."""
    try:
        yield
    except RecoupError as error:
        error.add_note(f"in the loop at line {line} of {name!r}, which was rewritten")
        raise


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
