"""Models of sequences and patches without attention: LSTMs and an MLP-Mixer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.case import Pair, Scale


@dataclass(frozen=True)
class RecurrentShape:
    """The sizes of a stack of recurrent layers, and of its batch."""

    layers: int
    width: int
    length: int
    batch: int
    vocabulary: int


LSTM_SHAPES: dict[Scale, RecurrentShape] = {
    "tiny": RecurrentShape(4, 24, 24, 8, 61),
    "large": RecurrentShape(6, 2048, 512, 96, 32000),
}


class LstmStack(nn.Module):
    """Recurrent layers, each with a norm and added to its input."""

    def __init__(self, shape: RecurrentShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LstmLayer(shape.width) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class LstmLayer(nn.Module):
    """A recurrent layer behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.recurrent = nn.LSTM(width, width, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.recurrent(self.norm(hidden))[0]


def lstm_batch(scale: Scale) -> Pair:
    shape = LSTM_SHAPES[scale]
    tokens = torch.randint(shape.vocabulary, (2, shape.batch, shape.length))
    return tokens[0], tokens[1]


@dataclass(frozen=True)
class MixerShape:
    """The sizes of an MLP-Mixer, and of its batch."""

    layers: int
    width: int
    image: int
    patch: int
    classes: int
    batch: int


MIXER_SHAPES: dict[Scale, MixerShape] = {
    "tiny": MixerShape(4, 32, 24, 4, 10, 8),
    "large": MixerShape(24, 1024, 224, 16, 1000, 192),
}


class MixerLayer(nn.Module):
    """A perceptron over places, then one over channels."""

    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.place_norm = nn.LayerNorm(width)
        self.over_places = perceptron(places, 2 * places)
        self.channel_norm = nn.LayerNorm(width)
        self.over_channels = perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_places(self.place_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.channel_norm(x))


def perceptron(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Mixer(nn.Module):
    """Perceptrons over the patches of an image."""

    def __init__(self, shape: MixerShape) -> None:
        super().__init__()
        places = (shape.image // shape.patch) ** 2
        self.patches = nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch)
        self.layers = nn.Sequential(
            *(MixerLayer(shape.width, places) for _ in range(shape.layers))
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layers(self.patches(images).flatten(2).transpose(1, 2))
        return self.head(functional.relu(self.norm(x)).mean(1))


def mixer_batch(scale: Scale) -> Pair:
    shape = MIXER_SHAPES[scale]
    images = torch.randn(shape.batch, 3, shape.image, shape.image)
    return images, torch.randint(shape.classes, (shape.batch,))
