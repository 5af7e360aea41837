"""Training loops as people write them, on small random models, for whole-loop laws."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup import CheckpointScope, keep

KINDS = (
    "plain",
    "zero_grad after forward",
    "accumulation",
    "two models",
    "two towers",
    "gan",
    "gan without a graph for the generator",
    "distillation",
    "other sizes",
    "output kept by the loop",
    "two backwards",
    "layer by layer",
    "loss is a module",
)


class Block(nn.Module):
    """A residual block, maybe with a scope or a mark of the user's own."""

    def __init__(self, width, hidden, *, rate, scoped, marked):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(rate)
        self.scoped, self.marked = scoped, marked

    def forward(self, x):
        if not self.scoped:
            return self.run(x)
        with CheckpointScope("the user's"):
            return self.run(x)

    def run(self, x):
        y = functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(keep(y) if self.marked else y))


@dataclass
class Loop:
    """A loop: its models, and one step of it."""

    models: Sequence[nn.Sequential]
    batches: list[Tensor]
    kind: str
    draw: random.Random
    optimizers: list[torch.optim.Optimizer] = field(init=False)
    last: object = None

    def __post_init__(self):
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.01) for model in self.models
        ]

    def step(self, number):  # noqa: C901, PLR0912, PLR0915 (a table of loops)
        first = self.models[0]
        x, other = (self.batches[(number + n) % len(self.batches)] for n in (0, 1))
        target = torch.zeros(len(x), dtype=torch.long)
        match self.kind:
            case "zero_grad after forward":
                loss = functional.cross_entropy(first(x), target)
                self.clear()
                loss.backward()
            case "accumulation":
                self.clear()
                for batch in self.batches[:3]:
                    functional.cross_entropy(first(batch), target).backward()
            case "two models":
                self.clear()
                functional.cross_entropy(self.models[1](first(x)), target).backward()
            case "two towers":
                self.clear()
                scores = first(x) @ self.models[1](other).T
                functional.cross_entropy(scores, torch.arange(len(x))).backward()
            case "gan" | "gan without a graph for the generator":
                self.gan(x, other)
                return
            case "distillation":
                self.clear()
                with torch.no_grad():
                    wanted = first(x)
                functional.mse_loss(self.models[1](x), wanted).backward()
            case "two backwards":
                self.clear()
                output = first(x)
                functional.cross_entropy(output, target).backward(retain_graph=True)
                output.square().mean().backward()
            case "layer by layer":
                self.clear()
                for layer in first:
                    x = layer(x)
                functional.cross_entropy(x, target).backward()
            case "other sizes":
                self.clear()
                rows = self.draw.randint(len(x) // 3, len(x))
                functional.cross_entropy(first(x[:rows]), target[:rows]).backward()
            case "loss is a module":
                self.clear()
                nn.CrossEntropyLoss()(first(x), target).backward()
            case _:
                self.clear()
                output = first(x)
                loss = functional.cross_entropy(output, target)
                loss.backward()
                if self.kind == "output kept by the loop":
                    self.last = output, loss
        for optimizer in self.optimizers:
            optimizer.step()

    def gan(self, noise, real):
        generator, judge = self.models
        if self.kind == "gan":
            fake = generator(noise)
        else:
            with torch.no_grad():
                fake = generator(noise)
        self.optimizers[1].zero_grad()
        right = functional.softplus(-judge(real)).mean()
        (right + functional.softplus(judge(fake.detach())).mean()).backward()
        self.optimizers[1].step()
        self.optimizers[0].zero_grad()
        if self.kind != "gan":
            fake = generator(noise)
        functional.softplus(-judge(fake)).mean().backward()
        self.optimizers[0].step()

    def clear(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state(self):
        """Everything that training has changed."""
        found = [
            p.detach().clone() for model in self.models for p in model.parameters()
        ]
        return [*found, torch.random.get_rng_state()]


def loop_of(kind, seed):
    """Return a loop of a kind, the same one for a seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows = draw.choice([64, 128, 256])
    scoped, marked = draw.choice([0, 0.4]), draw.choice([0, 0.4])

    def network(width=32):
        rate = draw.choice([0.0, 0.1])
        blocks = [
            Block(
                32,
                draw.choice([64, 128, 256]),
                rate=rate,
                scoped=draw.random() < scoped,
                marked=draw.random() < marked,
            )
            for _ in range(draw.randint(2, 5))
        ]
        return nn.Sequential(*blocks, nn.Linear(32, width))

    several = ("two models", "two towers", "distillation")
    if kind in several or kind.startswith("gan"):
        models = [network(), network(1 if kind.startswith("gan") else 32)]
    else:
        models = [network(draw.choice([32, 300]))]
    batches = [torch.randn(rows, 32) for _ in range(4)]
    return Loop(models, batches, kind, draw)
