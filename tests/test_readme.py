"""The code in the README runs, and its two commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_shows_code():
    assert EXAMPLES


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_code_in_the_readme_gives_every_layer_a_gradient(code):
    variables = {}
    exec(compile(code, "README.md", "exec"), variables)
    assert variables["layers"]
    for layer in variables["layers"]:
        assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)[)#]", README))
def test_what_the_readme_points_to_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("target", re.findall(r"`make ([a-z-]+)`", README))
def test_a_command_of_the_readme_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
