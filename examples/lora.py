"""LoRA-style training: a frozen model with small trained parts, in a budget.

Run it with `python examples/lora.py`.
"""

import copy

import torch
from torch import Tensor, nn

import recoup

WIDTH, RANK, LAYERS, BATCH = 128, 4, 6, 512


class Adapted(nn.Module):
    """A frozen linear layer, plus a trained product of two thin ones."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, out).requires_grad_(False)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    """A feed-forward block of adapted layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.wide = Adapted(WIDTH, 4 * WIDTH)
        self.narrow = Adapted(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """Run a step; return the gradients of what is trained."""
    model.zero_grad()
    model(batch).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def main() -> None:
    """Compare the plain model with one in a budget."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(LAYERS)))
    batch = torch.randn(BATCH, WIDTH)
    model = copy.deepcopy(plain)
    model, report = recoup.fit(
        model, batch, budget=0.6, loss=lambda out: out.square().mean()
    )
    print(report)
    assert report.measured_peak_bytes <= report.budget_bytes
    found, expected = gradients(model, batch), gradients(plain, batch)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(found) == len(trained) == 4 * LAYERS
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    report.remove()
    print("Only the adapters have gradients, and these are bitwise equal.")


if __name__ == "__main__":
    main()
