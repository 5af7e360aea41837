"""A ResNet-50 that returns its loss and lets its blocks be run in any way."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

RunModule = Callable[[nn.Module, Tensor], Tensor]


class Bottleneck(nn.Module):
    """Three convolutions with batch normalisation, and a way around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(channels, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
                nn.Conv2d(width, 4 * width, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(4 * width)]
        )
        self.shortcut = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False),
                nn.BatchNorm2d(4 * width),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for convolution, norm in zip(
            self.convolutions[:-1], self.norms[:-1], strict=True
        ):
            y = functional.relu(norm(convolution(y)), inplace=True)
        y = self.norms[-1](self.convolutions[-1](y))
        return functional.relu(y + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Stages of bottlenecks; the depths of ResNet-50 by default."""

    def __init__(
        self,
        depths: tuple[int, ...] = (3, 4, 6, 3),
        *,
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels, blocks = width, list[nn.Module]()
        for stage, depth in enumerate(depths):
            inner = width << stage
            for index in range(depth):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(channels, inner, stride))
                channels = 4 * inner
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(
        self, images: Tensor, targets: Tensor, run_block: RunModule | None = None
    ) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x) if run_block is None else run_block(block, x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), targets)
