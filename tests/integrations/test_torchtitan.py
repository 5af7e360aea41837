"""Blocks sharded with FSDP2, and compiled, as torchtitan makes them."""

# pyright: reportPrivateImportUsage=false

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from recoup.backend.memory.meters import interval_meter
from tests.integrations.test_guides import GUIDES, versions_of
from tests.support.processes import together

STEPS, WIDTH = 20, 32


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Names its layers by numbers, as models of torchtitan do."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(4)})
        self.output = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def run(script: str, rank: int) -> tuple[list[Tensor], int, Any]:
    """Train with a script of the guide; return the parameters, the peak, the report."""
    torch.manual_seed(0)
    model = Decoder()
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(64, (8, 64), generator=generator) for _ in range(STEPS)]
    peaks: list[int] = []

    def loader() -> Any:
        for each in tokens:
            with interval_meter(torch.device("cpu")) as meter:
                yield each, each.roll(-1)
            peaks.append(meter.peak_bytes)

    variables: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "mesh": init_device_mesh("cpu", (distributed.get_world_size(),)),
        "loader": loader(),
        "loss_fn": loss_of,
        "backend": "aot_eager",
    }
    exec(compile(script, "torchtitan.md", "exec"), variables)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    parameters: list[Any] = list(model.parameters())
    # In the first step of a script with `fit` the meter sees its measurements.
    return (
        [each.to_local() for each in parameters],
        max(peaks[1:]),
        variables.get("report"),
    )


def train_both(rank: int, number: int) -> Any:
    """Run a diff of the guide without its lines, and with them."""
    warnings.simplefilter("ignore")
    text = (GUIDES / "torchtitan.md").read_text(encoding="utf-8")
    before, after = versions_of(text, number)
    plain, plain_bytes, _ = run(before, rank)
    ours, peak_bytes, report = run(after.replace('"40GiB"', "1_500_000"), rank)
    assert len(plain) == len(ours) > 0
    return {
        "equal": all(map(torch.equal, plain, ours)),
        "peaks": (peak_bytes, plain_bytes),
        "plan": report and report.plan.to_json(),
        "reported": report
        and (report.measured_peak_bytes, report.budget_bytes, report.plain_peak_bytes),
    }


@pytest.mark.parametrize("number", [0, 1], ids=["a budget", "compiled blocks"])
def test_the_guide_to_torchtitan_in_two_processes(tmp_path, number):
    found = together(train_both, tmp_path, number, seconds=200)
    for each in found:
        assert isinstance(each, dict), each
        assert each["equal"]
        ours, plain = each["peaks"]
        assert ours < plain
        if number == 0:
            measured, budget, plain_peak = each["reported"]
            assert measured <= budget < plain_peak
            assert ours <= budget
    assert found[0]["plan"] == found[1]["plan"]
