"""What processes do together in the tests: each function runs in all of them."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from recoup import Host, Trainer, TrainerSettings, checkpoint_module
from recoup.errors import PeerError, UnsupportedError, UsageError
from recoup.measurement.steps.optimizers import missing_state_bytes, state_bytes
from recoup.train.saving.run_state import whole
from tests.support.training import Ceiling, Classifier, samples

Values = list[list[float]]


class Unused(Classifier):
    """Has a part that only the first process uses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = nn.Linear(3, 3)
        self.uses_extra = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return self.extra(out) if self.uses_extra else out


def make_model(rank: int, kind: str, **options: Any) -> nn.Module:
    """Make the same model in every process and wrap it."""
    torch.manual_seed(0)
    model: nn.Module = Unused(**options) if kind == "unused" else Classifier(**options)
    if isinstance(model, Unused):
        model.uses_extra = rank == 0
    if kind == "plain":
        return model
    if kind.startswith("sharded"):
        policy = MixedPrecisionPolicy()
        if kind == "sharded bf16":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        assert isinstance(model, Classifier)
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for block in model.blocks if kind != "sharded whole" else ():
            if kind == "sharded nested":
                fully_shard(next(block.children()), mesh=mesh)
            fully_shard(block, mp_policy=policy, mesh=mesh)
        fully_shard(model, mp_policy=policy, mesh=mesh)
        return model
    return DistributedDataParallel(
        model, static_graph=kind == "static", find_unused_parameters=kind == "unused"
    )


def share(rank: int, count: int, step: int, *, size: int = 12) -> tuple[Tensor, Tensor]:
    """Return a process's part of a step's batch; ranks take turns with samples."""
    inputs, targets = samples(size, seed=step)
    return inputs[rank::count], targets[rank::count]


def parameters_of(model: nn.Module) -> Values:
    return [whole(p.detach()).double().flatten().tolist() for p in model.parameters()]


def train(
    rank: int, kind: str, settings: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Make three steps with the trainer."""
    model = make_model(rank, kind, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if settings.pop("offload", False):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        assert isinstance(inner, Classifier)
        for block in inner.blocks:
            checkpoint_module(block, store=Host())
    trainer = Trainer(
        model, optimizer, TrainerSettings(**settings), functional.cross_entropy
    )
    torch.manual_seed(100 + rank)
    count = distributed.get_world_size() if kind != "plain" else 1
    results = []
    for step in range(3):
        part = share(rank, count, step)
        if settings.get("accumulation_steps", 1) > 1:
            results.append(
                trainer.step(*zip(part[0].split(2), part[1].split(2), strict=True))
            )
        else:
            results.append(trainer.step(part))
    return {
        "parameters": parameters_of(model),
        "buffers": [b.double().flatten().tolist() for b in model.buffers()],
        "losses": [result.loss for result in results],
        "stepped": [result.stepped for result in results],
        "norms": [result.gradient_norm for result in results],
        "parts": [result.parts for result in results],
        "random": torch.get_rng_state().tolist(),
    }


def go_on_alone(rank: int) -> str:
    """Step, leave the others, and step again."""
    model = make_model(rank, "replicated")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(model, optimizer, loss_fn=functional.cross_entropy)
    trainer.step(share(rank, 2, 0))
    distributed.destroy_process_group()
    try:
        trainer.step(share(rank, 2, 1))
    except PeerError as error:
        return str(error)
    return "nothing happened"


def train_by_hand(rank: int, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make the same steps with torch alone."""
    model = make_model(rank, kind, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(3):
        inputs, targets = share(rank, distributed.get_world_size(), step)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "parameters": parameters_of(model),
        "buffers": [b.double().flatten().tolist() for b in model.buffers()],
        "losses": losses,
        "random": torch.get_rng_state().tolist(),
    }


def train_by_turns(
    rank: int, settings: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Make the steps of two processes in one, with torch alone.

    The shares of both are computed one after the other, and their gradients averaged
    in the order in which two processes exchange them.
    """
    half = settings.get("precision") == "fp16"
    model = make_model(rank, "plain", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", 1024.0, enabled=half)
    for step in range(3):
        gradients = []
        for process in range(2):
            inputs, targets = share(process, 2, step)
            size = len(inputs) // settings.get("accumulation_steps", 1)
            for part in zip(inputs.split(size), targets.split(size), strict=True):
                with torch.autocast("cpu", torch.float16, enabled=half):
                    loss = functional.cross_entropy(model(part[0]), part[1])
                scaler.scale(loss * (size / len(inputs))).backward()
            gradients.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for parameter, *both in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = both[0] / 2 + both[1] / 2
        scaler.unscale_(optimizer)
        if "max_gradient_norm" in settings:
            nn.utils.clip_grad_norm_(model.parameters(), settings["max_gradient_norm"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"parameters": parameters_of(model)}


def train_in_budget(rank: int, kind: str, budgets: list[str | None]) -> dict[str, Any]:
    """Make steps with a budget of which the processes may have different ideas."""
    model = make_model(rank, kind, width=32, dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = TrainerSettings(budget=budgets[rank], measure_memory=True)
    trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
    torch.manual_seed(100 + rank)
    results = [trainer.step(share(rank, 2, step, size=1200)) for step in range(2)]
    fitted = trainer.fitted
    return {
        "parameters": parameters_of(model),
        "losses": [result.loss for result in results],
        "peaks": [result.peak_bytes for result in results],
        "plan": None if fitted is None else str(fitted.plan),
        "budget": None if fitted is None else fitted.budget_bytes,
    }


def state_bytes_told_and_found(rank: int, kind: str) -> tuple[int, int]:
    """Return the bytes of an optimizer's state as foretold, and as they are."""
    model = make_model(rank, kind, width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    told = missing_state_bytes(optimizer, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return told, state_bytes(optimizer)


def train_uneven(rank: int) -> Values:
    """Make steps in which the processes have batches of different sizes."""
    model = make_model(rank, "replicated", dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn=functional.cross_entropy)
    for step in range(3):
        inputs, targets = samples(12, seed=step)
        chosen = slice(0, 12)
        if distributed.get_world_size() == 2:
            chosen = slice(0, 3) if rank == 0 else slice(3, 12)
        trainer.step((inputs[chosen], targets[chosen]))
    return parameters_of(model)


def train_beside_nothing(rank: int, kind: str) -> dict[str, Any]:
    """Make steps in which the second process has few samples, or none."""
    model = make_model(rank, kind, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn=functional.mse_loss)
    losses = []
    nothing = torch.zeros(0, 4), torch.zeros(0, 3)
    for step, size in enumerate((0, 3, 0)):
        inputs, targets = samples(9 + size, seed=step)
        points = functional.one_hot(targets, 3).float()
        first = (inputs[:9], points[:9]), nothing
        second = nothing, (inputs[9:], points[9:])
        given = second if rank else first
        losses.append(
            trainer.step(*(first + second if kind == "plain" else given)).loss
        )
    # The second step has a loss of each process, the others of the first alone.
    del losses[1]
    try:
        trainer.step(nothing, nothing)
    except UsageError as error:
        refused = str(error)
    else:
        refused = "no"
    return {
        "parameters": parameters_of(model),
        "losses": losses,
        "refused": refused,
    }


def overflow(rank: int, kind: str) -> dict[str, Any]:
    """Make steps of which one overflows in the second process only."""
    model = make_model(rank, kind, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(
        model,
        optimizer,
        TrainerSettings(precision="fp16", initial_loss_scale=1024.0),
        functional.cross_entropy,
    )
    stepped, states = [], []
    for step in range(3):
        inputs, targets = share(rank, 2, step)
        if step == 1 and rank == 1:
            inputs[0, 0] = torch.inf
        stepped.append(trainer.step((inputs, targets)).stepped)
        states.append(parameters_of(model))
    assert trainer.scaler is not None
    return {
        "stepped": stepped,
        "states": states,
        "scale": trainer.scaler.get_scale(),
    }


def run_out_of_memory(rank: int, limit_bytes: int) -> dict[str, Any]:
    """Make steps in which only the second process has too little memory."""
    model = make_model(rank, "replicated", dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn=functional.cross_entropy)
    parts = []
    for step in range(3):
        batch = share(rank, 2, step, size=400)
        with Ceiling(limit_bytes if rank == 1 else 1 << 40):
            parts.append(trainer.step(batch).parts)
    return {"parameters": parameters_of(model), "parts": parts}


def fail(rank: int, kind: str, at: int) -> str:
    """Fail in the second process, which ends; the first must notice by itself."""
    model = make_model(rank, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: list[int] = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        if rank == 1 and len(made) == at:
            raise ZeroDivisionError("a bug in the second process")
        return functional.cross_entropy(outputs, targets)

    trainer = Trainer(model, optimizer, loss_fn=loss_fn)
    try:
        for step in range(4):
            trainer.step(share(rank, 2, step))
            made.append(step)
    except ZeroDivisionError:
        # What a program does in which nobody catches it.
        os._exit(1)
    except Exception as error:  # noqa: BLE001 (it is the result)
        return type(error).__name__
    return "none"


class Dying(torch.optim.lr_scheduler.LambdaLR):
    """A schedule in whose state, at a step, the process ends."""

    def state_dict(self) -> dict[str, Any]:
        if self.last_epoch == 2 and distributed.get_rank() == 1:
            os._exit(1)
        return super().state_dict()


def lose_a_peer_while_saving(rank: int, kind: str, path: Path) -> dict[str, Any]:
    """Save at every step; the second process ends in the middle of the second."""
    model = make_model(rank, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = TrainerSettings(snapshot_path=path, snapshot_every_steps=1)
    trainer = Trainer(
        model,
        optimizer,
        settings,
        functional.cross_entropy,
        scheduler=Dying(optimizer, lambda _: 1.0),
    )
    try:
        trainer.fit([share(rank, 2, step) for step in range(4)])
    except Exception as error:  # noqa: BLE001 (it is the result)
        return {"error": type(error).__name__, "steps": trainer.steps}
    return {"error": "none", "steps": trainer.steps}


def stopped_fit(rank: int, kind: str, path: Path, stop_at: int) -> dict[str, Any]:
    """Fit and stop dead after a step, a while after the last snapshot."""
    return fit(rank, kind, path, stop_at=stop_at)


def fit(rank: int, kind: str, path: Path, *, stop_at: int = 0) -> dict[str, Any]:
    """Fit from the snapshot if there is one; stop dead after a step if told to."""
    count = distributed.get_world_size()
    model = make_model(rank, kind, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    settings = TrainerSettings(
        snapshot_path=path, snapshot_every_steps=3, average_decay=0.9
    )
    trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
    data = TensorDataset(*samples(96))
    sampler = DistributedSampler(data, count, rank, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=12 // count, sampler=sampler)

    def on_step(step: Any) -> None:
        if step.number == stop_at:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(loader, epochs=2, resume=True, on_step=on_step)
    assert trainer.average is not None
    averages = trainer.average.parameters.values()
    return {
        "parameters": parameters_of(model),
        "averages": [whole(a).double().flatten().tolist() for a in averages],
        "steps": trainer.steps,
    }


def fit_in_own_order(rank: int, path: Path, every: int | None, stop_at: int) -> Values:
    """Fit on data of this process's own, in an order of its own; stop dead if told."""
    model = make_model(rank, "replicated", dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = TrainerSettings(snapshot_path=path, snapshot_every_steps=every)
    trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
    loader = DataLoader(
        TensorDataset(*samples(32, seed=rank)),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(rank),
    )

    def on_step(step: Any) -> None:
        if step.number == stop_at:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(loader, epochs=3, resume=True, on_step=on_step)
    return parameters_of(model)


def fail_while_accumulating(rank: int) -> str:
    """Fail in every process on the second of two batches, and try to go on."""
    model = make_model(rank, "sharded")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn=functional.cross_entropy)
    inputs, targets = share(rank, 2, 0)
    with contextlib.suppress(IndexError):
        trainer.step((inputs, targets), (inputs, targets + 99))
    try:
        trainer.step((inputs, targets))
    except UnsupportedError as error:
        return str(error)
    return "went on"


def interrupt(rank: int) -> dict[str, Any]:
    """Interrupt the second process; both must stop after the same step."""
    model = make_model(rank, "replicated")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn=functional.cross_entropy)

    def on_step(step: Any) -> None:
        if rank == 1 and step.number == 3:
            signal.raise_signal(signal.SIGINT)

    data = [share(rank, 2, step) for step in range(10)]
    result = trainer.fit(data, epochs=1, on_step=on_step)
    return {"steps": result.steps, "interrupted": result.interrupted}


def uneven_data(rank: int) -> int:
    """Fit on data of which the second process has less."""
    model = make_model(rank, "replicated")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn=functional.cross_entropy)
    data = [share(rank, 2, step) for step in range(5 - 2 * rank)]
    return trainer.fit(data, epochs=2).steps
