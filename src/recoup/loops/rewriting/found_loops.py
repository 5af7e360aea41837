"""Loops found in a function's source: their carried variables and obstacles."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from recoup.loops.rewriting.names import (
    LoopNode,
    appended_lists,
    belongs,
    in_place_names,
    loop_state,
    own_statements,
    sure_names,
    written_names,
)
from recoup.loops.rewriting.obstacles import fault_of


@dataclass(frozen=True, slots=True)
class FoundLoop:
    """One loop of a function.

    Attributes:
        line: Its line in the file.
        carried: The variables that pass from one iteration to the next, or out.
        appended: The lists that it appends to, one element each iteration.
        breaks: Whether it contains a `break`.
        returns: Whether it contains a `return`.
        changed: Carried variables that it may write to in place.
        kept: Carried variables that the function may write to in place anywhere.
        changes_items: Whether it may write to the items that it iterates over.
        doubtful: Carried variables that may be unbound before or after it.
        fault: Why it cannot be rewritten, or None.
    """

    line: int
    carried: tuple[str, ...]
    appended: tuple[str, ...]
    breaks: bool
    returns: bool
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    changes_items: bool
    doubtful: tuple[str, ...]
    fault: str | None


def find_loops(function: ast.FunctionDef, first_line: int) -> dict[int, FoundLoop]:
    """Return all loops of the function, except in inner functions, by `id`.

    Examples:
        >>> lines = ["def f(x):", " for i in range(9):", "  y = x * i", "  x = y"]
        >>> source = chr(10).join([*lines, " return x"])
        >>> (loop,) = find_loops(ast.parse(source).body[0], 1).values()
        >>> loop.carried, loop.line, loop.fault
        (('x',), 2, None)
    """
    found: dict[int, FoundLoop] = {}
    _visit(function.body, function, [], found, first_line)
    return found


def _visit(
    body: Iterable[ast.AST],
    function: ast.FunctionDef,
    around: list[LoopNode],
    found: dict[int, FoundLoop],
    first_line: int,
) -> None:
    for node in body:
        if isinstance(node, (ast.For, ast.While)):
            found[id(node)] = _describe(node, function, around, first_line)
            _visit(node.body, function, [*around, node], found, first_line)
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside = ast.iter_child_nodes(node)
            _visit(inside, function, around, found, first_line)


def _describe(
    loop: LoopNode, function: ast.FunctionDef, around: list[LoopNode], first_line: int
) -> FoundLoop:
    _, carried = loop_state(loop, function, around)
    nodes = own_statements(loop.body)
    changed = in_place_names(loop.body)
    return FoundLoop(
        line=first_line + loop.lineno - 1,
        carried=tuple(sorted(carried)),
        appended=appended_lists(loop),
        breaks=belongs(loop, ast.Break),
        returns=any(isinstance(node, ast.Return) for node in nodes),
        changed=tuple(sorted(carried & changed)),
        kept=tuple(sorted(carried & in_place_names(function.body))),
        changes_items=isinstance(loop, ast.For)
        and bool(changed & written_names([loop.target])),
        doubtful=tuple(sorted(carried - sure_names(loop, function))),
        fault=fault_of(loop, function, around, first_line),
    )
