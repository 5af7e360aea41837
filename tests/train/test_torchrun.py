"""torchrun starts the documented programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_in_two(example: str) -> str:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(ROOT / "examples" / example),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_example_runs_in_two_processes():
    printed = run_in_two("distributed.py")
    assert "Process 1 of 2: everything is bitwise as by hand." in printed
    assert "Process 2 of 2: everything is bitwise as by hand." in printed


@pytest.mark.slow
def test_a_model_as_torchtitan_makes_it_trains_in_two_processes():
    """FSDP2 and compiled blocks."""
    printed = run_in_two("torchtitan_style.py")
    for rank in (1, 2):
        assert f"Process {rank} of 2: parameters are bitwise those without" in printed
