"""A GAN: two models and two optimizers in one budget.

Run it with `python examples/gan.py`.
"""

import copy

import torch
from torch import Tensor, nn

import recoup

NOISE, SIZE, BATCH, STEPS = 32, 32, 32, 3

adversarial = nn.functional.binary_cross_entropy_with_logits


def generator() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.ConvTranspose2d(NOISE, 64, 8), nn.BatchNorm2d(64), nn.ReLU()),
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(64, 32, 3, padding=1),
                      nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(32, 3, 3, padding=1),
                      nn.Tanh()),
    )  # fmt: skip


def discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.SiLU()),
        nn.Sequential(nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(4, 64), nn.SiLU()),
        nn.Sequential(nn.Conv2d(64, 64, 3, 2, 1), nn.GroupNorm(4, 64), nn.SiLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(64 * (SIZE // 8) ** 2, 1)),
    )


class Gan:
    """Both models, their optimizers, and the two halves of a step."""

    def __init__(self, g: nn.Module, d: nn.Module) -> None:
        self.g, self.d = g, d
        self.g_optimizer = torch.optim.Adam(g.parameters(), 2e-4, (0.5, 0.999))
        self.d_optimizer = torch.optim.Adam(d.parameters(), 2e-4, (0.5, 0.999))

    def train_d(self, noise: Tensor, real: Tensor) -> None:
        """Add the discriminator's gradients."""
        with torch.no_grad():
            fake = self.g(noise)
        judged = self.d(torch.cat([real, fake]))
        is_real = torch.arange(2 * BATCH) < BATCH
        adversarial(judged.squeeze(1), is_real.float()).backward()

    def train_g(self, noise: Tensor) -> None:
        """Add the generator's gradients."""
        judged = self.d(self.g(noise))
        adversarial(judged, torch.ones_like(judged)).backward()

    def train(self, noise: Tensor, real: Tensor) -> None:
        """Run one step of both, as a training loop does."""
        self.train_d(noise, real)
        self.d_optimizer.step()
        self.d_optimizer.zero_grad()
        self.train_g(noise)
        self.g_optimizer.step()
        self.g_optimizer.zero_grad()
        self.d_optimizer.zero_grad()


def main() -> None:
    """Train a GAN plainly and in a budget, and compare the weights."""
    torch.manual_seed(0)
    plain = Gan(generator(), discriminator())
    noise = torch.randn(BATCH, NOISE, 1, 1)
    real = torch.randn(BATCH, 3, SIZE, SIZE)
    gan = Gan(copy.deepcopy(plain.g), copy.deepcopy(plain.d))

    def step() -> None:  # without the optimizers, which would train the models
        gan.train_d(noise, real)
        gan.d_optimizer.zero_grad()
        gan.train_g(noise)

    optimizers = [gan.g_optimizer, gan.d_optimizer]
    _, report = recoup.fit([gan.g, gan.d], None, 0.75, step=step, optimizer=optimizers)
    print(report)
    assert report.measured_peak_bytes <= report.budget_bytes
    for _ in range(STEPS):
        plain.train(noise, real)
        gan.train(noise, real)
    weights = [*gan.g.state_dict().values(), *gan.d.state_dict().values()]
    expected = [*plain.g.state_dict().values(), *plain.d.state_dict().values()]
    assert all(map(torch.equal, weights, expected)), "weights must be equal"
    report.remove()
    print(f"After {STEPS} steps the weights of both models are bitwise equal.")


if __name__ == "__main__":
    main()
