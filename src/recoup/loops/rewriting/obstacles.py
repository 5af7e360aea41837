"""Obstacles: reasons why a loop cannot be rewritten.

A checkpointed loop that raises has changed no variable yet, so code that continues
after an exception would see the variables from before. Functions and generators made in
a loop see the values of its variables at the time they are called. The body of a
checkpointed loop is a separate function, so they must not outlive their iteration.
"""

import ast
from collections.abc import Iterable

from recoup.loops.rewriting.names import (
    SCOPES,
    LoopNode,
    append_target,
    appended_lists,
    belongs,
    free_names,
    in_place_names,
    is_in_place,
    loop_state,
    may_swallow,
    own_statements,
    read_names,
    root_names,
    used_later,
)

_LOOPS = (ast.For, ast.While)
_TRIES = (ast.Try, ast.TryStar)


def guarded_loops(function: ast.FunctionDef) -> dict[int, tuple[str, int]]:
    """Return the loops that an exception may leave without ending the function.

    Returns:
        By the `id` of the loop, the enclosing statement and its line.

    Examples:
        >>> lines = ["def f(x):", " try:", "  for i in x: pass", " finally: pass"]
        >>> tree = ast.parse(chr(10).join(lines)).body[0]
        >>> list(guarded_loops(tree).values())
        [('a `try`', 2)]
    """
    found: dict[int, tuple[str, int]] = {}
    _search(function.body, None, found)
    return found


def jump_past_finally(body: Iterable[ast.stmt]) -> ast.stmt | None:
    """Return a jump out of an iteration that a `finally` follows."""
    for top in body:
        for node in ast.walk(top):
            if isinstance(node, _TRIES) and node.finalbody:
                inside = [*node.body, *node.orelse, *node.finalbody]
                inside += [s for handler in node.handlers for s in handler.body]
                jump = _jump(inside, in_loop=False)
                if jump is not None:
                    return jump
    return None


def _search(
    body: Iterable[ast.AST],
    guard: tuple[str, int] | None,
    found: dict[int, tuple[str, int]],
) -> None:
    for statement in body:
        if isinstance(statement, SCOPES):
            continue
        if isinstance(statement, _TRIES):
            _search_try(statement, guard, found)
            continue
        if isinstance(statement, _LOOPS) and guard is not None:
            found[id(statement)] = guard
        inner = guard
        if isinstance(statement, ast.With) and may_swallow(statement):
            inner = ("a `with` that may suppress exceptions", statement.lineno)
        _search(ast.iter_child_nodes(statement), inner, found)


def _search_try(
    statement: ast.Try | ast.TryStar,
    guard: tuple[str, int] | None,
    found: dict[int, tuple[str, int]],
) -> None:
    own = ("a `try`", statement.lineno)
    late = own if statement.finalbody else guard
    _search(statement.body, own, found)
    _search(statement.orelse, late, found)
    for handler in statement.handlers:
        _search(handler.body, late, found)
    _search(statement.finalbody, guard, found)


def _jump(body: Iterable[ast.AST], *, in_loop: bool) -> ast.stmt | None:
    """Return a `return` in the code, or a jump of the loop around it."""
    for node in body:
        if isinstance(node, ast.Return):
            return node
        if isinstance(node, (ast.Break, ast.Continue)) and not in_loop:
            return node
        if isinstance(node, SCOPES):
            continue
        deeper = in_loop or isinstance(node, _LOOPS)
        found = _jump(ast.iter_child_nodes(node), in_loop=deeper)
        if found is not None:
            return found
    return None


INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)
"""Nodes that see the enclosing variables when called, not when made."""

EAGER = {
    *("sum", "any", "all", "max", "min", "list", "tuple", "set", "dict", "sorted"),
    *("frozenset", "reduce", "next"),
}
"""Functions that do not keep a function or generator argument after returning."""

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

    `own` variables are set in every iteration and not read after it; `moving` ones
    change in the loop or after it.

    Returns:
        The first that would see such a variable at a wrong time, or that passes to the
        next iteration, where another object replaces it.

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
    """Return the variable to which a function or generator is first assigned."""
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
    """Return whether a call may store its argument somewhere."""
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
    # A function is done on return; a generator argument may be in its result.
    return isinstance(node, ast.GeneratorExp) and name not in EAGER


def _name_escapes(
    name: str, nodes: list[ast.AST], parents: dict[int, ast.AST], own: set[str]
) -> bool:
    """Return whether a variable is used other than to call its value."""
    if name not in own:
        return True
    uses = [
        node
        for node in nodes
        if isinstance(node, ast.Name) and node.id == name
        if isinstance(node.ctx, ast.Load)
    ]
    return any(_escapes(use, nodes, parents, own) for use in uses)


_CHANGES = {
    *("append", "appendleft", "extend", "extendleft", "insert", "add", "update"),
    *("remove", "discard", "clear", "sort", "reverse"),
}
_COPYING = {
    *("range", "len", "list", "tuple", "sorted", "set", "clone", "copy", "size"),
    *("shape", "ndim", "dtype", "device", "numel", "dim"),
}
_CHANGES_AND_RETURNS = {"pop", "popleft", "popitem", "setdefault"}


def fault_of(
    loop: LoopNode, function: ast.FunctionDef, around: list[LoopNode], first_line: int
) -> str | None:
    """Return why a loop cannot be rewritten, or None."""
    written, carried = loop_state(loop, function, around)
    return (
        _guarded(loop, function, first_line)
        or _fault(loop, function, written, carried, first_line)
        or _hidden_change(loop, function, written, carried, first_line)
        or _escape(loop, function, around, first_line)
    )


def _guarded(loop: LoopNode, function: ast.FunctionDef, first_line: int) -> str | None:
    """Return which code continues after an exception in the loop, or after a jump."""
    guard = guarded_loops(function).get(id(loop))
    if guard is not None:
        around, line = guard
        return (
            f"line {first_line + line - 1} has {around} around it, which would see "
            "the variables from before the loop"
        )
    jump = jump_past_finally(loop.body)
    if jump is not None:
        line = first_line + jump.lineno - 1
        return f"line {line} leaves an iteration, and a `finally` follows it"
    return None


def _fault(
    loop: LoopNode,
    function: ast.FunctionDef,
    written: set[str],
    carried: set[str],
    first_line: int,
) -> str | None:
    appended = appended_lists(loop)
    body = [s for s in loop.body if append_target(s) not in appended]
    own = written - carried  # set in every iteration
    if loop.orelse:
        return "it has an `else`"
    if isinstance(loop, ast.For):
        both = sorted(_gone_over(loop.iter) & in_place_names(loop.body))
        if both:
            return f"it iterates over {both[0]!r} and writes to it"
    shared = {
        name
        for node in ast.walk(function)
        if isinstance(node, (ast.Global, ast.Nonlocal))
        for name in node.names
    }
    if shared & written:
        return f"it writes to {sorted(shared & written)[0]!r}, a global or nonlocal"
    for node in own_statements(loop.body):
        reason = _node_fault(node, own) or _hidden_write(node, own)
        if reason is not None:
            line = first_line + getattr(node, "lineno", 1) - 1
            return f"line {line} {reason}"
    for node in own_statements(body):
        name = append_target(node)
        if name is not None and name not in own:
            return f"it appends to {name!r} conditionally, repeatedly, or reads it"
    if appended and (belongs(loop, ast.Break) or belongs(loop, ast.Continue)):
        return f"it appends to {appended[0]!r} and contains a `break` or `continue`"
    if appended and any(isinstance(n, ast.Return) for n in own_statements(loop.body)):
        return f"it appends to {appended[0]!r} and contains a `return`"
    return None


def _gone_over(source: ast.AST) -> set[str]:
    """Return the variables that a `for` loop iterates over, without copying them."""
    match source:
        case ast.Call(func=ast.Name(id=name)) if name in _COPYING:
            return set()
        case ast.Call(func=ast.Attribute(attr=name)) if name in _COPYING:
            return set()
        case ast.Attribute(attr=name) if name in _COPYING:
            return set()
        case ast.Name(id=name):
            return {name}
        case _:
            parts = [_gone_over(part) for part in ast.iter_child_nodes(source)]
            return set[str]().union(*parts)


def _hidden_write(node: ast.AST, own: set[str]) -> str | None:
    """Return a reason if code writes to a tensor and bypasses the version counter."""
    match node:
        case ast.Subscript(ctx=ast.Store(), value=written):
            pass
        case ast.Call(func=ast.Attribute(value=written, attr=method)) if is_in_place(
            method
        ):
            pass
        case _:
            return None
    through = any(
        isinstance(part, ast.Attribute) and part.attr == "data"
        for part in ast.walk(written)
    )
    if through and not root_names(written) <= own:
        return "writes to the `data` of a tensor"
    return None


def _node_fault(node: ast.AST, own: set[str]) -> str | None:
    """Return a reason if code has an effect outside of this iteration."""
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
        case ast.Call(func=ast.Name(id="next"), args=[iterator, *_]):
            is_own = isinstance(iterator, ast.Name) and iterator.id in own
            is_new = isinstance(iterator, ast.Call)
            return None if is_own or is_new else "advances an iterator"
        case ast.Import() | ast.ImportFrom():
            return "imports"
        case ast.ClassDef():
            return "defines a class"
        case _:
            return None


def _hidden_change(
    loop: LoopNode,
    function: ast.FunctionDef,
    written: set[str],
    carried: set[str],
    first_line: int,
) -> str | None:
    """Return a reason if the loop has hidden changes, or something sees its changes."""
    inside = {id(node) for top in loop.body for node in ast.walk(top)}
    eager = _consumed_at_once(function)
    writers: set[str] = set()
    for node in ast.walk(function):
        if node is function or id(node) in inside or not isinstance(node, INNER):
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
    own, appended = written - carried, appended_lists(loop)
    for node in own_statements(loop.body):
        changed = _container_change(node)
        if append_target(node) in appended or changed is None:
            continue
        roots = root_names(changed)
        if not roots or not roots <= own:
            line = first_line + changed.lineno - 1
            return f"line {line} changes the object that {ast.unparse(changed)!r} names"
    return None


def _consumed_at_once(function: ast.FunctionDef) -> set[int]:
    """Return the arguments of functions that consume a generator immediately."""
    return {
        id(argument)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id in EAGER
        for argument in node.args
    }


def _writes_around(function: ast.FunctionDef) -> bool:
    return any(isinstance(n, (ast.Nonlocal, ast.Global)) for n in ast.walk(function))


def _container_change(node: ast.AST) -> ast.expr | None:
    """Return the container that code changes by one of its methods."""
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


def _escape(
    loop: LoopNode, function: ast.FunctionDef, around: list[LoopNode], first_line: int
) -> str | None:
    """Return a reason if code would see variables of another time.

    Objects made by an enclosing loop may still exist in its next iteration.
    """
    for depth, made_in in enumerate([*around, loop]):
        written, carried = loop_state(made_in, function, around[:depth])
        moving = written | used_later(made_in, function, around[:depth], ast.Store)
        node = escaping(made_in.body, own=written - carried, moving=moving)
        if node is not None:
            line = first_line + getattr(node, "lineno", 1) - 1
            return (
                f"line {line} makes a function or generator that may be used after "
                "its iteration"
            )
    return None
