"""The README is short, its code and commands work, and its figures were measured."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.page import PAGES, TABLES, filled
from recoup.cli.main import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIT, TARGET = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
DIFF = re.compile(r"```diff\n.*?```", flags=re.DOTALL)
MOST_WORDS = 620


def test_the_readme_is_read_in_two_minutes():
    words = [word for word in README.split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS


def test_the_code_in_the_readme_gives_every_layer_a_gradient():
    variables = {}
    exec(compile(FIT, "README.md", "exec"), variables)
    assert variables["layers"]
    for layer in variables["layers"]:
        assert all(p.grad is not None for p in layer.parameters())


def test_the_change_of_a_hugging_face_script_is_that_of_the_guide():
    """Which is run: tests/integrations/test_guides.py."""
    guide = (ROOT / "docs" / "guides" / "transformers.md").read_text(encoding="utf-8")
    (ours,), (run_there,) = DIFF.findall(README), DIFF.findall(guide)
    assert ours.replace('"24GiB"', '"60%"') == run_there


def test_the_command_that_asks_about_7b_works_on_its_file(
    tmp_path, monkeypatch, capsys
):
    """With a smaller model; the README's own takes 11 s."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    sizes = "vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=2"
    small = TARGET.replace("LlamaConfig()", f"LlamaConfig({sizes})")
    assert small != TARGET
    Path("llama.py").write_text(small.replace("2048", "32"), encoding="utf-8")
    (command,) = re.findall(r"^recoup (measure .*)$", README, flags=re.MULTILINE)
    assert run(shlex.split(command)) == 0
    assert capsys.readouterr().out.startswith("Fits: peak")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_made_from_the_results(page):
    """If this fails: `python -m benchmarks.page`."""
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text
    assert filled(text.replace("GiB", "MiB")) != text.replace("GiB", "MiB")


def test_every_table_is_on_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"<!-- table: ([a-z-]+) -->", pages)) == set(TABLES)


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)[)#]", README))
def test_what_the_readme_points_to_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("target", re.findall(r"`make ([a-z-]+)`", README))
def test_a_command_of_the_readme_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
