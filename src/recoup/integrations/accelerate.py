"""Hugging Face accelerate: one call in a loop that an Accelerator has prepared."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.core.segments import Action
from recoup.fitting.budgets import Budget
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit
from recoup.integrations.first_step import FirstStep, fit_loop
from recoup.train.budgeting.process_budget import UnitPlan


def fit_once(  # noqa: PLR0913 (as `fit`)
    accelerator: Any,
    model: nn.Module,
    batch: Any,
    budget: Budget = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    accumulate: bool | None = None,
    compile: Compile = False,  # noqa: A002 (torch's own word)
    allow: Iterable[Action | str] = (Action.KEEP,),
    rerun: bool | None = None,
) -> Fit | CompiledFit | UnitPlan:
    """Fit a model that `Accelerator.prepare` returned, on the first call.

    Call it in the loop before the model: later calls return the report, unless
    `budget`, `compile`, `allow` or `rerun` have changed; then it fits again. All
    processes must call it.

    Args:
        accelerator: The Accelerator; its `backward` is called.
        model: The model as `Accelerator.prepare` returned it.
        batch: As for `recoup.fit`.
        budget: The most bytes on the device, as for `recoup.fit`: "8GiB", a number, or
            a share of the plain peak such as 0.6 (one process only). None reads the
            environment variable `RECOUP_BUDGET`; without that, the device's memory.
        loss: Computes the loss from the output (and the target), as for `recoup.fit`.
        optimizer: Memory is reserved for its state.
        accumulate: Whether gradients of earlier batches exist when a step begins; None:
            if the Accelerator accumulates.
        compile: As for `recoup.fit`.
        allow: As for `recoup.fit`.
        rerun: As for `recoup.fit`.

    Raises:
        InfeasibleError: No plan fits.
        UsageError: The step or the budget is invalid.
    """
    accumulates = accelerator.gradient_accumulation_steps > 1
    return fit_loop(
        accelerator.backward,
        model,
        batch,
        FirstStep(budget, compile, allow, rerun=rerun),
        inner=model,
        loss=loss,
        optimizer=optimizer,
        accumulate=accumulates if accumulate is None else accumulate,
    )
