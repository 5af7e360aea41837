"""Guards: code around a loop, or in it, that goes on after an exception.

A checkpointed loop that raises has changed no variable yet; what goes on behind it
would see the variables of before. And what a `finally` does at the end of an iteration
comes after the iteration has said what it ends with.
"""

import ast
from collections.abc import Iterable

_PASS_ON = ("torch", "numpy", "np", "jax", "jnp", "autograd", "warnings", "recoup")
_PASS_ON_TOO = {
    *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast"),
    *("record_function", "profile", "catch_warnings", "errstate", "nullcontext"),
    *("open", "closing", "sdpa_kernel"),
}
_LOOPS = (ast.For, ast.While)
_TRIES = (ast.Try, ast.TryStar)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def guarded_loops(function: ast.FunctionDef) -> dict[int, tuple[str, int]]:
    """Return the loops that an exception may leave without ending the function.

    Returns:
        By the `id` of the loop, what is around it and on which line.

    Examples:
        >>> lines = ["def f(x):", " try:", "  for i in x: pass", " finally: pass"]
        >>> tree = ast.parse(chr(10).join(lines)).body[0]
        >>> list(guarded_loops(tree).values())
        [('a `try`', 2)]
    """
    found: dict[int, tuple[str, int]] = {}
    _search(function.body, None, found)
    return found


def may_swallow(statement: ast.With) -> bool:
    """Return whether a `with` may end exceptions, as `contextlib.suppress` does.

    Only contexts that are known to pass them on do not.

    Examples:
        >>> may_swallow(ast.parse("with torch.no_grad(): 1").body[0])
        False
        >>> may_swallow(ast.parse("with watch(): 1").body[0])
        True
    """
    return not all(_passes_on(item.context_expr) for item in statement.items)


def jump_past_finally(body: Iterable[ast.stmt]) -> ast.stmt | None:
    """Return a jump out of an iteration that a `finally` comes after.

    Args:
        body: The body of the loop.
    """
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
    body: Iterable[ast.stmt],
    guard: tuple[str, int] | None,
    found: dict[int, tuple[str, int]],
) -> None:
    for statement in body:
        if isinstance(statement, _SCOPES):
            continue
        if isinstance(statement, _TRIES):
            _search_try(statement, guard, found)
            continue
        if isinstance(statement, _LOOPS) and guard is not None:
            found[id(statement)] = guard
        inner = guard
        if isinstance(statement, ast.With) and may_swallow(statement):
            inner = ("a `with` that may end exceptions", statement.lineno)
        for field in ("body", "orelse"):
            _search(getattr(statement, field, []), inner, found)
        for case in getattr(statement, "cases", []):
            _search(case.body, inner, found)


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


def _passes_on(context: ast.expr) -> bool:
    name = context.func if isinstance(context, ast.Call) else context
    last = name.attr if isinstance(name, ast.Attribute) else None
    while isinstance(name, ast.Attribute):
        name = name.value
    if not isinstance(name, ast.Name):
        return False
    return name.id in _PASS_ON or (last or name.id) in _PASS_ON_TOO


def _jump(body: Iterable[ast.AST], *, in_loop: bool) -> ast.stmt | None:
    """Return a `return` in the code, or a jump of the loop around it."""
    for node in body:
        if isinstance(node, ast.Return):
            return node
        if isinstance(node, (ast.Break, ast.Continue)) and not in_loop:
            return node
        if isinstance(node, _SCOPES):
            continue
        deeper = in_loop or isinstance(node, _LOOPS)
        found = _jump(ast.iter_child_nodes(node), in_loop=deeper)
        if found is not None:
            return found
    return None
