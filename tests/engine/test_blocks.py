"""Blocks of models: the layers, not what layers are made of."""

import pytest
from torch import nn

from recoup.engine.applied.model_blocks import block_names


class Adapted(nn.Module):
    """A projection with an adapter, as PEFT makes of a linear layer."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.1)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4)})


class Attention(nn.Module):
    """Four projections of one class, and nothing else."""

    def __init__(self, projection):
        super().__init__()
        self.query, self.key = projection(), projection()
        self.value, self.out = projection(), projection()


class Layer(nn.Module):
    def __init__(self, projection):
        super().__init__()
        self.attention = Attention(projection)
        self.norm = nn.LayerNorm(4)


class Stage(nn.Module):
    """A member of a list that is itself a list of blocks, as in Swin."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(lambda: nn.Linear(4, 4)) for _ in range(2))
        self.downsample = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.layers = nn.ModuleList(layers)


@pytest.mark.parametrize("projection", [lambda: nn.Linear(4, 4), Adapted])
def test_adapters_do_not_change_which_modules_are_blocks(projection):
    model = Model(Layer(projection) for _ in range(3))
    assert block_names(model) == ("layers.0", "layers.1", "layers.2")


def test_lists_in_members_of_a_list_are_looked_into():
    model = Model(Stage() for _ in range(2))
    assert block_names(model) == (
        "layers.0.blocks.0",
        "layers.0.blocks.1",
        "layers.1.blocks.0",
        "layers.1.blocks.1",
    )
