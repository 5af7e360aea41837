"""The test command runs in several processes where that helps, and in one elsewhere."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]


def workers(*args: str) -> int | None:
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = SimpleNamespace(args=[str(ROOT / arg) for arg in args])
    return module.pytest_xdist_auto_num_workers(config)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="one process on a GPU")
def test_folders_run_on_all_cores_up_to_eight(monkeypatch):
    assert workers("tests", "src", "docs") == 2
    assert workers("tests/core/test_units.py", "tests/loops") == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert workers("tests") == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert workers("tests") == 0


def test_files_and_single_tests_run_in_one_process():
    assert workers("tests/core/test_units.py") == 0
    assert workers("tests/core/test_units.py::test_a", "README.md") == 0


def test_the_number_that_a_user_sets_counts(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert workers("tests") is None


@pytest.mark.slow
def test_the_tests_run_without_xdist():
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q"]
    run = subprocess.run(
        [*command, "tests/core/test_units.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
    assert " passed in " in run.stdout.splitlines()[-1]
