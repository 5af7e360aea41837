"""The floor of a model of the zoo, told by a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import recoup
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.problem import Problem
from recoup.core.plan import plan_for
from recoup.core.segments import Action
from recoup.planners.search import Search

ROOT = Path(__file__).parents[2]


def floor_of(name: str) -> tuple[int, str]:
    """Return the floor of a model, and the plan that reaches it as text."""
    problem = Problem(CASES[name], "tiny", torch.device("cpu"))
    graph = recoup.measure(problem.model, problem.batch, loss=problem.case.loss)
    segments, costs, _ = Search(graph, frozenset({Action.KEEP})).floor
    return costs.peak_bytes, plan_for(graph, segments).to_json()


def floors_elsewhere(names: list[str]) -> dict[str, tuple[int, str]]:
    """Return the floors of models as another process finds them."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.floors", *names],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"src{os.pathsep}.",
            "PYTHONHASHSEED": "random",
        },
        capture_output=True,
        check=True,
        text=True,
    )
    return {name: tuple(floor) for name, floor in json.loads(found.stdout).items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps({name: floor_of(name) for name in sys.argv[1:]}))
