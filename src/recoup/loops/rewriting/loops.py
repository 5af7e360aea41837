"""Loops found in a function's source: what each carries, and what cannot be done."""

import ast
from dataclasses import dataclass
from typing import Any

from recoup.loops.rewriting.guards import guarded_loops, jump_past_finally
from recoup.loops.rewriting.names import (
    changed_names,
    free_names,
    read_before_written,
    read_names,
    root_names,
    written_names,
)

LoopNode = ast.For | ast.While

_INNER = (ast.FunctionDef, ast.Lambda, ast.GeneratorExp)
_EAGER = ("sum", "any", "all", "max", "min", "list", "tuple", "set", "dict", "sorted")
_CHANGES = {
    *("append", "appendleft", "extend", "extendleft", "insert", "add", "update"),
    *("remove", "discard", "clear", "sort", "reverse"),
}
_CHANGES_AND_RETURNS = {"pop", "popleft", "popitem", "setdefault"}


@dataclass(frozen=True, slots=True)
class FoundLoop:
    """One loop of a function.

    Attributes:
        line: Its line in the file.
        carried: The variables that pass from one iteration to the next, or out.
        appended: The lists that it appends to, one element each iteration.
        breaks: It holds a `break`.
        returns: It holds a `return`.
        doubtful: Those of the carried that may have no value before or after it.
        fault: Why it cannot be rewritten, or None.
    """

    line: int
    carried: tuple[str, ...]
    appended: tuple[str, ...]
    breaks: bool
    returns: bool
    doubtful: tuple[str, ...]
    fault: str | None


def find_loops(function: ast.FunctionDef, first_line: int) -> dict[int, FoundLoop]:
    """Return every loop of the function that is not in an inner function, by `id`.

    Args:
        function: The parsed function.
        first_line: The line of the file where its source begins.

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


def own_statements(body: list[ast.stmt]) -> list[ast.AST]:
    """Return all nodes of a loop's body that belong to it and not to an inner scope."""
    waiting: list[ast.AST] = list(body)
    nodes: list[ast.AST] = []
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))
    return nodes


def append_target(statement: ast.AST) -> str | None:
    """Return the name of the list in `name.append(value)`."""
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append"),
                args=[_],
                keywords=[],
            )
        ):
            return name
        case _:
            return None


def _visit(
    body: list[ast.stmt],
    function: ast.FunctionDef,
    around: list[LoopNode],
    found: dict[int, FoundLoop],
    first_line: int,
) -> None:
    for statement in body:
        if isinstance(statement, (ast.For, ast.While)):
            found[id(statement)] = _describe(statement, function, around, first_line)
            inner = [*around, statement]
            _visit(statement.body, function, inner, found, first_line)
            continue
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            inside = getattr(statement, field, [])
            _visit(inside, function, around, found, first_line)
        for part in (*getattr(statement, "handlers", []), *_cases(statement)):
            _visit(part.body, function, around, found, first_line)


def _cases(statement: ast.stmt) -> list[ast.match_case]:
    return statement.cases if isinstance(statement, ast.Match) else []


def _describe(
    loop: LoopNode, function: ast.FunctionDef, around: list[LoopNode], first_line: int
) -> FoundLoop:
    appended = _appended(loop)
    body = [s for s in loop.body if append_target(s) not in appended]
    targets = [loop.target] if isinstance(loop, ast.For) else []
    written = written_names([*targets, *loop.body]) - set(appended)
    # What an operator writes to passes from one iteration to the next as well.
    written |= changed_names(loop.body) & _local_names(function)
    tests: list[ast.AST] = [loop.test] if isinstance(loop, ast.While) else []
    early = read_before_written(loop.body, written) | (read_names(tests) & written)
    if isinstance(loop, ast.For):
        early -= written_names(targets)
    late = written & _read_elsewhere(loop, function, around)
    nodes = own_statements(loop.body)
    carried = tuple(sorted(early | late))
    return FoundLoop(
        line=first_line + loop.lineno - 1,
        carried=carried,
        appended=appended,
        breaks=_belongs(loop, ast.Break),
        returns=any(isinstance(node, ast.Return) for node in nodes),
        doubtful=tuple(n for n in carried if n not in _sure_names(loop, function)),
        fault=_guarded(loop, function, first_line)
        or _fault(loop, function, written, body, first_line, set(carried))
        or _hidden_change(loop, function, written, set(carried), first_line),
    )


def _guarded(loop: LoopNode, function: ast.FunctionDef, first_line: int) -> str | None:
    """Return what goes on after an exception in the loop, or after a jump."""
    guard = guarded_loops(function).get(id(loop))
    if guard is not None:
        around, line = guard
        return (
            f"line {first_line + line - 1} has {around} around it, which would see "
            "the variables of before the loop"
        )
    jump = jump_past_finally(loop.body)
    if jump is not None:
        line = first_line + jump.lineno - 1
        return f"line {line} leaves an iteration, and a `finally` comes after it"
    return None


def _argument_names(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    everything += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {argument.arg for argument in everything}


def _local_names(function: ast.FunctionDef) -> set[str]:
    return _argument_names(function) | written_names(function.body)


def _sure_names(loop: LoopNode, function: ast.FunctionDef) -> set[str]:
    """Return the variables that surely have a value when the loop begins."""
    if any(isinstance(node, ast.Delete) for node in ast.walk(function)):
        return set()
    found = _argument_names(function)
    for statement in function.body:
        if any(node is loop for node in ast.walk(statement)):
            break
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            found |= written_names([statement])
    return found


def _hidden_change(
    loop: LoopNode,
    function: ast.FunctionDef,
    written: set[str],
    carried: set[str],
    first_line: int,
) -> str | None:
    """Return what the loop changes, or what sees its changes, without naming it."""
    inside = {id(node) for top in loop.body for node in ast.walk(top)}
    eager = _consumed_at_once(function)
    writers: set[str] = set()
    for node in ast.walk(function):
        if node is function or id(node) in inside or not isinstance(node, _INNER):
            continue
        if node.lineno > (loop.end_lineno or loop.lineno):
            continue
        if isinstance(node, ast.FunctionDef) and _writes_around(node):
            writers.add(node.name)
        seen = sorted(free_names(node) & written)
        if seen and id(node) not in eager:
            line = first_line + node.lineno - 1
            return f"line {line} makes a function or generator that reads {seen[0]!r}"
    called = sorted(writers & read_names(loop.body))
    if called:
        return f"it uses {called[0]!r}, which writes to a variable around it"
    own, appended = written - carried, _appended(loop)
    for node in own_statements(loop.body):
        changed = _container_change(node)
        if append_target(node) in appended or changed is None:
            continue
        roots = root_names(changed)
        if not roots or not roots <= own:
            line = first_line + changed.lineno - 1
            return f"line {line} changes what {ast.unparse(changed)!r} refers to"
    return None


def _consumed_at_once(function: ast.FunctionDef) -> set[int]:
    """Return the arguments of functions that run through a generator at once."""
    return {
        id(argument)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id in _EAGER
        for argument in node.args
    }


def _writes_around(function: ast.FunctionDef) -> bool:
    return any(isinstance(n, (ast.Nonlocal, ast.Global)) for n in ast.walk(function))


def _container_change(node: ast.AST) -> ast.expr | None:
    """Return the container that a piece of code changes by one of its methods."""
    match node:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=container, attr=attr))
        ) if attr in _CHANGES:
            return container
        case ast.Call(func=ast.Attribute(value=container, attr=attr)) if (
            attr in _CHANGES_AND_RETURNS
        ):
            return container
        case _:
            return None


def _read_elsewhere(
    loop: LoopNode, function: ast.FunctionDef, around: list[LoopNode]
) -> set[str]:
    """Return the names read after the loop, or anywhere in a loop around it."""
    inside = {id(node) for node in ast.walk(loop)}
    end = loop.end_lineno or loop.lineno
    outer = {id(node) for other in around for node in ast.walk(other)}
    found: set[str] = set()
    for node in ast.walk(function):
        if id(node) in inside or not isinstance(node, ast.Name):
            continue
        later = node.lineno > end or id(node) in outer
        if later and isinstance(node.ctx, ast.Load):
            found.add(node.id)
    return found


def _appended(loop: LoopNode) -> tuple[str, ...]:
    """Return the lists that the loop appends to once and uses in no other way."""
    names = [append_target(statement) for statement in loop.body]
    found: list[str] = []
    for name in dict.fromkeys(n for n in names if n is not None):
        uses = sum(
            isinstance(node, ast.Name) and node.id == name for node in ast.walk(loop)
        )
        if uses == 1:
            found.append(name)
    return tuple(found)


def _belongs(loop: LoopNode, kind: type[ast.stmt]) -> bool:
    """Return whether a `break` or `continue` belongs to this loop."""
    waiting: list[Any] = list(loop.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, kind):
            return True
        if not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def _fault(
    loop: LoopNode,
    function: ast.FunctionDef,
    written: set[str],
    body: list[ast.stmt],
    first_line: int,
    carried: set[str],
) -> str | None:
    appended = _appended(loop)
    own = written - carried  # made anew in every iteration
    if loop.orelse:
        return "it has an `else`"
    shared = {
        name
        for node in ast.walk(function)
        if isinstance(node, (ast.Global, ast.Nonlocal))
        for name in node.names
    }
    if shared & written:
        return f"it writes to {sorted(shared & written)[0]!r}, a global or nonlocal"
    for node in own_statements(loop.body):
        reason = _node_fault(node) or _advance(node, own)
        if reason is not None:
            line = first_line + getattr(node, "lineno", 1) - 1
            return f"line {line} {reason}"
    for node in own_statements(body):
        name = append_target(node)
        if name is not None and name not in own:
            return f"it appends to {name!r} conditionally, repeatedly, or reads it"
    if appended and (_belongs(loop, ast.Break) or _belongs(loop, ast.Continue)):
        return f"it appends to {appended[0]!r} and holds a `break` or `continue`"
    if appended and any(isinstance(n, ast.Return) for n in own_statements(loop.body)):
        return f"it appends to {appended[0]!r} and holds a `return`"
    return None


def _advance(node: ast.AST, own: set[str]) -> str | None:
    """Say that a piece of code advances an iterator that is not of this iteration."""
    match node:
        case ast.Call(func=ast.Name(id="next"), args=[ast.Call(), *_]):
            return None
        case ast.Call(func=ast.Name(id="next"), args=[ast.Name(id=name), *_]) if (
            name in own
        ):
            return None
        case ast.Call(func=ast.Name(id="next")):
            return "advances an iterator"
        case _:
            return None


def _node_fault(node: ast.AST) -> str | None:
    match node:
        case ast.Yield() | ast.YieldFrom():
            return "yields"
        case ast.Await() | ast.AsyncFor() | ast.AsyncWith():
            return "awaits"
        case ast.Delete():
            return "deletes a variable"
        case ast.Attribute(ctx=ast.Store()):
            return "writes to an attribute"
        case ast.Call(func=ast.Name(id="setattr" | "delattr")):
            return "writes to an attribute"
        case ast.Import() | ast.ImportFrom():
            return "imports"
        case ast.ClassDef():
            return "defines a class"
        case _:
            return None
