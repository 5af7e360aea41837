"""Hugging Face transformers: a callback that fits the Trainer's model into a budget."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportUntypedBaseClass=false, reportGeneralTypeIssues=false

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from recoup.core.segments import Action
from recoup.errors import InfeasibleError, UnsupportedError, UsageError
from recoup.fitting.budgets import Budget
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit
from recoup.integrations.first_step import FirstStep, eager
from recoup.train.budgeting.process_budget import UnitPlan


class RecoupCallback(TrainerCallback, ExportableState):
    """Fit the model of a `transformers.Trainer` into a memory budget.

    The plan is found on the first batch, by the Trainer's own `training_step`: with its
    autocast, loss function, label smoothing, noise on embeddings, and gradients of
    earlier batches under accumulation. Parameters, gradients and random generators are
    then as before, and the training goes on with gradients that are bitwise those
    without the callback. The plan is removed when training ends.

    The report is logged as `recoup_budget_bytes`, `recoup_measured_peak_bytes` and so
    on, and is in `trainer_state.json` under `stateful_callbacks`.

    With `torch_compile=True` the model that the Trainer compiled is not called: blocks
    are compiled by recoup, with `compile="inductor"` unless you choose another. With
    `auto_find_batch_size=True` a budget that cannot be met makes the batch smaller.

    Args:
        budget: The most bytes on the device, as for `recoup.fit`: "8GiB", a number, or
            a share of the plain peak such as 0.6 (one process only). None reads the
            environment variable `RECOUP_BUDGET`; without that, what the device has.
        compile: Who runs the blocks, as for `recoup.fit`. None: False, or "inductor"
            with `torch_compile=True`.
        allow: What may be done with a value besides recomputing it.

    Attributes:
        report: What `recoup.fit` did; None before the first batch.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(
        self,
        budget: Budget = None,
        *,
        compile: Compile | None = None,  # noqa: A002 (torch's own word)
        allow: Iterable[Action | str] = (Action.KEEP,),
    ) -> None:
        self._compile: Compile | None = compile
        self._first = FirstStep(budget, compile or False, allow)
        self._trainer: Any = None
        self._numbers: dict[str, float] = {}

    @property
    def report(self) -> Fit | CompiledFit | UnitPlan | None:
        """What `recoup.fit` did; None before the first batch."""
        return self._first.report

    def state(self) -> dict[str, Any]:
        """Return arguments and report for `trainer_state.json`."""
        return {
            "args": {
                "budget": self._first.budget,
                "compile": self._compile,
                "allow": sorted(action.value for action in self._first.allow),
            },
            "attributes": {"_numbers": self._numbers},
        }

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Wait for the first batch; of a retry too, with another batch size."""
        del state, control, kwargs
        self.remove()
        trainer = _calling_trainer()
        if getattr(trainer, "is_deepspeed_enabled", False):
            raise UnsupportedError(
                "expected a Trainer without DeepSpeed, which moves parameters by "
                "itself; use FSDP, or leave RecoupCallback out."
            )
        if self._compile is None:
            self._first.compile = "inductor" if args.torch_compile else False
        self._trainer = trainer
        trainer.training_step = self._first_training_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the plan off the model."""
        del args, state, control, kwargs
        self.remove()

    def remove(self) -> None:
        """Take the plan off the model and leave the Trainer as it was.

        Done by itself when training ends; call it after an error that ended it.
        """
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            vars(trainer).pop("training_step", None)
        self._first.remove()

    def _first_training_step(
        self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Fit the model on the first batch, then run the Trainer's step."""
        trainer = self._trainer
        vars(trainer).pop("training_step")
        training_step = trainer.training_step

        def run(called: nn.Module) -> None:
            training_step(called, copy.copy(inputs), *args, **kwargs)

        eager(model).train()
        try:
            self._first.fit(
                model,
                run,
                optimizer=trainer.optimizer,
                accumulate=trainer.args.gradient_accumulation_steps > 1,
            )
        except InfeasibleError as error:
            if not trainer.args.auto_find_batch_size:
                raise
            # In the words by which accelerate knows that the batch must be smaller.
            raise torch.OutOfMemoryError(
                f"recoup: with this batch the budget is out of memory. {error}"
            ) from error
        self._numbers = self._first.numbers()
        trainer.log(dict(self._numbers))
        if eager(model) is not model:
            # The compiled whole would hide the plan: call what was compiled.
            trainer.training_step = lambda model, *args, **kwargs: training_step(
                eager(model), *args, **kwargs
            )
        return trainer.training_step(model, inputs, *args, **kwargs)


def _calling_trainer() -> Any:
    """Return the Trainer that calls a callback, which does not say who it is."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise UsageError(
        "expected to be called by a transformers Trainer, got another caller; give the "
        "callback to Trainer(callbacks=[...]), or call recoup.fit in your own loop."
    )
