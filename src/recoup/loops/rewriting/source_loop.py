"""Source loops: a loop of a rewritten function, with what its source shows about it."""

import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Carry = tuple[Any, ...]
Body = Callable[[Carry, Any], tuple[str | None, Any, tuple[Any, ...]]]
Ended = tuple[str | None, Any, tuple[Carry]]


@dataclass(frozen=True, slots=True)
class SourceLoop:
    """A loop of the source that is about to run.

    Attributes:
        body: One iteration, as a function of the carry and the item.
        items: The items of a `for` loop, as a sequence; None for a `while` loop.
        test: The condition of a `while` loop.
        sources: The objects that the items were taken from.
        lists: The lists that it appends to.
        line: Its line in the file.
        stops: Whether it contains a `break` or a `return`.
        names: The names of the carried variables.
        changed: As `FoundLoop.changed`.
        kept: As `FoundLoop.kept`.
        changes_items: As `FoundLoop.changes_items`.
    """

    body: Body
    items: Any
    test: Callable[[Carry], Any] | None
    sources: Sequence[Any]
    lists: Sequence[list[Any]]
    line: int
    stops: bool
    names: Sequence[str]
    changed: Sequence[str] = ()
    kept: Sequence[str] = ()
    changes_items: bool = False

    @property
    def functions(self) -> list[Any]:
        """The functions that it is made of."""
        return [self.body] if self.test is None else [self.body, self.test]

    @property
    def seen(self) -> list[Any]:
        """The objects besides variables that its steps see."""
        return self.functions if self.test else [self.body, self.items]

    def given(self, carry: Carry) -> Any:
        """Return the values that it starts from."""
        return carry if self.items is None else (carry, self.items)

    def goes_on(self, carry: Carry) -> bool:
        """Return whether the condition holds; a `for` loop has none."""
        return self.test is None or bool(self.test(carry))

    def item(self, index: int) -> Any:
        """Return the item of an iteration."""
        return None if self.items is None else self.items[index]

    def run_once(self, carry: Carry, item: Any) -> Ended:
        """Run one iteration as written."""
        signal, after, row = self.body(carry, item)
        if signal == "return":
            return signal, after, (carry,)
        if signal is None:
            for listed, value in zip(self.lists, row, strict=False):
                listed.append(value)
        return signal, None, (after,)

    def run_plainly(self, carry: Carry, first: int = 0) -> Ended:
        """Run the iterations from `first` on as written."""
        items = itertools.repeat(None)
        if self.test is None:
            items = itertools.islice(self.items, first, None)
        for item in items:
            if not self.goes_on(carry):
                break
            signal, value, (carry,) = self.run_once(carry, item)
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
