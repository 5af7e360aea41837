"""Escapes: functions and generators made in a loop that may be used after their time.

In Python they see the variables of the function as these are when they are called. The
body of a checkpointed loop is a function of its own, so they would see those of their
iteration. That is the same as long as they are used up within it.
"""

import ast
from collections.abc import Iterable

from recoup.loops.rewriting.names import free_names

INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)
"""What sees the variables around it when it is called, not when it is made."""

EAGER = {
    *("sum", "any", "all", "max", "min", "list", "tuple", "set", "dict", "sorted"),
    *("frozenset", "reduce", "next"),
}
"""Functions that are done with a function or a generator when they return."""

_LAZY = {
    *("map", "filter", "zip", "enumerate", "iter", "partial", "chain", "islice"),
    *("starmap", "takewhile", "dropwhile", "accumulate", "cycle", "repeat"),
}
_KEEPING = {
    *("append", "appendleft", "extend", "extendleft", "insert", "add", "update"),
    *("setdefault", "put", "push", "send", "connect", "subscribe", "submit"),
}
_KEEPING_BEGINNINGS = ("register", "add_", "set_", "on_")


def escaping(
    body: Iterable[ast.stmt], *, own: set[str], moving: set[str]
) -> ast.AST | None:
    """Return a function or generator of a loop that may outlive its iteration.

    Args:
        body: The loop's body.
        own: The variables that are set anew in every iteration and not read after it.
        moving: The variables that change in the loop or after it.

    Returns:
        The first that would see such a variable at a wrong time, or that passes to the
        next iteration: none is the same as the one before.

    Examples:
        >>> body = ast.parse("f = lambda: x * 2; x = g(f) + f()").body
        >>> escaping(body, own={"f"}, moving={"x"}) is None
        True
        >>> ast.unparse(escaping(body, own=set(), moving={"x"}))
        'lambda: x * 2'
    """
    tops = list(body)
    parents = {
        id(child): node
        for top in tops
        for node in ast.walk(top)
        for child in ast.iter_child_nodes(node)
    }
    nodes = [node for top in tops for node in ast.walk(top)]
    for node in nodes:
        if not isinstance(node, INNER):
            continue
        name = _name_of(node, parents)
        matters = free_names(node) & moving or (name is not None and name not in own)
        if matters and _escapes(node, nodes, parents, own):
            return node
    return None


def _name_of(node: ast.AST, parents: dict[int, ast.AST]) -> str | None:
    """Return the variable that a function or generator is put in when it is made."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name
    match parents.get(id(node)):
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case _:
            return None


def _escapes(
    node: ast.AST, nodes: list[ast.AST], parents: dict[int, ast.AST], own: set[str]
) -> bool:
    decorators = getattr(node, "decorator_list", [])
    name = _name_of(node, parents)
    if name is not None:
        return bool(decorators) or _name_escapes(name, nodes, parents, own)
    match parents.get(id(node)):
        case ast.Call() as call:
            return _call_keeps(call, node, nodes, parents, own)
        case ast.keyword() as keyword:
            call = parents[id(keyword)]
            return not isinstance(call, ast.Call) or _call_keeps(
                call, node, nodes, parents, own
            )
        case ast.For(iter=source) | ast.comprehension(iter=source):
            return source is not node
        case _:
            return True


def _call_keeps(
    call: ast.Call,
    node: ast.AST,
    nodes: list[ast.AST],
    parents: dict[int, ast.AST],
    own: set[str],
) -> bool:
    """Return whether a call may leave its argument somewhere."""
    if call.func is node:
        return False
    match call.func:
        case ast.Name(id=name):
            method = False
        case ast.Attribute(attr=name):
            method = True
        case _:
            return False  # the result of a call is called, as in vmap(f)(x)
    if name in _LAZY:
        return _escapes(call, nodes, parents, own)
    if method:
        return name in _KEEPING or name.startswith(_KEEPING_BEGINNINGS)
    # A function returns; a generator that it was given may be in what it returns.
    return isinstance(node, ast.GeneratorExp) and name not in EAGER


def _name_escapes(
    name: str, nodes: list[ast.AST], parents: dict[int, ast.AST], own: set[str]
) -> bool:
    """Return whether a variable is used otherwise than to call what it stands for."""
    if name not in own:
        return True
    uses = [
        node
        for node in nodes
        if isinstance(node, ast.Name) and node.id == name
        if isinstance(node.ctx, ast.Load)
    ]
    return any(_escapes(use, nodes, parents, own) for use in uses)
