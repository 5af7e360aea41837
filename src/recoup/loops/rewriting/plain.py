"""Plain: the loops of a rewritten function, carried out without checkpoints."""

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Carry = tuple[Any, ...]
Body = Callable[[Carry, Any], tuple[str | None, Any, tuple[Any, ...]]]
Ended = tuple[str | None, Any, tuple[Carry]]


def run_plainly(
    body: Body, carry: Carry, items: Iterable[Any], lists: Sequence[list[Any]]
) -> Ended:
    """Run a `for` loop; return how it ended, with which value, and the carry."""
    for item in items:
        signal, after, row = body(carry, item)
        if signal == "return":
            return signal, after, (carry,)
        carry = after
        if signal == "break":
            return signal, None, (carry,)
        append_row(lists, row)
    return None, None, (carry,)


def run_while_plainly(
    body: Body,
    carry: Carry,
    test: Callable[[Carry], Any],
    lists: Sequence[list[Any]],
) -> Ended:
    """Run a `while` loop; return how it ended, with which value, and the carry."""
    while test(carry):
        signal, value, (carry,) = run_plainly(body, carry, (None,), lists)
        if signal is not None:
            return signal, value, (carry,)
    return None, None, (carry,)


def append_row(lists: Sequence[list[Any]], row: Sequence[Any]) -> None:
    """Append what one iteration gave to the lists it goes to."""
    for listed, value in zip(lists, row, strict=False):
        listed.append(value)


def bound(function: Any) -> Any:
    """Return the function with the variables around it fixed at what they are now.

    In backward the function around the loop has gone on, and may have changed them.
    """
    cells = [_copied(cell) for cell in function.__closure__ or ()]
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, tuple(cells)
    )


def _copied(cell: types.CellType) -> types.CellType:
    try:
        return types.CellType(cell.cell_contents)
    except ValueError:  # no value yet
        return types.CellType()
