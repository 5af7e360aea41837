"""The worth of each stage of the planner: plans with all of them, and without one.

    PYTHONPATH=src python3 -m benchmarks.cases.ablation [--models gpt2 u-net]

Steps are measured dry, so no model needs its memory. They are planned for the device
alone, for a host that needs 90 % of the step to issue it, and with offloading. A stage
stays in the planner if some realistic cell is 0.3 % of the step slower without it, or
if it gives the bound.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import recoup
from benchmarks.graphs import Kernel, step_graph
from benchmarks.harness import Row, markdown_table, parsed, publish
from benchmarks.zoo.case import cast
from benchmarks.zoo.cases import CASES
from recoup.core.graph import Graph, HostCosts
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.errors import InfeasibleError
from recoup.planners import interval_options, search
from recoup.planners.cost_weighting import WeightedGraph
from recoup.planners.linear_program import OneLevel, Swaps
from recoup.planners.planner import EXACT, plan_with
from recoup.planners.search import Search

KEEP = frozenset({Action.KEEP})
SHARES = (0.6, 0.3, 0.08)
"""Budgets, from the least peak (0) to the plain one (1)."""


_NONE = np.zeros(0, dtype=np.int64)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a stage."""


def _only(kind: str) -> Callable[[Search, WeightedGraph, Any, int], None]:
    """Return `Search._solve_partition` for partitions of one kind only."""
    solve = Search._solve_partition  # noqa: SLF001

    def chosen(
        self: Search, weighted: WeightedGraph, partition: Any, budget_bytes: int
    ) -> None:
        if partition is weighted.__dict__.get(kind):
            solve(self, weighted, partition, budget_bytes)

    return chosen


STAGES: Mapping[str, Sequence[tuple[Any, str, Any]]] = {
    "everything": (),
    "exhaustive": [(Search, "_try_everything", _nothing)],
    "programme over blocks": [(Search, "_solve_blocks", _nothing)],
    "linear programme": [(OneLevel, "solve", _nothing)],
    "offloaded copies": [(OneLevel, "_may_offload", False)],
    "exchanges of pairs": [(Swaps, "_pairs", lambda *_: (_NONE,) * 3)],
    "partition": [(Search, "_solve_partition", _nothing)],
    "nested segments": [(Search, "_solve_partition", _only("partition"))],
    "other targets": [(search, "_TARGETS", 1)],
    "host weighting": [
        (Search, "solve_for_host", lambda self, budget: self.best(budget))
    ],
    "narrow segments": [
        (search, "narrowed", lambda _, segment: (segment,)),
        (interval_options, "recorded_narrowly", lambda _, __, found: found.recorded),
    ],
    "refine": [(Search, "_refine", _nothing)],
}
"""What is patched to leave a stage out."""


@contextmanager
def without(stage: str) -> Iterator[None]:
    """Leave a stage out inside the block."""
    with ExitStack() as stack:
        for owner, name, instead in STAGES[stage]:
            stack.enter_context(patch.object(owner, name, instead))
        yield


def _dry(model: torch.nn.Module, batch: Any, loss: Any = None) -> Graph:
    return recoup.measure(model, batch, loss=loss, dry=True, device="h200")


def zoo_step(name: str) -> Graph:
    """Return the step of a model of the zoo."""
    case = CASES[name]
    model = case.make("large").to(torch.bfloat16)
    inputs, target = case.feed("large")
    return _dry(model, (cast(inputs, torch.bfloat16), target), case.loss)


def timm_step(name: str) -> Graph:
    """Return the step of a model of timm, with 64 images."""
    import timm

    model = timm.create_model(name).to(torch.bfloat16)
    images = torch.zeros(64, 3, 224, 224, dtype=torch.bfloat16)
    return _dry(model, (images, torch.zeros(64, dtype=torch.int64)), cross_entropy)


def language_step(name: str) -> Graph:
    """Return the step of a model of transformers, with random weights."""
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(use_cache=False)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(8, 1024, dtype=torch.int64)
    return _dry(model.to(torch.bfloat16), {"input_ids": tokens, "labels": tokens})


def random_step(seed: int) -> Graph:
    """Return a step of 120 operators that read one or two of the eight before them."""
    draw = random.Random(seed)
    kernels = []
    for number in range(120):
        near = range(max(-1, number - 8), number)
        reads = {number - 1, draw.choice(near)}
        kernels.append(
            Kernel(
                f"op{number}",
                draw.paretovariate(1.0) * 1e-4,
                tuple(sorted(reads)),
                draw.randint(1, 64) << 20,
                tuple(sorted({number, *reads} - {-1})) if draw.random() < 0.7 else (),
            )
        )
    return step_graph(
        kernels, range(121), blocks=range(0, 121, 10), link_bytes_per_second=64e9
    )


MODELS: Mapping[str, Callable[[], Graph]] = {
    "gpt": lambda: zoo_step("gpt"),
    "u-net": lambda: zoo_step("u-net"),
    "densenet-121": lambda: zoo_step("densenet-121"),
    "resnet50": lambda: timm_step("resnet50"),
    "swin": lambda: timm_step("swin_tiny_patch4_window7_224"),
    "gpt2": lambda: language_step("gpt2"),
    "llama": lambda: language_step("llama"),
    "random": lambda: random_step(0),
}


def cells(graph: Graph, shares: Sequence[float]) -> Iterator[tuple[str, Graph, int]]:
    """Yield what a step is planned for: its clocks, and a budget."""
    known = Search(graph, KEEP)
    least, most = known.floor_bytes, known.plain_bytes
    count = len(graph.operations)
    # Measured with an H200: recording takes three and replaying one and a half times as
    # long as issuing an operator of forward, which is 1 / 2.5 of the step's issuing.
    each = 0.9 * graph.step_seconds / (2.5 * count)
    host_costs = HostCosts(0.9 * graph.step_seconds, 3 * each, 1.5 * each)
    hosted = replace(graph, host_costs=host_costs)
    for share in shares:
        budget_bytes = int(least + share * (most - least))
        for kind, step in (("device", graph), ("host", hosted), ("offload", graph)):
            yield kind, step, budget_bytes


def planned(kind: str, graph: Graph, budget_bytes: int) -> tuple[float, float]:
    """Return what a plan adds in percent of the step, and the seconds of planning."""
    allow = EXACT if kind == "offload" else KEEP
    started = time.process_time()
    try:
        found = plan_with(Search(graph, allow), budget_bytes)
    except InfeasibleError:
        return float("inf"), time.process_time() - started
    spent = time.process_time() - started
    return 100 * found.extra_seconds / simulate(graph, ()).seconds, spent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    parser.add_argument("--shares", nargs="*", default=SHARES, type=float)
    options = parsed(parser, arguments)
    lost: dict[tuple[str, str], list[tuple[float, str]]] = {}
    spent: dict[tuple[str, str], float] = {}
    for model in options.models:
        with torch.device("meta"):
            graph = MODELS[model]()
        for number, (kind, step, budget) in enumerate(cells(graph, options.shares)):
            share = options.shares[number // 3]
            whole, _ = planned(kind, step, budget)
            for stage in options.stages:
                if stage == "host weighting" and kind != "host":
                    continue
                with without(stage):
                    added, seconds = planned(kind, step, budget)
                place = f"{model} {share}"
                lost.setdefault((stage, kind), []).append((added - whole, place))
                spent[stage, kind] = spent.get((stage, kind), 0.0) + seconds
        rows = [_row(key, found, spent) for key, found in lost.items()]
        print(model, markdown_table(rows), sep="\n\n", flush=True)
        publish(
            "ablation",
            rows,
            device=torch.device("cpu"),
            settings={
                "models": ", ".join(options.models),
                "budgets": "from the least peak to the plain one: "
                + ", ".join(map(str, options.shares)),
                "loss": "points of the plain step's time",
            },
            folder=options.out,
        )


def _row(
    key: tuple[str, str],
    found: Sequence[tuple[float, str]],
    spent: Mapping[tuple[str, str], float],
) -> Row:
    stage, kind = key
    worst, where = max(found)
    return {
        "without": stage,
        "planned for": kind,
        "cells": len(found),
        "largest loss": round(worst, 3),
        "where": where if worst > 0 else None,
        "mean loss": round(sum(loss for loss, _ in found) / len(found), 3),
        "largest gain": max(0.0, round(-min(found)[0], 3)),
        "planning time": round(spent[key] / spent.get(("everything", kind), 1.0), 2),
    }


if __name__ == "__main__":
    main()
