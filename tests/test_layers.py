"""The two import rules hold, and each is shown to fail on a wrong import."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip(
    "importlinter", reason="a machine without a network may lack import-linter"
)

ROOT = Path(__file__).parents[1]
TORCH_FREE = ("core", "schedules", "planners", "report")
# The command `lint-imports`, wherever the environment keeps its scripts.
COMMAND = "from importlinter.cli import lint_imports_command as run; run()"
LAYERS_BROKEN = "Packages import downwards only BROKEN"
TORCH_FREE_BROKEN = "never reach torch BROKEN"


def check_layers(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package below `root`, with the contracts there."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copied_root(tmp_path):
    """A copy of the package and its contracts that a test may spoil."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def add_module(root: Path, name: str, text: str) -> None:
    """Write a module of the copied package, and the packages above it if missing."""
    module = root.joinpath("src", "recoup", *name.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True, exist_ok=True)
    (module.parent / "__init__.py").touch()
    module.write_text(text)


def test_the_contracts_hold():
    result = check_layers(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 kept, 0 broken" in result.stdout


def test_the_contracts_hold_on_an_unspoilt_copy(copied_root):
    result = check_layers(copied_root)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "imported", "broken"),
    [
        ("core.wrong", "backend.found", LAYERS_BROKEN),
        ("backend.wrong", "engine.found", LAYERS_BROKEN),
        ("engine.wrong", "cli.found", LAYERS_BROKEN),
        ("engine.wrong", "planners.found", LAYERS_BROKEN),
        ("loops.wrong", "report.found", LAYERS_BROKEN),
        ("backend.wrong", "schedules.found", LAYERS_BROKEN),
    ],
)
def test_an_import_upwards_or_sideways_is_found(copied_root, module, imported, broken):
    add_module(copied_root, imported, "")
    add_module(copied_root, module, f"import recoup.{imported}\n")
    result = check_layers(copied_root)
    assert result.returncode == 1, result.stdout + result.stderr
    assert broken in result.stdout
    assert f"recoup.{module} -> recoup.{imported}" in result.stdout


def test_a_package_in_no_layer_is_found(copied_root):
    add_module(copied_root, "sundries.found", "")
    result = check_layers(copied_root)
    assert result.returncode == 1, result.stdout + result.stderr
    assert LAYERS_BROKEN in result.stdout
    assert "sundries" in result.stdout


def test_torch_in_the_vocabulary_is_found(copied_root):
    add_module(copied_root, "core.wrong", "import torch\n")
    result = check_layers(copied_root)
    assert result.returncode == 1, result.stdout + result.stderr
    assert TORCH_FREE_BROKEN in result.stdout
    assert LAYERS_BROKEN not in result.stdout


def test_torch_reached_indirectly_from_the_vocabulary_is_found(copied_root):
    add_module(copied_root, "backend.found", "import torch\n")
    add_module(copied_root, "core.wrong", "import recoup.backend.found\n")
    result = check_layers(copied_root)
    assert result.returncode == 1, result.stdout + result.stderr
    assert TORCH_FREE_BROKEN in result.stdout


def test_every_torch_free_package_that_exists_is_under_the_contract():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (entry for entry in contracts if entry["id"] == "torch-free")
    existing = {
        f"recoup.{name}"
        for name in TORCH_FREE
        if list(ROOT.glob(f"src/recoup/{name}*"))
    }
    assert set(contract["source_modules"]) == existing
