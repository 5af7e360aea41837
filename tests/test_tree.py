"""The shape of the source tree: small, described modules with telling names."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "recoup"
MODULES = sorted(SOURCE.rglob("*.py"))
# One concept, one module that owns its state: long enough for that, no longer.
MOST_LINES = 600
# Names that say nothing about what is inside, and so attract everything.
EMPTY_NAMES = {"utils", "common", "misc", "helpers", "base"}


def faults(module: Path) -> list[str]:
    """What is wrong with the shape of a module; nothing, if all is well."""
    text = module.read_text(encoding="utf-8")
    found = []
    if len(text.splitlines()) > MOST_LINES:
        found.append(f"has more than {MOST_LINES} lines: split it by concept")
    if not (ast.get_docstring(ast.parse(text)) or "").strip():
        found.append("has no docstring: say in one sentence what it is for")
    if module.stem in EMPTY_NAMES or module.parent.name in EMPTY_NAMES:
        found.append("is named after nothing in particular: name its concept")
    return found


def test_the_source_tree_is_found():
    assert SOURCE / "errors.py" in MODULES


def test_no_module_name_is_used_twice():
    """Sub-packages that mirror each other may: `loops/{torch,numpy,jax}`."""
    names: dict[str, list[str]] = {}
    for module in MODULES:
        if module.stem != "__init__":
            part = str(module.relative_to(SOURCE).parent)
            mirrored = re.sub(r"^loops(/(torch|numpy|jax))?$", "loops", part)
            names.setdefault(module.stem, []).append(mirrored)
    twice = {name: parts for name, parts in names.items() if len(set(parts)) > 1}
    assert twice == {}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_the_modules_that_a_page_names_exist(page):
    text = (SOURCE.parents[1] / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)
    missing = [
        name
        for name in named
        if not (SOURCE / name).exists() and not (SOURCE.parents[1] / name).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(SOURCE)))
def test_a_module_is_small_described_and_well_named(module):
    assert faults(module) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "long.py",
            '"""Long."""\n' + "x = 1\n" * MOST_LINES,
            f"more than {MOST_LINES} lines",
        ),
        ("silent.py", "x = 1\n", "no docstring"),
        ("blank.py", '""" """\n', "no docstring"),
        ("utils.py", '"""All sorts."""\n', "named after nothing"),
        ("helpers/offload.py", '"""Offload."""\n', "named after nothing"),
    ],
)
def test_a_module_out_of_shape_is_found(tmp_path, name, text, fault):
    module = tmp_path / name
    module.parent.mkdir(exist_ok=True)
    module.write_text(text)
    (found,) = faults(module)
    assert fault in found


def test_a_module_of_exactly_the_most_lines_is_accepted(tmp_path):
    module = tmp_path / "offload.py"
    module.write_text('"""Offload."""\n' + "x = 1\n" * (MOST_LINES - 1))
    assert faults(module) == []
