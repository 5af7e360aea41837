"""Training loops as people write them, on small models: run plainly or in a budget."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from recoup.backend.memory.meters import StorageMeter

WIDTH, ROWS = 16, 256


class Transformer(nn.Module):
    """Two encoder layers with dropout, on sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.1, batch_first=True)
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


def mlp() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)
        )

    return nn.Sequential(*(block() for _ in range(4)))


def conv() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU()
        )

    return nn.Sequential(
        *(block() for _ in range(4)), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (ROWS, WIDTH)),
    "conv and BatchNorm": (conv, (8, WIDTH, 24)),
    "transformer with dropout": (Transformer, (4, 12, WIDTH)),
}


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


@dataclass
class Loop:
    """A model, perhaps another one, and how a loop trains them.

    Attributes:
        models: What is trained, or called.
        shape: The shape of a batch.
        kind: Which loop it is.
    """

    models: list[nn.Module]
    shape: tuple[int, ...]
    kind: str
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = self.models[:1] if self.kind == "distillation" else self.models
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in trained]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.average = (
            torch.optim.swa_utils.AveragedModel(self.models[0])
            if self.kind == "EMA"
            else None
        )

    def batches(self, number: int) -> list[Tensor]:
        """Return the batches of one step."""
        generator = torch.Generator().manual_seed(number)
        shape = self.shape
        if self.kind == "last smaller batch" and number % 3 == 2:
            shape = (max(2, shape[0] // 2), *shape[1:])
        if self.kind == "growing sequence":
            shape = (shape[0] * (2 + number) // 2, *shape[1:])
        count = 4 if self.kind == "accumulation" else 1
        return [torch.randn(shape, generator=generator) for _ in range(count)]

    def passes(self, batches: list[Tensor]) -> list[Callable[[], None]]:
        """Return what runs forward and backward; an optimizer runs after each."""
        model, *others = self.models
        x = batches[0]

        def plain() -> None:
            for each in batches:
                (loss_of(model(each)) / len(batches)).backward()

        def mixed() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model(x))
            loss.backward()

        def scaled() -> None:
            self.scaler.scale(loss_of(model(x))).backward()

        def critic() -> None:
            (others[0](model(x).detach().view(ROWS, WIDTH)).mean()).backward()

        def generator() -> None:
            (-others[0](model(x).view(ROWS, WIDTH)).mean()).backward()

        def contrastive() -> None:
            one, other = model(x), others[0](x + 1)
            F.cross_entropy(one @ other.T, torch.arange(len(one))).backward()

        def distillation() -> None:
            with torch.no_grad():
                target = others[0](x)
            F.mse_loss(model(x), target).backward()

        def second() -> None:
            loss_of(others[0](x)).backward()

        return {
            "autocast": [mixed],
            "GradScaler": [scaled],
            "GAN": [critic, generator],
            "contrastive": [contrastive],
            "distillation": [distillation],
            "alternating optimizers": [plain, second],
        }.get(self.kind, [plain])

    def step(self) -> None:
        """Run the passes of one step without any optimizer, for `fit`."""
        for run in self.passes(self.batches(0)):
            run()
            if self.kind in ("GAN", "alternating optimizers"):
                self.zero()

    def zero(self) -> None:
        for model in self.models:
            model.zero_grad(set_to_none=True)

    def train(self, number: int, meter: StorageMeter | None = None) -> None:
        """Train one step; the meter counts forward and backward alone."""
        batches = self.batches(number)
        for place, run in enumerate(self.passes(batches)):
            with meter or contextlib.nullcontext():
                if meter is not None:
                    meter.track(*self.models, *batches)
                run()
            self.update(place)
        self.zero()

    def update(self, place: int) -> None:
        optimizers = self.optimizers
        if self.kind in ("GAN", "alternating optimizers"):
            optimizers = [self.optimizers[place - 1 if self.kind == "GAN" else place]]
        if self.kind == "clip":
            nn.utils.clip_grad_norm_(self.models[0].parameters(), 0.1)
        for optimizer in optimizers:
            if self.kind == "GradScaler":
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                optimizer.step()
        if self.kind in ("GAN", "alternating optimizers"):
            self.zero()
        if self.average is not None:
            self.average.update_parameters(self.models[0])

    def state(self) -> list[Any]:
        modules = [*self.models, *([self.average] if self.average else [])]
        return [value for module in modules for value in module.state_dict().values()]


KINDS = (
    *("plain", "accumulation", "autocast", "GradScaler", "clip", "EMA", "GAN"),
    *("contrastive", "distillation", "alternating optimizers"),
    *("last smaller batch", "growing sequence"),
)


def build(kind: str, name: str) -> Loop:
    """Return a loop of one kind on one model."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    models = [make()]
    if kind == "GAN":
        models.append(mlp())
        # The critic judges rows of the generator's output.
        shape = (ROWS, *shape[1:])
    elif kind in ("contrastive", "distillation", "alternating optimizers"):
        models.append(make())
    return Loop([model.train() for model in models], shape, kind)


def twin_of(loop: Loop) -> Loop:
    """Return the same loop on copies of its models."""
    return Loop(copy.deepcopy(loop.models), loop.shape, loop.kind)
