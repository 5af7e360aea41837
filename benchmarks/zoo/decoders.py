"""Decoder-only transformers: GPT, a Llama, a mixture of experts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.case import Pair, Scale
from recoup.cli.gpt import Block, Shape

GPT_SHAPES: dict[Scale, tuple[Shape, int]] = {
    "tiny": (Shape(6, 32, 2, 61, 32), 8),
    "large": (Shape(24, 2048, 16, 50304, 1024), 8),
}
"""Each with the number of sequences in a batch."""

WIDE_SHAPES: dict[Scale, tuple[Shape, int]] = {
    "tiny": (Shape(4, 64, 2, 61, 32), 4),
    "large": (Shape(24, 4096, 32, 50304, 1024), 8),
}

DROPOUT_SHAPES: dict[Scale, tuple[Shape, int]] = {
    "tiny": (Shape(4, 32, 2, 61, 32, dropout=0.1), 8),
    "large": (Shape(24, 1536, 12, 50304, 1024, dropout=0.1), 8),
}


class Decoder(nn.Module):
    """A GPT whose scores and embedding share their weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.words(tokens) + self.places(places))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def sequences(shape: "Shape | LlamaShape", batch: int) -> Pair:
    tokens = torch.randint(shape.vocabulary, (batch, shape.context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama; `sharing` query heads use one key and value head."""

    layers: int
    width: int
    heads: int
    sharing: int
    inner: int
    vocabulary: int
    context: int


LLAMA_SHAPES: dict[Scale, tuple[LlamaShape, int]] = {
    "tiny": (LlamaShape(4, 32, 4, 2, 88, 61, 32), 8),
    "large": (LlamaShape(16, 2048, 32, 4, 5632, 32000, 2048), 8),
}


class Llama(nn.Module):
    """Root-mean-square norms, rotary places, grouped queries, gated perceptrons."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.width // shape.heads // 2
        turns = 10000 ** (-torch.arange(half) / half)
        self.register_buffer("turns", turns, persistent=False)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(places.float(), self.turns.float())
        angles = torch.cat((angles, angles), dim=-1)
        hidden = self.words(tokens)
        cosine, sine = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine)
        return self.head(self.norm(hidden))


class LlamaLayer(nn.Module):
    """Grouped-query attention with rotary places, and a gated perceptron."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.feature = shape.width // shape.heads
        self.sharing = shape.sharing
        shared = shape.width // shape.sharing
        self.attention_norm = nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shared, bias=False)
        self.value = nn.Linear(shape.width, shared, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        query = rotated(self._heads(self.query(normed)), cosine, sine)
        key = rotated(self._heads(self.key(normed)), cosine, sine)
        value = self._heads(self.value(normed))
        found = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(self.sharing, dim=1),
            value.repeat_interleave(self.sharing, dim=1),
            is_causal=True,
        )
        hidden = hidden + self.out(found.transpose(1, 2).flatten(2))
        normed = self.norm(hidden)
        gated = functional.silu(self.gate(normed)) * self.up(normed)
        return hidden + self.down(gated)

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, self.feature)).transpose(1, 2)


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return heads turned by their places."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of a mixture: each token goes to the best `chosen` experts."""

    model: Shape
    experts: int
    chosen: int


EXPERT_SHAPES: dict[Scale, tuple[ExpertShape, int]] = {
    "tiny": (ExpertShape(Shape(3, 32, 2, 61, 32), 4, 2), 8),
    "large": (ExpertShape(Shape(12, 1024, 16, 50304, 1024), 8, 2), 16),
}


class ExpertDecoder(Decoder):
    """A GPT in which a router sends each token to some of the perceptrons."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__(shape.model)
        for block in self.blocks:
            block.widen = nn.Identity()
            block.narrow = Experts(shape)
            block.perceptron_norm = nn.LayerNorm(shape.model.width)


class Experts(nn.Module):
    """Perceptrons, each run on the tokens that the router sends to it."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        width = shape.model.width
        self.chosen = shape.chosen
        self.router = nn.Linear(width, shape.experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(shape.experts)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).topk(self.chosen, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            share = shares[token, place, None]
            out = out.index_add(0, token, share * expert(tokens[token]))
        return out.view_as(hidden)


def expert_batch(scale: Scale) -> Pair:
    shape, batch = EXPERT_SHAPES[scale]
    return sequences(shape.model, batch)
