"""A small GPT, which the demonstration and the benchmarks train."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

RunBlock = Callable[["Block", Tensor], Tensor]
"""Calls a block: plainly, or inside a region."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a GPT.

    Attributes:
        layers: Blocks.
        width: Features of each position.
        heads: Attention heads of each block; they divide the width.
        vocabulary: Number of distinct tokens.
        context: Number of positions.
        dropout: The share of each branch's features that training sets to zero.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    dropout: float = 0.0


def run_plain(block: "Block", hidden: Tensor) -> Tensor:
    """Call the block without a region."""
    return block(hidden)


class GPT(nn.Module):
    """A decoder-only transformer that returns the loss of its predictions.

    Examples:
        >>> model = GPT(Shape(layers=2, width=8, heads=2, vocabulary=5, context=4))
        >>> tokens = torch.zeros(1, 4, dtype=torch.long)
        >>> model(tokens, tokens).shape
        torch.Size([])
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(
        self, tokens: Tensor, targets: Tensor, run_block: RunBlock = run_plain
    ) -> Tensor:
        """Return the mean cross entropy of predicting `targets` from `tokens`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            assert isinstance(block, Block), "made in __init__"
            hidden = run_block(block, hidden)
        scores = self.head(self.norm(hidden))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention and a perceptron, each normed before and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.perceptron_norm = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next layer's features, in the shape of `hidden`."""
        hidden = hidden + self.dropout(self._attend(self.attention_norm(hidden)))
        wide = functional.gelu(self.widen(self.perceptron_norm(hidden)))
        return hidden + self.dropout(self.narrow(wide))

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(2, (3, self.heads, -1))
        # Batch, position, which, head, feature: attention needs the heads second.
        query, key, value = heads.transpose(1, 3).unbind(2)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(out.transpose(1, 2).flatten(2))
