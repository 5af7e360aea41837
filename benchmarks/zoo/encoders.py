"""Encoders and encoder-decoders: BERT, a vision transformer, a translator."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.case import Pair, Scale


@dataclass(frozen=True)
class EncoderShape:
    """The sizes of a stack of encoder layers, and of its batch."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    dropout: float = 0.0
    vocabulary: int = 0


BERT_SHAPES: dict[Scale, EncoderShape] = {
    "tiny": EncoderShape(4, 32, 2, 24, 8, 0.1, 61),
    "large": EncoderShape(24, 1024, 16, 512, 48, 0.1, 30522),
}


class Attention(nn.Module):
    """Attention of one sequence to another, or to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self, hidden: Tensor, memory: Tensor, *, is_causal: bool = False
    ) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(hidden), self.key(memory), self.value(memory))
        )
        found = functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal
        )
        return self.out(found.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Attention and a perceptron, each added to its input and normed after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        attended = self.dropout(self.attention(hidden, hidden))
        hidden = self.attention_norm(hidden + attended)
        wide = functional.gelu(self.widen(hidden))
        return self.norm(hidden + self.dropout(self.narrow(wide)))


@dataclass
class BertOutput:
    """What a BERT returns: scores of every token, and of the whole sequence."""

    tokens: Tensor
    sequence: Tensor


class Bert(nn.Module):
    """An encoder with a head for hidden tokens and one for the sequence."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(shape.width, shape.heads, shape.dropout)
            for _ in range(shape.layers)
        )
        self.head = nn.Linear(shape.width, shape.vocabulary)
        self.pooler = nn.Linear(shape.width, 2)

    def forward(self, tokens: Tensor) -> BertOutput:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.words(tokens) + self.places(places))
        hidden = self.dropout(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return BertOutput(self.head(hidden), self.pooler(hidden[:, 0]))


def bert_loss(output: BertOutput, targets: Tensor) -> Tensor:
    scores = functional.cross_entropy(output.tokens.flatten(0, 1), targets.flatten())
    return scores + functional.cross_entropy(output.sequence, targets[:, 0] % 2)


def bert_batch(scale: Scale) -> Pair:
    shape = BERT_SHAPES[scale]
    tokens = torch.randint(shape.vocabulary, (2, shape.batch, shape.length))
    return {"tokens": tokens[0]}, tokens[1]


@dataclass(frozen=True)
class VisionShape:
    """The sizes of a vision transformer, and of its batch."""

    layers: int
    width: int
    heads: int
    image: int
    patch: int
    classes: int
    batch: int


VIT_SHAPES: dict[Scale, VisionShape] = {
    "tiny": VisionShape(4, 32, 2, 24, 4, 10, 8),
    "large": VisionShape(24, 1024, 16, 224, 16, 1000, 160),
}


class VisionLayer(nn.Module):
    """Attention and a perceptron, each normed before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention(normed, normed)
        return hidden + self.perceptron(self.norm(hidden))


class VisionTransformer(nn.Module):
    """A transformer over patches of an image, with a class token."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        count = (shape.image // shape.patch) ** 2
        self.patches = nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.places = nn.Parameter(torch.randn(1, count + 1, shape.width) * 0.02)
        self.blocks = nn.Sequential(
            *(VisionLayer(shape.width, shape.heads) for _ in range(shape.layers))
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.expand(images.shape[0], -1, -1)
        hidden = torch.cat((token, patches), dim=1) + self.places
        return self.head(self.norm(self.blocks(hidden))[:, 0])


def vit_batch(scale: Scale) -> Pair:
    shape = VIT_SHAPES[scale]
    images = torch.randn(shape.batch, 3, shape.image, shape.image)
    return images, torch.randint(shape.classes, (shape.batch,))


TRANSLATOR_SHAPES: dict[Scale, EncoderShape] = {
    "tiny": EncoderShape(3, 32, 2, 24, 8, 0.0, 61),
    "large": EncoderShape(12, 1024, 16, 512, 40, 0.0, 32000),
}


class DecoderLayer(nn.Module):
    """Causal attention, attention to the encoder's result, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.own = Attention(width, heads)
        self.own_norm = nn.LayerNorm(width)
        self.cross = Attention(width, heads)
        self.cross_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        normed = self.own_norm(hidden)
        hidden = hidden + self.own(normed, normed, is_causal=True)
        hidden = hidden + self.cross(self.cross_norm(hidden), memory)
        return hidden + self.perceptron(self.norm(hidden))


class Translator(nn.Module):
    """An encoder, and a decoder every layer of which looks at its result."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        width, heads = shape.width, shape.heads
        self.words = nn.Embedding(shape.vocabulary, width)
        self.places = nn.Embedding(shape.length, width)
        self.encoder = nn.ModuleList(
            EncoderLayer(width, heads, shape.dropout) for _ in range(shape.layers)
        )
        self.decoder = nn.ModuleList(
            DecoderLayer(width, heads) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.vocabulary, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self._embedded(source)
        for layer in self.encoder:
            memory = layer(memory)
        hidden = self._embedded(target)
        for layer in self.decoder:
            hidden = layer(hidden, memory)
        return self.head(self.norm(hidden))

    def _embedded(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.words(tokens) + self.places(places)


def translator_batch(scale: Scale) -> Pair:
    shape = TRANSLATOR_SHAPES[scale]
    tokens = torch.randint(shape.vocabulary, (3, shape.batch, shape.length))
    return (tokens[0], tokens[1]), tokens[2]
