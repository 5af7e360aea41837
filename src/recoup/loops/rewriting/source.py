"""Source: parse a function, replace its loops by checkpointed ones, compile it."""

import ast
import copy
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from recoup.errors import UnsupportedError
from recoup.loops.rewriting.names import (
    LoopNode,
    all_arguments,
    append_target,
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
    return {
        id(loop): _describe(loop, function, around, first_line)
        for loop, around in _loops_in(function.body, [])
    }


def _loops_in(
    body: Iterable[ast.AST], around: list[LoopNode]
) -> Iterator[tuple[LoopNode, list[LoopNode]]]:
    """Yield the loops of some code, each with the loops around it."""
    for node in body:
        if isinstance(node, (ast.For, ast.While)):
            yield node, around
            yield from _loops_in(node.body, [*around, node])
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from _loops_in(ast.iter_child_nodes(node), around)


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


RUNTIME = "_recoup"
"""The name of the runtime in the rewritten source."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A function whose loops are checkpointed.

    Attributes:
        function: The function itself.
        source: Its source.
        loops: Its loops; those without a fault are checkpointed.
    """

    function: Callable[..., Any]
    source: str
    loops: tuple[FoundLoop, ...]


def rewrite(function: Callable[..., Any], runtime: Any) -> Rewritten:
    """Return the function with its `for` and `while` loops checkpointed.

    The new function sees the variables of the old one, closure and globals; errors in
    it name the lines of the old source.

    Raises:
        UnsupportedError: There is no source, or it is not a plain function.
    """
    tree, first_line = _parsed(function)
    name = tree.name
    tree = _Conditions().visit(tree)
    found = find_loops(tree, first_line)
    changer = _Changer(found)
    changed = changer.visit(copy.copy(tree))
    changed.decorator_list = []
    ast.fix_missing_locations(changed)
    source = ast.unparse(changed)
    made = _compiled(function, changed, first_line, runtime)
    made.__name__ = name
    return Rewritten(made, source, tuple(found.values()))


def _parsed(function: Callable[..., Any]) -> tuple[ast.FunctionDef, int]:
    if not isinstance(function, types.FunctionType):
        raise UnsupportedError(
            f"expected a plain function, got {type(function).__name__}; define one "
            "with `def`, or call checkpointed_loop in it."
        )
    if hasattr(function, "__wrapped__"):
        raise UnsupportedError(
            f"{function.__qualname__!r} is wrapped by a decorator, which rewriting its "
            "source would remove; give the function without it, or call "
            "checkpointed_loop in it."
        )
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise UnsupportedError(
            f"the source of {function.__qualname__!r} cannot be read ({error}); define "
            "it in a file, or call checkpointed_loop in it."
        ) from error
    if not isinstance(tree, ast.FunctionDef):
        raise UnsupportedError(
            "expected a function made with `def`, got "
            f"{function.__qualname__!r}; define it with `def`, or call "
            "checkpointed_loop in it."
        )
    return tree, first_line


def _compiled(
    function: Any, tree: ast.FunctionDef, first_line: int, runtime: Any
) -> types.FunctionType:
    """Compile inside a factory, so that closure variables stay closure variables."""
    free = function.__code__.co_freevars
    names = [RUNTIME, *free]
    factory = _function(f"_factory({', '.join(names)})")
    # Not under its own name, which may name a global in the function itself.
    inner = _without_defaults(tree)
    inner.name = f"{RUNTIME}_function"
    factory.body = [inner, ast.Return(ast.Name(inner.name, ast.Load()))]
    module = ast.Module(body=[factory], type_ignores=[])
    ast.fix_missing_locations(module)
    ast.increment_lineno(module, first_line - 1)
    code = compile(module, function.__code__.co_filename, "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    made = space["_factory"](*[None] * len(names))
    cells: dict[str, types.CellType] = {RUNTIME: types.CellType(runtime)}
    cells.update(zip(free, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in made.__code__.co_freevars)
    changed = types.FunctionType(
        made.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        closure,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


def _without_defaults(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Return the function without default values and annotations.

    They were evaluated once, in another scope, and are copied.
    """
    tree = copy.deepcopy(tree)
    arguments = tree.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [
        None if default is None else ast.Constant(None)
        for default in arguments.kw_defaults
    ]
    for argument in all_arguments(arguments):
        argument.annotation = None
    tree.returns = None
    return tree


class _Conditions(ast.NodeTransformer):
    """Moves a condition that assigns into the body of its `while` loop.

    There its variables are ordinary variables of the loop.
    """

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        if node.orelse or not written_names([node.test]):
            return node
        leave = ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], [])
        node.body.insert(0, ast.copy_location(leave, node.test))
        node.test = ast.copy_location(ast.Constant(value=True), node.test)
        return ast.fix_missing_locations(node)


class _Changer(ast.NodeTransformer):
    """Replaces loops by calls, inner loops first."""

    def __init__(self, found: dict[int, FoundLoop]) -> None:
        self._found = found
        self._count = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        # Inner functions are not changed.
        return self.generic_visit(node) if self._count == 0 else node

    def visit_For(self, node: LoopNode) -> Any:
        loop = self._found.get(id(node))
        self._count += 1
        number = self._count
        self.generic_visit(node)
        if loop is None or loop.fault is not None:
            return node
        made = _statements(node, loop, number)
        return [ast.copy_location(statement, node) for statement in made]

    visit_While = visit_For  # noqa: N815 (as it is called)


def _statements(node: LoopNode, loop: FoundLoop, number: int) -> list[ast.stmt]:
    """Return the statements that replace a loop."""
    body, test = f"{RUNTIME}_body_{number}", f"{RUNTIME}_test_{number}"
    signal, value = f"{RUNTIME}_signal_{number}", f"{RUNTIME}_value_{number}"
    unpack = _unpacking(loop)
    made: list[ast.stmt] = []
    if isinstance(node, ast.While):
        head = _function(f"{test}({RUNTIME}_carry)")
        head.body = [*ast.parse(unpack).body, ast.Return(node.test)]
        made.append(head)
        source = test
    else:
        source = f"{RUNTIME}_items_{number}"
        made.append(ast.Assign([ast.Name(source, ast.Store())], node.iter, lineno=0))
    made.append(_body_function(node, loop, body, unpack))
    lists = "".join(f"{name}, " for name in loop.appended)
    changed = f", changed={loop.changed!r}" if loop.changed else ""
    changed += f", kept={loop.kept!r}" if loop.kept else ""
    changed += ", changes_items=True" if loop.changes_items else ""
    call = (
        f"({signal}, {value}, ({RUNTIME}_carry,)) = {RUNTIME}."
        f"{'run_while' if isinstance(node, ast.While) else 'run_for'}"
        f"({body}, ({_packing(loop)}), {source}, lists=({lists}), line={loop.line}, "
        f"stops={loop.breaks or loop.returns}, names={loop.carried!r}"
        f"{changed})"
    )
    made += ast.parse(call).body
    made += ast.parse(unpack).body
    if loop.returns:
        made += ast.parse(f"if {signal} == 'return':\n return {value}").body
    return made


def _packing(loop: FoundLoop) -> str:
    return "".join(f"{RUNTIME}.value(lambda: {name}), " for name in loop.carried)


def _unpacking(loop: FoundLoop) -> str:
    """Return code that sets the variables, except unbound ones."""
    if not loop.carried:
        return "pass"
    lines = [f"({', '.join(loop.carried)},) = {RUNTIME}_carry"]
    for name in loop.doubtful:
        lines += [f"if {name} is {RUNTIME}.undefined:", f"    del {name}"]
    return "\n".join(lines)


def _function(head: str) -> ast.FunctionDef:
    """Return an empty function, given its name and parameters."""
    made = ast.parse(f"def {head}: pass").body[0]
    assert isinstance(made, ast.FunctionDef), "parsed just now"
    return made


def _body_function(
    node: LoopNode, loop: FoundLoop, name: str, unpack: str
) -> ast.FunctionDef:
    """Return the body as a function of carry and item: signal, new carry, outputs."""
    head = _function(f"{name}({RUNTIME}_carry, {RUNTIME}_item)")
    head.body = [*ast.parse(unpack).body]
    if isinstance(node, ast.For):
        item = ast.Name(f"{RUNTIME}_item", ast.Load())
        head.body.append(ast.Assign([node.target], item, lineno=0))
    outputs: list[str] = []
    lowered = _Lowering(loop)
    for statement in node.body:
        listed = append_target(statement)
        if listed in loop.appended and isinstance(statement, ast.Expr):
            output = f"{RUNTIME}_output_{len(outputs)}"
            outputs.append(output)
            call = statement.value
            assert isinstance(call, ast.Call), "append_target says so"
            target = ast.Name(output, ast.Store())
            head.body.append(ast.Assign([target], call.args[0], lineno=0))
            continue
        changed = lowered.visit(statement)
        head.body.extend(changed if isinstance(changed, list) else [changed])
    row = "".join(f"{output}, " for output in outputs)
    head.body += ast.parse(f"return (None, ({_packing(loop)}), ({row}))").body
    return head


class _Lowering(ast.NodeTransformer):
    """Turns `continue`, `break` and `return` of a loop's body into its results."""

    def __init__(self, loop: FoundLoop) -> None:
        self._carried = _packing(loop)
        self._depth = 0

    def visit_Continue(self, node: ast.Continue) -> Any:
        return node if self._depth else self._result("None", node)

    def visit_Break(self, node: ast.Break) -> Any:
        return node if self._depth else self._result("'break'", node)

    def visit_Return(self, node: ast.Return) -> Any:
        value = node.value or ast.Constant(None)
        nothing = ast.Tuple([], ast.Load())
        result = ast.Tuple([ast.Constant("return"), value, nothing], ast.Load())
        return ast.copy_location(ast.Return(result), node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> Any:
        return node

    visit_Lambda = visit_FunctionDef  # noqa: N815 (as it is called)

    def visit_For(self, node: LoopNode) -> Any:
        # The `break` and `continue` of an inner loop belong to it.
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_While = visit_For  # noqa: N815 (as it is called)

    def _result(self, signal: str, node: ast.stmt) -> ast.stmt:
        made = ast.parse(f"return ({signal}, ({self._carried}), ())").body[0]
        return ast.copy_location(made, node)
