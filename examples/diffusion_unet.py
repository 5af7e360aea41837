"""A diffusion U-Net, whose skip connections cross the whole model, in a budget.

Run it with `python examples/diffusion_unet.py`.
"""

import copy

import torch
from torch import Tensor, nn

import recoup

CHANNELS, LEVELS, SIDE, BATCH = 16, 3, 16, 4


class Level(nn.Module):
    """A convolution with the time of the diffusion mixed in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(CHANNELS, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.first(nn.functional.silu(self.norm(x)))
        x = x + self.time(time)[:, :, None, None]
        return self.second(nn.functional.silu(x))


class UNet(nn.Module):
    """Predicts the noise in a picture at a time of the diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.time = nn.Sequential(
            nn.Linear(1, CHANNELS), nn.SiLU(), nn.Linear(CHANNELS, CHANNELS)
        )
        self.down = nn.ModuleList(Level(CHANNELS, CHANNELS) for _ in range(LEVELS))
        self.middle = Level(CHANNELS, CHANNELS)
        self.up = nn.ModuleList(Level(2 * CHANNELS, CHANNELS) for _ in range(LEVELS))
        self.leave = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, pictures: Tensor, when: Tensor) -> Tensor:
        time = self.time(when[:, None])
        x, skipped = self.enter(pictures), []
        for level in self.down:
            x = level(x, time)
            skipped.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for level in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = level(torch.cat([x, skipped.pop()], dim=1), time)
        return self.leave(x)


def gradients(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Run a step; return the gradients."""
    model.zero_grad()
    model(*inputs).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def main() -> None:
    """Compare the plain model with one in a budget."""
    torch.manual_seed(0)
    plain = UNet()
    inputs = torch.randn(BATCH, 3, SIDE, SIDE), torch.rand(BATCH)
    model = copy.deepcopy(plain)
    model, report = recoup.fit(
        model, inputs, budget=0.85, loss=lambda out: out.square().mean()
    )
    print(report)
    assert report.measured_peak_bytes <= report.budget_bytes
    found, expected = gradients(model, inputs), gradients(plain, inputs)
    assert len(found) == len(expected) == len(list(plain.parameters()))
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    report.remove()
    print("Across all skip connections the gradients are bitwise equal.")


if __name__ == "__main__":
    main()
