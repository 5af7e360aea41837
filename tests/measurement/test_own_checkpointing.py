"""A model that recomputes by itself: the user learns that this raises the floor."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import BudgetWarning, InfeasibleError

X = torch.ones(64, 8)


class Net(nn.Module):
    """Blocks that torch's own checkpointing recomputes, if it is on."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
            for _ in range(4)
        )
        self.reentrant = reentrant
        self.checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        x = x * x.new_ones((), requires_grad=True)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                x = layer(x)
        return x


def floor_of(model: nn.Module) -> int:
    with pytest.raises(InfeasibleError) as caught:
        recoup.fit(model, X, 1, loss=Tensor.sum)
    return caught.value.floor_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_blocks_that_the_model_recomputes_are_named(reentrant):
    words = r"calls layers\.0, layers\.1, layers\.2.* again in backward"
    with pytest.warns(BudgetWarning, match=words) as caught:
        recoup.fit(Net(reentrant=reentrant), X, 1.0, loss=Tensor.sum)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("dry", [False, True])
def test_a_measurement_names_them_too(dry):
    with pytest.warns(BudgetWarning, match="again in backward"):
        recoup.measure(Net(), X, loss=Tensor.sum, dry=dry)


def test_without_its_own_checkpointing_the_floor_is_lower():
    model = Net()
    with pytest.warns(BudgetWarning, match="smallest feasible budget is larger"):
        with_it = floor_of(model)
    model.checkpointing = False
    assert floor_of(model) < with_it


def test_transformers_own_checkpointing_is_recognized():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
        )
    ).train()
    tokens = torch.randint(0, 64, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    model.gradient_checkpointing_enable()
    words = r"calls model\.layers\.0, model\.layers\.1, model\.layers\.2 again"
    with pytest.warns(BudgetWarning, match=words):
        recoup.measure(model, batch)
    model.gradient_checkpointing_disable()
    recoup.measure(model, batch)


def test_a_model_with_scopes_of_recoup_gives_no_warning():
    model = Net()
    model.checkpointing = False
    for layer in model.layers[:2]:
        recoup.checkpoint_module(layer)
    recoup.measure(model, X, loss=Tensor.sum)


def test_modules_that_only_backward_calls_give_no_warning():
    """A hook that computes with a module is no recomputation."""
    model = Net()
    model.checkpointing = False
    other = nn.Linear(8, 8)
    model.add_module("other", other)

    def step() -> None:
        out = model(X)
        out.register_hook(lambda grad: other(grad).detach())
        out.sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recoup.measure(model, step=step)
