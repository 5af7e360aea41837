"""A second process finds all that the first one compiled.

Each process measures other times, as on a loaded machine: they are disturbed at random.
"""

# pyright: reportMissingImports=false

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, random, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch._dynamo.utils import counters
import recoup
from recoup.measurement.timing import block_bench
from tests.sweep import test_compiler_caches

measured = block_bench.seconds_of
block_bench.seconds_of = lambda *args: measured(*args) * random.uniform(0.2, 5)
torch.manual_seed(0)
model, batch, loss = getattr(test_compiler_caches, sys.argv[1])()
_, report = recoup.fit(model, batch, budget=0.75, loss=loss, compile="inductor")
found = counters["aot_autograd"]
print(json.dumps({
    "compiled": found["ok"], "found": found["autograd_cache_hit"],
    "graphs": counters["inductor"]["fxgraph_cache_miss"],
    "blocks": len(report.plan.blocks),
}))
"""


def transformer():
    import torch

    from tests.fitting.test_compiled_fit import Layer, stack, tokens

    return stack(lambda: Layer(dropout=0.0), 3), tokens(), torch.sum


def residual():
    """A residual CNN whose blocks are of two kinds."""
    import torch
    from torch import nn

    from tests.fitting.test_compiled_fit import Normed

    blocks = [nn.Sequential(Normed(), Normed()) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks)
    return model, torch.randn(4, 3, 16, 16), torch.sum


def llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    tokens = torch.randint(64, (4, 32))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, None


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("g++") is None, reason="nothing to compile with")
@pytest.mark.parametrize("model", [transformer, residual, llama])
def test_a_second_process_finds_all_that_was_compiled(model, tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    found = []
    for _ in range(2):
        program = [sys.executable, "-c", PROGRAM, model.__name__]
        ran = subprocess.run(
            program, check=True, env=environment, cwd=root, capture_output=True
        )
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    first, second = found
    assert first["blocks"] == second["blocks"] > 0
    assert first["graphs"] >= 2
    assert second["graphs"] == 0
    assert second["found"] == second["compiled"] == first["compiled"]
