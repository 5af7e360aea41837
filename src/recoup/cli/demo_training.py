"""The demonstration: a small GPT, trained plainly and in half the memory."""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recoup.backend.memory.meters import device_meter
from recoup.cli.gpt import GPT, Shape
from recoup.fitting.fit import Fit, fit
from recoup.measurement.steps.gradient_difference import largest_difference
from recoup.measurement.steps.optimizers import state_tensors
from recoup.measurement.timing.pace import synchronize


def read_text() -> str:
    """Return the text to train on: sonnets by Shakespeare.

    Examples:
        >>> read_text().splitlines()[2]
        'From fairest creatures we desire increase,'
    """
    folder = resources.files("recoup.cli").joinpath("texts")
    return folder.joinpath("sonnets.txt").read_text(encoding="utf-8")


def encode(text: str) -> Tensor:
    """Return the characters of a text as indices into its alphabet.

    Examples:
        >>> encode("abba")
        tensor([0, 1, 1, 0])
    """
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text])


_TIMED_RUNS = 5

# A module whose attributes are properties, which type checkers cannot see.
_deterministic: Any = torch.utils.deterministic


@dataclass(frozen=True, slots=True)
class Settings:
    """The model, its data, and the number of steps."""

    shape: Shape
    batch: int
    steps: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one training step.

    Attributes:
        peak_bytes: The most bytes alive at any moment of the step.
        saved_bytes: Bytes that forward left alive for backward, including the loss:
            held by autograd or by a recoup region.
        seconds: Median time of the step, until the device has finished it.
        host_seconds: Median time until the host has launched it.
        flops: Floating-point operations as `torch.utils.flop_counter` counts them:
            matrix products, convolutions and attention.
    """

    peak_bytes: int
    saved_bytes: int
    seconds: float
    host_seconds: float
    flops: int


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The results of one training run, on the CPU, and the cost of a step."""

    losses: tuple[float, ...]
    gradients: tuple[Tensor, ...]
    cost: StepCost
    report: Fit | None = None


def fit_to_budget(
    settings: Settings,
    budget_bytes: int,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
) -> Fit:
    """Make the model train within a budget for all memory of a step."""
    state = torch.random.get_rng_state()
    batch = draw_batch(text, settings)
    torch.random.set_rng_state(state)
    if settings.device.type == "cpu":
        # No allocator counts on a CPU, and the text is in memory during every step.
        budget_bytes -= text.nbytes
    return fit(model, batch, budget_bytes, optimizer=optimizer, progress=False)[1]


def compare_repeatably(
    settings: Settings, progress: Progress
) -> tuple[TrainingRun, TrainingRun, str]:
    """Compare with deterministic kernels, as far as torch has them.

    Returns:
        The plain run, the fitted one, and a note on nondeterminism; may be empty.
    """
    try:
        with repeatable():
            return *compare(settings, progress), ""
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        note = str(error).split(". ")[0]
    with repeatable(strictly=False):
        return *compare(settings, progress), f"{note}."


def compare(settings: Settings, progress: Progress) -> tuple[TrainingRun, TrainingRun]:
    """Train twice from the same seed: plainly, and in half of that memory."""
    plain = train(settings, progress, label="plain")
    half_bytes = plain.cost.peak_bytes // 2
    return plain, train(settings, progress, label="fitted", budget_bytes=half_bytes)


def train(
    settings: Settings,
    progress: Progress,
    *,
    label: str,
    budget_bytes: int | None = None,
) -> TrainingRun:
    """Train from a fixed seed, plainly or in a budget; then measure one more step."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    text = encode(read_text()).to(settings.device)
    model = GPT(settings.shape).to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = None
    if budget_bytes is not None:
        report = fit_to_budget(settings, budget_bytes, model, optimizer, text)
    task = progress.add_task(label, total=settings.steps)
    losses: list[Tensor] = []
    for _ in range(settings.steps):
        optimizer.zero_grad()
        loss = model(*draw_batch(text, settings))
        loss.backward()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        losses.append(loss.detach())
        progress.advance(task)
    return TrainingRun(
        losses=tuple(float(loss) for loss in losses),
        gradients=_gradients(model),
        cost=_cost(settings, model, optimizer, text),
        report=report,
    )


def draw_batch(text: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return random intervals of the text as inputs, and shifted by one as targets."""
    context = settings.shape.context
    starts = torch.randint(len(text) - context, (settings.batch, 1)).to(text.device)
    tokens = text[starts + torch.arange(context + 1, device=text.device)]
    return tokens[:, :-1], tokens[:, 1:]


def losses_equal(plain: TrainingRun, fitted: TrainingRun) -> bool:
    """Return whether the losses of two runs are bitwise equal."""
    return plain.losses == fitted.losses


def gradients_equal(plain: TrainingRun, fitted: TrainingRun) -> bool:
    """Return whether the gradients of the last steps are bitwise equal."""
    return largest_difference(plain.gradients, fitted.gradients) == 0.0


@contextmanager
def repeatable(*, strictly: bool = True) -> Generator[None, None, None]:
    """Make torch use deterministic kernels.

    Strictly, an operator without such a kernel raises `RuntimeError`; otherwise the
    usual kernel runs. Attention is deterministic only if strict.
    """
    # Read by cuBLAS when it starts; needed for deterministic matrix products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Torch would also fill all new memory, which takes time and changes no bit.
    fills: bool = _deterministic.fill_uninitialized_memory
    _deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=not strictly)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        _deterministic.fill_uninitialized_memory = fills


def _gradients(model: GPT) -> tuple[Tensor, ...]:
    gradients = (parameter.grad for parameter in model.parameters())
    return tuple(gradient.cpu() for gradient in gradients if gradient is not None)


def _cost(
    settings: Settings, model: GPT, optimizer: torch.optim.Optimizer, text: Tensor
) -> StepCost:
    tokens, targets = draw_batch(text, settings)
    return step_cost(
        model,
        lambda: model(tokens, targets),
        device=settings.device,
        resident=(text, tokens, *state_tensors(optimizer)),
    )


def step_cost(
    model: nn.Module,
    forward: Callable[[], Any],
    *,
    device: torch.device,
    resident: Sequence[Tensor] = (),
) -> StepCost:
    """Return the cost of a step, measured in eight runs.

    One is a warm-up, in which regions are verified; five are timed; one runs under a
    memory meter and one under a counter of operations, which slow the host down.

    Args:
        model: The model; its gradients are dropped before each run.
        forward: Computes the loss.
        device: The device of the step and its memory.
        resident: Other tensors that exist before the step. An accelerator's allocator
            counts them in any case; elsewhere they count if given here.
    """

    def run() -> None:
        model.zero_grad()
        forward().backward()

    run()
    times: list[tuple[float, float]] = []
    for _ in range(_TIMED_RUNS):
        model.zero_grad()
        synchronize(device)
        start = time.perf_counter()
        forward().backward()
        issued = time.perf_counter()
        synchronize(device)
        times.append((time.perf_counter() - start, issued - start))
    model.zero_grad()
    with device_meter(device) as meter:
        meter.track(model, *resident)
        before_bytes = meter.live_bytes
        loss = forward()
        saved_bytes = meter.live_bytes - before_bytes
        loss.backward()
        peak_bytes = meter.peak_bytes
    with FlopCounterMode(display=False) as counter:
        run()
    return StepCost(
        peak_bytes=peak_bytes,
        saved_bytes=saved_bytes,
        seconds=statistics.median(seconds for seconds, _ in times),
        host_seconds=statistics.median(host for _, host in times),
        flops=counter.get_total_flops(),
    )
