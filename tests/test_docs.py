"""The documentation names every public name, lists pages that exist, and builds."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import recoup
from recoup.cli.main import run

ROOT = Path(__file__).parents[1]
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
LISTED = re.findall(r": ([\w/-]+\.md)$", SETTINGS, flags=re.MULTILINE)
REFERENCE = "".join(
    page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/*.md")
)

TUTORIALS = {
    "diffusion.md": (),
    "gan.md": (),
    "hugging-face.md": ("transformers",),
    "lora.md": ("transformers", "peft"),
    "neural-ode.md": (),
}
"""The tutorials, and the packages that each needs besides torch."""


@pytest.mark.parametrize("name", recoup.__all__)
def test_a_public_name_has_its_place_in_the_reference(name):
    found = re.findall(rf"^::: recoup\.{name}$", REFERENCE, flags=re.MULTILINE)
    assert len(found) == 1, f"write '::: recoup.{name}' on one page of docs/reference"


@pytest.mark.parametrize(
    "part",
    ["checkpointing", "errors", "loops", "precision", "results", "tiers", "train"],
)
def test_a_name_of_a_part_has_its_place_in_the_reference(part):
    names = set(getattr(recoup, part).__all__) - set(recoup.__all__)
    missing = [name for name in sorted(names) if f"{part}.{name}\n" not in REFERENCE]
    assert missing == [], (
        f"write '::: recoup.{part}.<name>' on a page of docs/reference"
    )


def test_the_listed_pages_exist():
    assert len(LISTED) > 10
    for page in LISTED:
        source = ROOT / "docs" / page
        if page == "changelog.md":  # made of another file: build_hooks/site.py
            source = ROOT / "CHANGELOG.md"
        elif page.startswith("notebooks/"):
            source = source.with_suffix(".ipynb")
        assert source.is_file(), page


def codes_of(page: str) -> list[str]:
    """The blocks of a page that are code without a prompt."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return [block for block in blocks if ">>>" not in block]


def code_of(page: str) -> str:
    (code,) = codes_of(page)
    return code


def test_every_block_of_code_is_run():
    """Those with a prompt are doctests; the others are run below."""
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    without = {
        str(page)
        for page in pages
        for block in re.findall(
            r"```py\w*\n(.*?)```",
            (ROOT / "docs" / page).read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
        if ">>>" not in block
    }
    tutorials = {page for page in without if page.startswith("tutorials/")}
    assert tutorials == {f"tutorials/{page}" for page in TUTORIALS}
    others = without - tutorials
    run_below = {"index.md", "start.md", "guides/fit.md", "guides/distributed.md"}
    assert others == run_below


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_runs_from_top_to_bottom(page):
    """Its blocks are pasted one after the other; they end with assertions."""
    text = (ROOT / "docs" / "tutorials" / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    for package in TUTORIALS[page]:
        pytest.importorskip(package)
    assert "assert " in code
    exec(compile(code, page, "exec"), {"__name__": page})


def test_the_code_of_the_home_page_is_that_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"```python\n{code_of('index.md')}```" in readme  # which is run


def test_the_files_of_the_first_page_work_as_pasted(tmp_path, monkeypatch, capsys):
    """The file that is fitted, the loop that imports it, and the error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "steps", raising=False)  # that of another test
    steps, loop, refused = codes_of("start.md")
    small = steps.replace("256", "32").replace("1024", "128")
    Path("steps.py").write_text(small, encoding="utf-8")
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\.venv/bin/recoup (fit .*)$", text, flags=re.MULTILINE)
    assert run([*command.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plain_peak_bytes"] > 0
    assert Path("report.html").is_file()
    for code in (loop, refused):
        exec(compile(code, "start.md", "exec"), {"__name__": "pasted"})
    said = capsys.readouterr().out
    assert "measured peak" in said
    assert "a budget of 1 MiB cannot be met: the smallest plan known takes" in said
    assert Path("why.html").is_file()


def test_the_call_with_offload_of_the_guide():
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    variables = {"model": nn.Sequential(model, Sum()), "batch": batch}
    exec(compile(code_of("guides/fit.md"), "fit.md", "exec"), variables)
    assert variables["report"].measured_peak_bytes > 0


def test_the_order_of_sharding_and_optimizer_of_the_guide():
    distributed.init_process_group(
        "gloo",
        store=distributed.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        rank=0,
        world_size=1,
    )
    try:
        variables = {
            "torch": torch,
            "fully_shard": fully_shard,
            "Trainer": recoup.Trainer,
            "model": nn.Linear(2, 2),
            "settings": recoup.TrainerSettings(),
            "loss_fn": nn.functional.mse_loss,
        }
        code = compile(code_of("guides/distributed.md"), "distributed.md", "exec")
        exec(code, variables)
        assert isinstance(variables["trainer"], recoup.Trainer)
    finally:
        distributed.destroy_process_group()


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


def built(folder: Path, out: Path) -> tuple[int, list[str]]:
    """The status of a strict build, and its warnings; `--quiet` would hide both."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: `pip install recoup[docs]`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    done = subprocess.run(
        [*command, str(out)],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).splitlines()
    return done.returncode, [line for line in lines if line.startswith("WARNING")]


def test_a_dead_link_is_found(tmp_path):
    """With the settings of the site: a page, an anchor, an absolute link."""
    (validation,) = re.findall(
        r"^validation:\n(?:  .*\n)+", SETTINGS, flags=re.MULTILINE
    )
    (tmp_path / "mkdocs.yml").write_text(f"site_name: dead\n{validation}")
    (tmp_path / "docs").mkdir()
    page = "# Page\n\n[a](gone.md) [b](#gone) [c](/gone.md)\n"
    (tmp_path / "docs" / "index.md").write_text(page)
    status, warnings = built(tmp_path, tmp_path / "site")
    assert status != 0
    assert len(warnings) == 3


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    assert built(ROOT, tmp_path) == (0, [])
    assert (tmp_path / "reference" / "fit" / "index.html").is_file()
    # What the hooks add: the changelog, notebooks with their outputs, and addresses
    # for files that are not of the site.
    changes = (tmp_path / "changelog" / "index.html").read_text(encoding="utf-8")
    assert "Unreleased" in changes
    notebook = tmp_path / "notebooks" / "first-fit" / "index.html"
    assert (
        '<div class="output"><pre style="white-space:pre-wrap">Graph('
        in notebook.read_text(encoding="utf-8")
    )
    guide = (tmp_path / "guides" / "fit" / "index.html").read_text(encoding="utf-8")
    assert 'href="https://recoup.example/source/blob/main/examples/gan.py"' in guide
    # Code on the site can be pasted: it has no prompts (the reference is docstrings).
    prompted = [
        page
        for page in tmp_path.rglob("*.html")
        if "&gt;&gt;&gt; " in page.read_text(encoding="utf-8")
    ]
    assert {page.relative_to(tmp_path).parts[0] for page in prompted} == {"reference"}
