"""Names: the variables that code reads and writes, their order and their loops."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_PASS_ON = ("torch", "numpy", "np", "jax", "jnp", "autograd", "warnings", "recoup")
_PASS_ON_TOO = {
    *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast"),
    *("record_function", "profile", "catch_warnings", "errstate", "nullcontext"),
    *("open", "closing", "sdpa_kernel"),
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def written_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the variables that code assigns in its own scope.

    Examples:
        >>> tree = ast.parse("a, b = c; d[0] += 1; [e for e in f]; g: int = 2")
        >>> sorted(written_names(tree.body))
        ['a', 'b', 'd', 'g']
    """
    found: set[str] = set()
    for node in _own_nodes(body):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.Subscript(ctx=ast.Store()):
                found.update(root_names(node))
            case (
                ast.FunctionDef(name=str(name))
                | ast.ClassDef(name=str(name))
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add((asname or name).split(".")[0])
    return found


def changed_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the variables whose content code changes, judged by syntax.

    These have a method call whose name ends like torch's in-place methods, or are
    passed as `out=`.

    Examples:
        >>> tree = ast.parse("a.mul_(2).add_(b); c = d.exp(); torch.add(c, d, out=e)")
        >>> sorted(changed_names(tree.body))
        ['a', 'e']
    """
    found: set[str] = set()
    for node in _own_nodes(body):
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg == "out":
                found |= root_names(keyword.value)
        if isinstance(node.func, ast.Attribute) and is_in_place(node.func.attr):
            found |= root_names(node.func.value)
    return found


def in_place_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the variables that code may write to in place, judged by syntax.

    Examples:
        >>> tree = ast.parse("a.mul_(2); b[0] = c; d += 1; e = f")
        >>> sorted(in_place_names(tree.body))
        ['a', 'b', 'd']
    """
    code = list(body)
    found = changed_names(code)
    for node in _own_nodes(code):
        match node:
            case ast.Subscript(ctx=ast.Store()):
                found |= root_names(node)
            case ast.AugAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def free_names(scope: ast.AST) -> set[str]:
    """Return the variables of the enclosing code that an inner function reads.

    Examples:
        >>> scope = ast.parse("lambda a, b=c: a + b + d").body[0].value
        >>> sorted(free_names(scope))
        ['c', 'd']
    """
    match scope:
        case ast.FunctionDef(args=arguments, body=body):
            inside = list[ast.AST](body)
        case ast.Lambda(args=arguments, body=result):
            inside = [result]
        case ast.GeneratorExp(generators=generators):
            own = written_names([generator.target for generator in generators])
            return read_names([scope]) - own
        case _:
            return set()
    own = {argument.arg for argument in all_arguments(arguments)}
    own |= written_names(inside)
    around = [*arguments.defaults, *(d for d in arguments.kw_defaults if d)]
    return (read_names(inside) - own) | read_names(around)


def read_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the variables that code reads, including inner functions.

    Examples:
        >>> sorted(read_names(ast.parse("a = b; f = lambda c: c + d; e[0] = 1").body))
        ['b', 'c', 'd', 'e']
    """
    found: set[str] = set()
    for top in body:
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def read_before_written(body: Sequence[ast.stmt], names: set[str]) -> set[str]:
    """Return the names whose earlier value the code may read.

    Examples:
        >>> code = "y = x + 1; x = y; z = 2; z = z + 1"
        >>> read_before_written(ast.parse(code).body, {"x", "y", "z"})
        {'x'}
    """
    found: set[str] = set()
    _scan(body, names, set(), found)
    return found


def _scan(
    body: Sequence[ast.stmt], names: set[str], sure: set[str], found: set[str]
) -> set[str]:
    """Collect early reads in `found`; return the names surely written afterwards."""
    for statement in body:
        match statement:
            case ast.If(test=test, body=then, orelse=other):
                found |= (read_names([test]) & names) - sure
                one = _scan(then, names, set(sure), found)
                two = _scan(other, names, set(sure), found)
                sure = sure | (one & two) | (written_names([test]) & names)
            case ast.For(target=target, iter=source, body=inside, orelse=other):
                found |= (read_names([source]) & names) - sure
                _scan(inside, names, sure | written_names([target]), found)
                _scan(other, names, set(sure), found)
            case ast.While(test=test, body=inside, orelse=other):
                found |= (read_names([test]) & names) - sure
                _scan(inside, names, set(sure), found)
                _scan(other, names, set(sure), found)
            case ast.With(items=items, body=inside):
                found |= (read_names(items) & names) - sure
                after = _scan(inside, names, sure | written_names(items), found)
                sure = sure if may_swallow(statement) else after
            case ast.Try() | ast.TryStar():
                parts = [*statement.body, *statement.orelse]
                _scan(parts, names, set(sure), found)
                for handler in statement.handlers:
                    _scan(handler.body, names, set(sure), found)
                sure = _scan(statement.finalbody, names, set(sure), found)
            case ast.Match(subject=subject, cases=cases):
                found |= (read_names([subject]) & names) - sure
                for case in cases:
                    _scan_case(case, names, sure, found)
            case _:
                found |= (read_names([statement]) & names) - sure
                sure = sure | (written_names([statement]) & names)
    return sure


def _scan_case(
    case: ast.match_case, names: set[str], sure: set[str], found: set[str]
) -> None:
    bound = written_names([case.pattern])
    tests: list[ast.AST] = [case.pattern]
    if case.guard is not None:
        tests.append(case.guard)
    found |= (read_names(tests) & names) - sure - bound
    _scan(case.body, names, sure | bound, found)


def is_in_place(method: str) -> bool:
    """Return whether a method's name ends like those of in-place methods."""
    return method.endswith("_") and not method.startswith("_")


def _own_nodes(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, SCOPES):
            continue
        if isinstance(node, _COMPREHENSIONS):
            # Its targets are local to it; an assignment expression inside is not.
            walrus = [n for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
            waiting.extend(expression.target for expression in walrus)
            continue
        waiting.extend(ast.iter_child_nodes(node))


def root_names(node: ast.AST) -> set[str]:
    """Return the root variable of an expression such as `a.b[0].c()`."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def may_swallow(statement: ast.With) -> bool:
    """Return whether a `with` may suppress exceptions, as `contextlib.suppress` does.

    Only known contexts are trusted to propagate them.

    Examples:
        >>> may_swallow(ast.parse("with torch.no_grad(): 1").body[0])
        False
        >>> may_swallow(ast.parse("with watch(): 1").body[0])
        True
    """
    return not all(_passes_on(item.context_expr) for item in statement.items)


def _passes_on(context: ast.expr) -> bool:
    name = context.func if isinstance(context, ast.Call) else context
    last = name.attr if isinstance(name, ast.Attribute) else None
    while isinstance(name, ast.Attribute):
        name = name.value
    if not isinstance(name, ast.Name):
        return False
    return name.id in _PASS_ON or (last or name.id) in _PASS_ON_TOO


LoopNode = ast.For | ast.While


def own_statements(body: list[ast.stmt]) -> list[ast.AST]:
    """Return all nodes of a loop's body, except those of inner scopes."""
    return list(_nodes_outside(body, (ast.FunctionDef, ast.Lambda, ast.ClassDef)))


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
    """Return the names a loop writes, and those that pass to iterations or out."""
    targets = [loop.target] if isinstance(loop, ast.For) else []
    written = written_names([*targets, *loop.body]) - set(appended_lists(loop))
    # Variables written to in place pass from one iteration to the next as well.
    written |= changed_names(loop.body) & local_names(function)
    tests: list[ast.AST] = [loop.test] if isinstance(loop, ast.While) else []
    early = read_before_written(loop.body, written) | (read_names(tests) & written)
    early -= written_names(targets)
    return written, early | (written & used_later(loop, function, around, ast.Load))


def appended_lists(loop: LoopNode) -> tuple[str, ...]:
    """Return the lists that the loop appends to once and does not use otherwise."""
    uses = Counter(n.id for n in ast.walk(loop) if isinstance(n, ast.Name))
    names = filter(None, map(append_target, loop.body))
    return tuple(name for name in names if uses[name] == 1)


def belongs(loop: LoopNode, kind: type[ast.stmt]) -> bool:
    """Return whether a `break` or `continue` belongs to this loop."""
    others = (ast.For, ast.While, ast.FunctionDef, ast.Lambda)
    return any(isinstance(node, kind) for node in _nodes_outside(loop.body, others))


def _nodes_outside(
    body: Iterable[ast.AST], scopes: tuple[type, ...]
) -> Iterator[ast.AST]:
    """Yield the nodes of code, except those inside some kinds of nodes."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, scopes):
            waiting.extend(ast.iter_child_nodes(node))


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
    return {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, use)
        if id(node) not in inside and (node.lineno > end or id(node) in outer)
    }


def all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    """Return the arguments of a function, of every kind."""
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [a for a in (arguments.vararg, arguments.kwarg) if a is not None]


def _argument_names(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in all_arguments(function.args)}


def local_names(function: ast.FunctionDef) -> set[str]:
    """Return the variables of a function, including its arguments."""
    return _argument_names(function) | written_names(function.body)


def sure_names(loop: LoopNode, function: ast.FunctionDef) -> set[str]:
    """Return the variables that are surely bound when the loop begins."""
    if any(isinstance(node, ast.Delete) for node in ast.walk(function)):
        return set()
    found = _argument_names(function)
    for statement in function.body:
        if any(node is loop for node in ast.walk(statement)):
            break
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            found |= written_names([statement])
    return found
