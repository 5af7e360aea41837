"""The list of private names of torch: complete, without extras, and checked."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recoup.backend.capabilities import COMPILER, DEVICE, NAMES, UNCHECKED, require
from recoup.errors import UnsupportedError

SOURCE = Path(__file__).parents[2] / "src" / "recoup"
LISTED = {name for names in NAMES.values() for name in names} | {*COMPILER, *DEVICE}
OTHERS = {"_getframe", "_is_owned"}
"""Private names of Python's own library."""

OPERATORS = {
    part
    for name in torch._C._dispatch_get_all_op_names()
    for part in re.split(r"::|\.", name)
}
"""The names of operators and of their namespaces, which are data."""


MODULES_OWN = {"_buffers", "_modules", "_parameters"}
"""Names of the dictionaries of a module, by which `vars` of one is read."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.expr) -> list[str]:
    """Return the dotted name of an expression, `getattr` of a constant included."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    match node:
        case ast.Call(ast.Name("getattr"), [owner, ast.Constant(str(name)), *_]):
            return [*chain(owner), name]
        case _:
            return [""]


def used(text: str) -> Iterator[str]:
    """Yield private names of torch that a module uses, dotted as far as it says."""
    tree = ast.parse(text)
    torch_names = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                torch_names[alias.asname or alias.name] = full
                if any(map(is_private, full.split("."))):
                    yield full
    for node in ast.walk(tree):
        text = str(node.value) if isinstance(node, ast.Constant) else ""
        if re.fullmatch(r"_[a-zA-Z]\w*", text) and text not in OPERATORS:
            yield text
    inner = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Call) and id(node) not in inner:
            first, *rest = chain(node)
            if first in torch_names and any(map(is_private, rest)):
                yield ".".join([torch_names[first], *rest])
            elif first not in ("self", "cls") and rest and is_private(rest[-1]):
                yield rest[-1]


def is_listed(name: str) -> bool:
    """Whether a name, or a longer or shorter one of the same thing, is in the list."""
    if not name.startswith("torch."):
        return name in {*OTHERS, *UNCHECKED} or any(
            name in each.split(".") for each in LISTED
        )
    return any(
        f"{name}.".startswith(f"{each}.") or f"{each}.".startswith(f"{name}.")
        for each in LISTED
    )


BORDER = sorted((SOURCE / "backend").rglob("*.py"))


@pytest.mark.parametrize("module", BORDER, ids=lambda m: m.stem)
def test_every_private_name_of_torch_is_listed(module):
    own = {
        node.attr if isinstance(node, ast.Attribute) else node.name
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef)
        or (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )
    }
    names = {name for name in used(module.read_text()) if name not in own}
    assert sorted(name for name in names if not is_listed(name)) == []


def test_no_private_name_of_torch_is_used_elsewhere():
    private = {"torch", *(name.rpartition(".")[2] for name in LISTED), *UNCHECKED}
    found = {
        (module.stem, name)
        for module in SOURCE.rglob("*.py")
        if module not in BORDER
        for name in used(module.read_text())
        if name.partition(".")[0] in private - MODULES_OWN
    }
    assert found == set()


def test_every_listed_name_is_used():
    text = "".join(
        module.read_text() for module in BORDER if module.stem != "capabilities"
    )
    unused = [
        name
        for name in sorted(LISTED)
        if name.removesuffix("()").split(".")[-1] not in text
    ]
    assert unused == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\ntorch._C._nothing()", "torch._C._nothing"),
        ("import torch\ngetattr(torch._C, '_nothing')", "torch._C._nothing"),
        ("from torch._nothing import it", "torch._nothing.it"),
        ("def f(tensor): return tensor._nothing", "_nothing"),
        ("def f(tensor): return vars(tensor)['_nothing']", "_nothing"),
    ],
)
def test_a_name_that_is_not_listed_is_found(text, found):
    assert found in set(used(text))
    assert not is_listed(found)


def test_this_torch_has_them_all():
    require(LISTED - {*DEVICE})


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._nothing",
        "torch._nothing.it",
        "torch.Tensor._nothing",
        "torch.nn.Module()._nothing",
    ],
)
def test_a_missing_name_is_one_sentence_that_names_it_and_the_version(name):
    with pytest.raises(
        UnsupportedError, match=r"expected torch 2\.11 to .* lacks"
    ) as it:
        require(["torch._C._has_storage", name])
    assert name in str(it.value)
    assert "_has_storage" not in str(it.value)
