"""Names: which variables a piece of code reads and writes, and in which order."""

import ast
from collections.abc import Iterable, Sequence

from recoup.loops.rewriting.guards import may_swallow

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
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
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.MatchMapping(rest=str(name)):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add((asname or name).split(".")[0])
            case _:
                pass
    return found


def changed_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the variables whose content code changes, by its look.

    That are those with a method whose name ends as torch's methods in place do, and
    those given as `out=`.

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
    """Return the variables that code may write to without setting them, by its look.

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
            case _:
                pass
    return found


def free_names(scope: ast.AST) -> set[str]:
    """Return the variables of the code around that an inner function reads.

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
    everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    everything += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    own = {argument.arg for argument in everything} | written_names(inside)
    around = [*arguments.defaults, *(d for d in arguments.kw_defaults if d)]
    return (read_names(inside) - own) | read_names(around)


def read_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the variables that code reads, inner functions included.

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
    """Return those of the names whose value from before the code it may read.

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
    """Gather early reads into `found`; return what is surely written afterwards."""
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
    """Return whether a method's name ends as those do that write in place."""
    return method.endswith("_") and not method.startswith("_")


def _own_nodes(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, _COMPREHENSIONS):
            # Its targets are its own; an assignment expression inside is not.
            walrus = [n for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
            waiting.extend(expression.target for expression in walrus)
            continue
        waiting.extend(ast.iter_child_nodes(node))


def root_names(node: ast.AST) -> set[str]:
    """Return the variable that an expression such as `a.b[0].c()` begins with."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()
