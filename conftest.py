"""What holds for every test command: where tests are sought, and by how many."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

_FOLDER = Path("src", "recoup", "integrations")

collect_ignore = [
    str(_FOLDER / f"{name}.py")
    for name in ("accelerate", "lightning", "transformers")
    if find_spec(name) is None
]

MOST_WORKERS = 8
"""Each takes 1 to 2 GiB, and seconds to import everything."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return how many processes `-n auto` starts; 0: the tests run in this one.

    One process for tests of single files, which end before others have started, and
    on a machine with a GPU, whose memory and time the tests measure.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # xdist reads it
    places = [Path(argument.partition("::")[0]) for argument in config.args]
    if torch.accelerator.is_available() or not any(map(Path.is_dir, places)):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(cores, MOST_WORKERS) if cores > 1 else 0
