"""Bodies: what one loop of a function writes to, passes on and appends to."""

import ast
from typing import Any

from recoup.loops.rewriting.names import (
    changed_names,
    read_before_written,
    read_names,
    written_names,
)

LoopNode = ast.For | ast.While


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


def loop_state(
    loop: LoopNode, function: ast.FunctionDef, around: list[LoopNode]
) -> tuple[set[str], set[str]]:
    """Return what a loop writes to, and what of it passes on to iterations or out."""
    targets = [loop.target] if isinstance(loop, ast.For) else []
    written = written_names([*targets, *loop.body]) - set(appended_lists(loop))
    # What an operator writes to passes from one iteration to the next as well.
    written |= changed_names(loop.body) & local_names(function)
    tests: list[ast.AST] = [loop.test] if isinstance(loop, ast.While) else []
    early = read_before_written(loop.body, written) | (read_names(tests) & written)
    if isinstance(loop, ast.For):
        early -= written_names(targets)
    return written, early | (written & used_later(loop, function, around, ast.Load))


def appended_lists(loop: LoopNode) -> tuple[str, ...]:
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


def belongs(loop: LoopNode, kind: type[ast.stmt]) -> bool:
    """Return whether a `break` or `continue` belongs to this loop."""
    waiting: list[Any] = list(loop.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, kind):
            return True
        if not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def used_later(
    loop: LoopNode,
    function: ast.FunctionDef,
    around: list[LoopNode],
    use: type[ast.expr_context],
) -> set[str]:
    """Return the names read or set after the loop, or anywhere in a loop around it."""
    inside = {id(node) for node in ast.walk(loop)}
    end = loop.end_lineno or loop.lineno
    outer = {id(node) for other in around for node in ast.walk(other)}
    found: set[str] = set()
    for node in ast.walk(function):
        if id(node) in inside or not isinstance(node, ast.Name):
            continue
        later = node.lineno > end or id(node) in outer
        if later and isinstance(node.ctx, use):
            found.add(node.id)
    return found


def _argument_names(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    everything += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {argument.arg for argument in everything}


def local_names(function: ast.FunctionDef) -> set[str]:
    """Return the variables of a function, its arguments among them."""
    return _argument_names(function) | written_names(function.body)


def sure_names(loop: LoopNode, function: ast.FunctionDef) -> set[str]:
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
