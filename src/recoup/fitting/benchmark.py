"""Benchmark of one step: recoup and PyTorch's own checkpointing, measured in turns."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from recoup.backend.memory.meters import is_out_of_memory
from recoup.core.plan import Plan
from recoup.core.segments import Action
from recoup.core.units import print_bytes
from recoup.engine.applied.applying import apply_plan
from recoup.engine.applied.model_blocks import block_names
from recoup.errors import InfeasibleError
from recoup.fitting.budgets import Budget
from recoup.fitting.fit import Fit, fit
from recoup.measurement.steps.floor import run_step
from recoup.measurement.steps.gradient_difference import (
    Gradients,
    difference_from,
    gradients_of,
)
from recoup.measurement.steps.training_step import (
    TrainingStep,
    training_step,
    untouched,
)
from recoup.measurement.timing.pace import pace_of
from recoup.report.findings import Entry

Forward = Callable[..., Any]
Context = Callable[[nn.Module], AbstractContextManager[Any]]
"""Function that returns a context manager which wraps the blocks of a model."""

COMPUTE_INTENSIVE = (
    "mm addmm bmm convolution upsample_bilinear2d _scaled_mm "
    "_flash_attention_forward _efficient_attention_forward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"
)
"""The operators that torch's partitioner considers expensive by default, and the other
attention kernels."""

_torch: Any = checkpoint  # its functions have no types

_SAVED = {getattr(torch.ops.aten, name).default for name in COMPUTE_INTENSIVE.split()}


@contextmanager
def wrapped(
    model: nn.Module, *, wrap: Callable[[Forward], Forward], step: int = 1
) -> Generator[None]:
    """Wrap the forward of every `step`-th block of a model in the `with` block."""
    with ExitStack() as stack:
        for name in block_names(model)[::step]:
            module = model.get_submodule(name)
            module.__dict__["forward"] = wrap(module.forward)
            stack.callback(module.__dict__.pop, "forward")
        yield


def _checkpointed(forward: Forward) -> Forward:
    return partial(_torch.checkpoint, forward, use_reentrant=False)


def _selective(forward: Forward) -> Forward:
    contexts = partial(_torch.create_selective_checkpoint_contexts, _policy)
    return partial(_torch.checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    saved = operator in _SAVED
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


PEERS: dict[str, Context] = {
    "torch checkpoint, every block": partial(wrapped, wrap=_checkpointed),
    "torch checkpoint, every second block": partial(
        wrapped, wrap=_checkpointed, step=2
    ),
    "torch SAC, default list": partial(wrapped, wrap=_selective),
}
"""PyTorch's checkpointing tools, by their names in tables."""


PLAIN = "plain"

_ROUNDS = 2
"""The number of further rounds in which all contenders are timed in turn."""

Progress = Callable[[str, int, int], None]
"""Progress callback with the contender, the number done, and the total."""


def run_benchmark(  # noqa: PLR0913 (a step can be described in several ways)
    model: nn.Module,
    batch: Any = None,
    *,
    budgets: Sequence[Budget] = (),
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    offload: bool = False,
    progress: Progress | None = None,
) -> tuple[Entry, ...]:
    """Measure a plain step, with PyTorch's checkpointing tools, and with recoup.

    All run in turn on the same model from the same state, which is restored afterwards.
    Running out of memory, or any other failure, is also an entry.

    Costs about ten steps for each of PyTorch's tools, twenty for each budget, and the
    gradients of two contenders in host memory.

    Args:
        model: The model.
        batch: Its arguments, as for `fit`.
        budgets: Budgets for recoup; by default the peaks of PyTorch's tools.
        loss: The loss function, as for `fit`.
        step: A function that runs forward and backward, as for `fit`.
        offload: Whether values may also be offloaded to the host.
        progress: Progress callback.

    Returns:
        The plain step first, then PyTorch's tools, then recoup for each budget.

    Examples:
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        >>> model = nn.Sequential(*(layer() for _ in range(8)))
        >>> entries = run_benchmark(
        ...     model, torch.ones(512, 64), loss=torch.sum, budgets=[0.7]
        ... )
        >>> [entry.name[:10] for entry in entries]
        ['plain', 'torch chec', 'torch chec', 'torch SAC,', 'recoup in ']
        >>> {entry.difference for entry in entries}
        {0.0}
    """
    described = training_step(model, batch, loss=loss, step=step)
    found = _Benchmark(
        described, progress, len(PEERS) + 1 + (len(budgets) or len(PEERS))
    )
    found.enter(PLAIN, nullcontext)
    for name, context in PEERS.items():
        found.enter(name, context)
    allow = (Action.KEEP, Action.OFFLOAD) if offload else (Action.KEEP,)

    for budget in budgets or _peaks(found.entries[1:]):

        def fitted(budget: Budget = budget) -> Fit:
            _, report = fit(
                model, batch, budget, loss=loss, step=step, allow=allow, progress=False
            )
            return report

        found.enter(f"recoup in {_words(budget)}", _Fitted(fitted))
    found.time_again()
    return tuple(found.entries)


class _Fitted:
    """recoup with a budget: fits at the first entry, then reuses the plan."""

    def __init__(self, fitted: Callable[[], Fit]) -> None:
        self._fitted = fitted
        self._plan: Plan | None = None

    @contextmanager
    def __call__(self, model: nn.Module) -> Generator[None]:
        if self._plan is None:
            applied = self._fitted()
            self._plan = applied.plan
        else:
            applied = apply_plan(model, self._plan)
        try:
            yield
        finally:
            applied.remove()


class _Benchmark:
    """Measures contenders in sequence."""

    def __init__(
        self, step: TrainingStep, progress: Progress | None, total: int
    ) -> None:
        self.entries: list[Entry] = []
        self._step = step
        self._progress = progress
        self._total = total
        self._reference: Gradients | None = None
        self._contexts: list[Context] = []

    def enter(self, name: str, context: Context) -> None:
        """Measure a contender; a failure becomes its entry."""
        if self._progress is not None:
            self._progress(name, len(self.entries), self._total)
        try:
            with untouched(self._step) as step, context(step.model):
                entry = self._measured(name, step)
        except InfeasibleError as error:
            least = print_bytes(error.floor_bytes)
            entry = Entry(name, failure=f"cannot be met, the least is {least}")
        except Exception as error:  # noqa: BLE001 (a contender may fail anyhow)
            entry = Entry(name, failure=_failure(error))
        self.entries.append(entry)
        self._contexts.append(context)
        self._empty_cache()

    def time_again(self) -> None:
        """Time all successful contenders again, in turn, so that noise affects all."""
        for _ in range(_ROUNDS):
            for number, context in enumerate(self._contexts):
                entry = self.entries[number]
                if entry.seconds is None:
                    continue
                with untouched(self._step) as step, context(step.model):
                    step.begin()
                    step.run()
                    seconds = min(entry.seconds, pace_of(step).seconds)
                self.entries[number] = replace(entry, seconds=seconds)
                self._empty_cache()

    def _empty_cache(self) -> None:
        if self._step.device.type != "cpu":
            torch.accelerator.empty_cache()

    def _measured(self, name: str, step: TrainingStep) -> Entry:
        difference = 0.0
        if self._reference is None:
            self._reference = gradients_of(step)
        else:
            difference = difference_from(self._reference, step)
        cost = run_step(step)
        seconds = pace_of(step).seconds
        return Entry(name, cost.peak_bytes, seconds, difference)


def _peaks(entries: Sequence[Entry]) -> list[int]:
    """Return the distinct measured peaks, largest first."""
    found = {entry.peak_bytes for entry in entries if entry.peak_bytes is not None}
    return sorted(found, reverse=True)


def _words(budget: Budget) -> str:
    if isinstance(budget, float):
        return f"{budget:.0%}"
    if isinstance(budget, int):
        return print_bytes(budget)
    return budget or "the device's memory"


def _failure(error: Exception) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
