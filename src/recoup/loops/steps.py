"""Steps: the user's function in one form, whatever it takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recoup.errors import UsageError
from recoup.loops.feeds import Feed

Function = Callable[..., Any]


class KindError(UsageError):
    """A state is built otherwise at one end of the loop than at the other."""


class ConcreteError(KindError):
    """A step needs a number where tracing it gives it a symbol."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a loop.

    Attributes:
        function: The user's function: `state -> state`, with the index and the
            step's input as further arguments where they are asked for.
        feed: The inputs of all steps, or None.
        with_index: The function takes the index of the step.
        with_outputs: The function returns the new state and an output.
    """

    function: Function
    feed: Feed | None = None
    with_index: bool = False
    with_outputs: bool = False

    @property
    def name(self) -> str:
        """What messages call the step."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def run(self, state: Any, index: int, given: Any = None) -> tuple[Any, Any]:
        """Run step `index` and return the new state and its output, if it has one."""
        if self.feed is None:
            arguments = (index,) if self.with_index else ()
        else:
            arguments = (index, given) if self.with_index else (given,)
        result = self.function(state, *arguments)
        if not self.with_outputs:
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise UsageError(
                f"{self.name!r} is to return the new state and an output, because of "
                f"with_outputs=True: got {type(result).__name__}. Return a pair."
            )
        return result

    def advance(self, state: Any, start: int, stop: int) -> Any:
        """Run steps one after the other and return the last state."""
        function = self.function
        if self.feed is None and not self.with_outputs:
            if self.with_index:
                for index in range(start, stop):
                    state = function(state, index)
            else:
                for _ in range(start, stop):
                    state = function(state)
            return state
        for index in range(start, stop):
            given = None if self.feed is None else self.feed.at(index)
            state, _ = self.run(state, index, given)
        return state
