"""Advice is measured, complete, and leaves the model as it was."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from recoup import CheckpointProfiler, CheckpointScope, suggest
from recoup.errors import UsageError
from recoup.measurement.advice import blocks_of


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Dropping(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(nn.functional.gelu(x), 0.5).exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Residual(width) for width in (16, 64, 256))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_the_bytes_are_those_that_a_profiler_finds_around_the_block():
    model, x = Model(), torch.randn(32, 8)
    advice = {s.name: s for s in suggest(model, x).suggestions}
    for name, block in blocks_of(model).items():
        h = torch.randn(32, 8, requires_grad=True) * 1
        with CheckpointProfiler() as profiler, CheckpointScope(name):
            y = block(h)
        del y
        assert advice[name].saved_bytes == profiler.memory_saved()


def test_parameters_are_not_counted_and_random_states_are():
    model = nn.Sequential(nn.Sequential(nn.Embedding(1000, 64), nn.GELU()), Dropping())
    words = torch.randint(1000, (64, 8))
    advice = {s.name: s for s in suggest(model, words).suggestions}
    values = words.numel() * 64 * 4
    state = torch.random.get_rng_state().nbytes
    first, second = advice["0"], advice["1"]
    assert first.plain_bytes == values + words.nbytes
    assert first.kept_bytes == words.nbytes
    # The inputs of GELU, the noise of dropout and the result of exp.
    assert second.plain_bytes == 3 * values
    assert second.kept_bytes == values + state


def test_the_operations_are_those_of_the_replay():
    model, x = Model(), torch.randn(32, 8)
    (widest,) = [s for s in suggest(model, x).suggestions if s.name == "blocks.2"]
    with FlopCounterMode(display=False) as counter:
        blocks_of(model)["blocks.2"].get_submodule("up")(
            x
        )  # the second product is not needed for backward
    assert widest.replay_flops == counter.get_total_flops()


def test_best_comes_first():
    found = suggest(Model(), torch.randn(32, 8)).suggestions
    worth = [s.saved_bytes / (s.replay_flops + 1) for s in found]
    assert worth == sorted(worth, reverse=True)
    assert {s.name for s in found} == {"blocks.0", "blocks.1", "blocks.2"}


def test_blocks_are_members_of_lists_outermost_or_else_children():
    nested = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    assert list(blocks_of(nested)) == ["0", "1"]
    assert list(blocks_of(Residual(4))) == ["up", "down"]
    assert list(blocks_of(Model())) == ["blocks.0", "blocks.1", "blocks.2"]


def test_the_model_is_left_as_it_was():
    model = Model()
    before = [dict(module.__dict__) for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    suggest(model, torch.randn(4, 8))
    assert [set(module.__dict__) for module in model.modules()] == [
        set(attributes) for attributes in before
    ]
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_that_raises_leaves_no_region_behind():
    model = Model()
    with pytest.raises(RuntimeError):
        suggest(model, torch.randn(4, 5))
    suggest(model, torch.randn(4, 8))


def test_it_prints_a_table():
    lines = str(suggest(Model(), torch.randn(32, 8))).splitlines()
    assert lines[0].split() == ["module", "saves", "recomputes"]
    assert len(lines) == 4


@pytest.mark.parametrize("model", [None, torch.relu])
def test_only_modules_are_taken(model):
    with pytest.raises(UsageError, match="expected a model"):
        suggest(model)


def test_without_gradients_there_is_nothing_to_say():
    with (
        torch.no_grad(),
        pytest.raises(UsageError, match="expected a model that saves tensors"),
    ):
        suggest(Model(), torch.randn(4, 8))
