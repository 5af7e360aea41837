"""The peers of the benchmarks run what they say that they run."""

import shutil
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.zoo.peers import Compiled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden).exp().sin().tanh()


def saved_bytes(around: AbstractContextManager[None], model: nn.Module) -> int:
    """Return the bytes that autograd saves in a forward."""
    found: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        found.append(saved.nbytes)
        return saved

    with around, saved_tensors_hooks(pack, lambda saved: saved):
        model(torch.ones(64, 16))
    return sum(found)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Tanh())


@pytest.mark.filterwarnings("ignore")  # the compiler has many, of its own code
@pytest.mark.skipif(shutil.which("g++") is None, reason="nothing to compile with")
@pytest.mark.parametrize("block", [Block, layers])
def test_compiled_contenders_in_turns_each_run_what_was_compiled_for_them(block):
    model = nn.Sequential(*(block() for _ in range(3)))
    # torch looks for compiled code by the code alone, whatever the budget was.
    generous, meagre = Compiled(model, 1.0), Compiled(model, 0.0)
    first = [saved_bytes(peer(model), model) for peer in (generous, meagre)]
    again = [saved_bytes(peer(model), model) for peer in (generous, meagre)]
    assert first == again
    assert first[0] > first[1]
