"""Convolutional networks: residual, dense, with skips across, and ConvNeXt."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.case import Pair, Scale


@dataclass(frozen=True)
class ImageShape:
    """The sizes of a batch of images."""

    batch: int
    image: int
    classes: int


IMAGES: dict[Scale, ImageShape] = {
    "tiny": ImageShape(8, 32, 10),
    "large": ImageShape(256, 224, 1000),
}


def labelled_images(scale: Scale) -> Pair:
    shape = IMAGES[scale]
    images = torch.randn(shape.batch, 3, shape.image, shape.image)
    images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.randint(shape.classes, (shape.batch,))


class Bottleneck(nn.Module):
    """A residual block of three convolutions, with ReLU in place."""

    def __init__(self, channels: int, inner: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, inner, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(inner)
        self.third = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.third_norm = nn.BatchNorm2d(4 * inner)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or channels != 4 * inner:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * inner, 1, stride, bias=False),
                nn.BatchNorm2d(4 * inner),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.first_norm(self.first(x)))
        out = self.relu(self.second_norm(self.second(out)))
        out = self.third_norm(self.third(out))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network of bottleneck blocks in four stages."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        stages: list[nn.Module] = []
        channels = width
        for number, depth in enumerate(depths):
            inner = width * 2**number
            blocks: list[nn.Module] = []
            for place in range(depth):
                stride = 2 if place == 0 and number > 0 else 1
                blocks.append(Bottleneck(channels, inner, stride=stride))
                channels = 4 * inner
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


def resnet50(scale: Scale) -> nn.Module:
    if scale == "tiny":
        return _last(ResNet((2, 2, 2, 1), 4, 10))
    return _last(ResNet((3, 4, 6, 3), 64, 1000))


def resnet152(scale: Scale) -> nn.Module:
    if scale == "tiny":
        return _last(ResNet((2, 3, 5, 2), 4, 10))
    return _last(ResNet((3, 8, 36, 3), 64, 1000))


class DenseLayer(nn.Module):
    """Two convolutions whose result is put beside all results before it."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(channels)
        self.first = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(4 * growth)
        self.second = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = functional.relu(self.first_norm(torch.cat(features, 1)))
        x = functional.relu(self.second_norm(self.first(x)))
        return self.second(x)


class DenseStage(nn.ModuleList):
    """Layers each of which sees the results of all before it."""

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Dense stages with a halving of channels and size between them."""

    def __init__(self, depths: tuple[int, ...], growth: int, classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        stages: list[nn.Module] = []
        for number, depth in enumerate(depths):
            layers = [DenseLayer(channels + k * growth, growth) for k in range(depth)]
            stages.append(DenseStage(layers))
            channels += depth * growth
            if number + 1 < len(depths):
                stages.append(transition(channels))
                channels //= 2
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stages(self.stem(images))), inplace=True)
        return self.head(x.mean((2, 3)))


def transition(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )


def densenet121(scale: Scale) -> nn.Module:
    if scale == "tiny":
        return _last(DenseNet((3, 4, 3), 4, 10))
    return _last(DenseNet((6, 12, 24, 16), 32, 1000))


class ConvNextLayer(nn.Module):
    """A depthwise convolution, then a perceptron over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(functional.gelu(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Stages of ConvNeXt layers, each after a halving of the size."""

    def __init__(
        self, depths: tuple[int, ...], widths: tuple[int, ...], classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 4, stride=4)
        stages: list[nn.Module] = []
        before = widths[0]
        for depth, width in zip(depths, widths, strict=True):
            down = nn.Conv2d(before, width, 2, stride=2) if stages else nn.Identity()
            stages.append(
                nn.Sequential(down, *(ConvNextLayer(width) for _ in range(depth)))
            )
            before = width
        self.stages = nn.ModuleList(stages)
        self.norm = nn.LayerNorm(before)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean((2, 3))))


def convnext(scale: Scale) -> nn.Module:
    if scale == "tiny":
        return _last(ConvNext((2, 3, 2), (12, 24, 48), 10))
    return _last(ConvNext((3, 3, 27, 3), (128, 256, 512, 1024), 1000))


@dataclass(frozen=True)
class SegmentationShape:
    """The sizes of a U-Net and of its batch."""

    levels: int
    width: int
    image: int
    batch: int


UNET_SHAPES: dict[Scale, SegmentationShape] = {
    "tiny": SegmentationShape(3, 4, 32, 4),
    "large": SegmentationShape(5, 64, 512, 24),
}


def double_convolution(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A way down and a way up, with every level of one beside that of the other."""

    def __init__(self, shape: SegmentationShape) -> None:
        super().__init__()
        widths = [shape.width * 2**level for level in range(shape.levels)]
        self.down = nn.ModuleList(
            double_convolution(before, after)
            for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2)
            for width in widths[-2::-1]
        )
        self.up = nn.ModuleList(
            double_convolution(2 * width, width) for width in widths[-2::-1]
        )
        self.head = nn.Conv2d(shape.width, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = images
        for number, level in enumerate(self.down):
            x = level(functional.max_pool2d(x, 2) if number else x)
            skips.append(x)
        skips.pop()
        for enlarge, level in zip(self.enlarge, self.up, strict=True):
            x = level(torch.cat((skips.pop(), enlarge(x)), 1))
        return self.head(x)


def unet(scale: Scale) -> nn.Module:
    return _last(UNet(UNET_SHAPES[scale]))


def unet_batch(scale: Scale) -> Pair:
    shape = UNET_SHAPES[scale]
    images = torch.randn(shape.batch, 3, shape.image, shape.image)
    images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.randint(2, (shape.batch, shape.image, shape.image))


def _last(model: nn.Module) -> nn.Module:
    """Return the model with its channels last, as convolutions like it best."""
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
