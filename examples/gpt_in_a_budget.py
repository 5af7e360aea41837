"""A GPT trained in three quarters of its plain peak, with the same gradients.

Run it with `python examples/gpt_in_a_budget.py`.
"""

import copy

import torch
from torch import Tensor, nn

import recoup

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 64, 4, 6, 64, 8


class Block(nn.Module):
    """A block of a transformer: attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = self.mix(self.norms[0](x)).view(batch, length, 3, HEADS, -1)
        q, k, v = mixed.transpose(1, 3).unbind(2)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        wide = nn.functional.gelu(self.wide(self.norms[1](x)))
        return x + self.dropout(self.narrow(wide))


class GPT(nn.Module):
    """Predicts the next token, and returns the loss of doing so."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer, whose state counts against the budget."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor
) -> list[Tensor]:
    """Take two steps; return the gradients of the last."""
    torch.manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        model(text[:, :-1], text[:, 1:].flatten()).backward()
        optimizer.step()
    return [p.grad for p in model.parameters() if p.grad is not None]


def main() -> None:
    """Compare the plain model with one that was fitted into a budget."""
    torch.manual_seed(0)
    plain = GPT()
    text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    model = copy.deepcopy(plain)
    batch = (text[:, :-1], text[:, 1:].flatten())
    optimizer = optimizer_of(model)
    model, report = recoup.fit(model, batch, budget=0.75, optimizer=optimizer)
    print(report)
    assert report.measured_peak_bytes <= report.budget_bytes
    found = train(model, optimizer, text)
    expected = train(plain, optimizer_of(plain), text)
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    report.remove()
    print("After two steps of AdamW with dropout all gradients are bitwise equal.")


if __name__ == "__main__":
    main()
