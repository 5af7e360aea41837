"""A ResNet with BatchNorm in a budget: statistics move once, gradients are the same.

Run it with `python examples/resnet_with_batchnorm.py`.
"""

import copy

import torch
from torch import Tensor, nn

import recoup

CHANNELS, CLASSES, DEPTH = 16, 10, 6


class Residual(nn.Module):
    """Two convolutions with BatchNorm, around which the input goes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(CHANNELS)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first_norm(self.first(x)).relu_()
        return (self.second_norm(self.second(inner)) + x).relu_()


def make_model() -> nn.Module:
    """Make a small residual network for pictures of 16 x 16."""
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        *(Residual() for _ in range(DEPTH)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, CLASSES),
    )


def step(model: nn.Module, pictures: Tensor, labels: Tensor) -> list[Tensor]:
    """Run a step; return the gradients and the statistics it left."""
    model.zero_grad()
    nn.functional.cross_entropy(model(pictures), labels).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers()]


def main() -> None:
    """Compare the plain network with one in a budget, statistics included."""
    torch.manual_seed(0)
    plain = make_model()
    pictures = torch.randn(16, 3, 16, 16)
    labels = torch.randint(CLASSES, (16,))
    model = copy.deepcopy(plain)
    model, report = recoup.fit(
        model, (pictures, labels), budget=0.7, loss=nn.functional.cross_entropy
    )
    print(report)
    assert report.measured_peak_bytes <= report.budget_bytes
    found = step(model, pictures, labels)
    expected = step(plain, pictures, labels)
    assert all(map(torch.equal, found, expected)), "all must be equal"
    counts = [int(b) for name, b in model.named_buffers() if "num_batches" in name]
    assert set(counts) == {1}, "a replay does not count as another batch"
    report.remove()
    print("Gradients and running statistics are bitwise equal; each moved once.")


if __name__ == "__main__":
    main()
