"""Hugging Face transformers: a callback that fits the Trainer's model into a budget."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportUntypedBaseClass=false, reportGeneralTypeIssues=false

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from recoup.backend.compiler.recognition import eager
from recoup.core.segments import Action
from recoup.errors import InfeasibleError, UnsupportedError, UsageError
from recoup.fitting.budgets import Budget
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit
from recoup.fitting.largest_batch import LargestBatch
from recoup.integrations.first_step import FirstStep
from recoup.train.budgeting.process_budget import UnitPlan
from recoup.train.data.batches import batch_size


class RecoupCallback(TrainerCallback, ExportableState):
    """Fit the model of a `transformers.Trainer` into a memory budget.

    The plan is found on the first batch, by the Trainer's own `training_step`: with its
    autocast, loss function, label smoothing, noise on embeddings, and gradients of
    earlier batches under accumulation. Parameters, gradients and random generators are
    then restored, and training continues with gradients that are bitwise those without
    the callback. The plan is removed when training ends.

    The report is logged as `recoup_budget_bytes`, `recoup_measured_peak_bytes` and so
    on, and is in `trainer_state.json` under `stateful_callbacks`.

    With `torch_compile=True` the model that the Trainer compiled is not called: recoup
    compiles the blocks, with `compile="inductor"` unless you choose another. With
    `auto_find_batch_size=True` a batch that does not fit is made smaller: planning
    finds the largest one, and larger ones are not tried.

    Args:
        budget: The most bytes on the device, as for `recoup.fit`: "8GiB", a number, or
            a share of the plain peak such as 0.6 (one process only). None reads the
            environment variable `RECOUP_BUDGET`; without that, the device's memory.
        compile: The executor of the blocks, as for `recoup.fit`, also where the largest
            batch is searched. None: False, or "inductor" with `torch_compile=True`.
        allow: Actions allowed on a value besides recomputing it.
        slowdown: The accepted slowdown relative to the plain step, such as 0.3. If
            given, the largest batch within the budget is found and logged as
            `recoup_largest_batch`, and `auto_find_batch_size=True` takes no larger one.
            For one process and a budget in bytes. Costs as much as
            `recoup.largest_batch`.
        rerun: Whether blocks may be called again, as for `recoup.fit`.

    Attributes:
        report: The report of `recoup.fit`; None before the first batch.
        largest_batch: The largest batch per device; None if it was not searched.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(
        self,
        budget: Budget = None,
        *,
        compile: Compile | None = None,  # noqa: A002 (torch's own word)
        allow: Iterable[Action | str] = (Action.KEEP,),
        slowdown: float | None = None,
        rerun: bool | None = None,
    ) -> None:
        self._compile: Compile | None = compile
        self._first = FirstStep(budget, compile or False, allow, slowdown, rerun=rerun)
        self._trainer: Any = None
        self._step: Callable[..., torch.Tensor] | None = None
        self._is_waiting = False
        self._numbers: dict[str, float] = {}
        self._has_ended = False

    @property
    def report(self) -> Fit | CompiledFit | UnitPlan | None:
        """The report of `recoup.fit`; None before the first batch."""
        return self._first.report

    @property
    def largest_batch(self) -> LargestBatch | None:
        """The largest batch per device; None if it was not searched."""
        return self._first.largest

    def state(self) -> dict[str, Any]:
        """Return arguments and report for `trainer_state.json`."""
        return {
            "args": {
                "budget": self._first.budget,
                "compile": self._compile,
                "allow": sorted(action.value for action in self._first.allow),
                "slowdown": self._first.slowdown,
                "rerun": self._first.rerun,
            },
            "attributes": {"_numbers": self._numbers},
        }

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Prepare for the first batch, also of a retry with another batch size."""
        del state, control, kwargs
        self.remove()
        self._first.begin()
        if self._has_ended:  # so it is not a retry
            self._has_ended, self._first.largest = False, None
        trainer = _calling_trainer()
        self._check_alone(trainer)
        if getattr(trainer, "is_deepspeed_enabled", False):
            raise UnsupportedError(
                "expected a Trainer without DeepSpeed, which moves parameters by "
                "itself; use FSDP, or leave RecoupCallback out."
            )
        if self._compile is None:
            self._first.compile = "inductor" if args.torch_compile else False
        self._trainer, self._is_waiting = trainer, True
        self._step = trainer.training_step
        trainer.training_step = self._training_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the plan from the model."""
        del args, state, control, kwargs
        self.remove()
        self._has_ended = True

    def remove(self) -> None:
        """Remove the plan from the model and restore the Trainer.

        Done automatically when training ends, or when a training step fails; call it
        after another error that ended the training.
        """
        trainer, self._trainer = self._trainer, None
        step, self._step = self._step, None
        if trainer is not None:
            del trainer.training_step
            if trainer.training_step != step:  # it was an instance attribute
                trainer.training_step = step
        self._first.remove()

    def _check_alone(self, trainer: Any) -> None:
        """Refuse another callback that would plan the same step.

        Raises:
            UsageError: The Trainer has two of them.
        """
        others = [
            each
            for each in trainer.callback_handler.callbacks
            if isinstance(each, RecoupCallback) and each is not self
        ]
        if others:
            raise UsageError(
                "expected one RecoupCallback in a Trainer, got several; each would "
                "plan the same step. Remove all but one."
            )

    def _training_step(
        self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Run the Trainer's step; fit the model before the first one."""
        step = self._step
        assert step is not None, "called between begin and end"
        try:
            if self._is_waiting:
                self._is_waiting = False
                self._fit_first(step, model, inputs, args, kwargs)
            # With torch_compile the compiled model would hide the plan.
            return step(eager(model), inputs, *args, **kwargs)
        except BaseException:
            self.remove()
            raise

    def _fit_first(
        self,
        step: Callable[..., torch.Tensor],
        model: nn.Module,
        inputs: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Fit the model by the Trainer's step on its first batch; log the report."""
        eager(model).train()

        def run(called: nn.Module, given: Any) -> None:
            # Some steps pop labels from their inputs.
            step(called, copy.copy(given), *args, **kwargs)

        with _silent(self._trainer):
            # A BatchEncoding is not a dict for code that looks for its tensors.
            self._fit(model, {**inputs}, run)
        self._numbers = self._first.numbers()
        self._trainer.log(dict(self._numbers))

    def _fit(
        self, model: nn.Module, inputs: Any, run: Callable[[nn.Module, Any], object]
    ) -> None:
        """Fit the model; make the batch smaller if requested.

        Raises:
            InfeasibleError: No plan fits.
            torch.OutOfMemoryError: With `auto_find_batch_size`, the batch is too large.
        """
        trainer, first = self._trainer, self._first
        is_found = trainer.args.auto_find_batch_size
        options: dict[str, Any] = {
            "optimizer": trainer.optimizer,
            "accumulate": trainer.args.gradient_accumulation_steps > 1,
        }
        if first.slowdown is not None and first.largest is None:
            first.find_largest(model, run, inputs, **options)
        size = batch_size(inputs) if is_found else 1
        if is_found and first.largest is not None and size > first.largest.size:
            raise _too_large(f"the largest batch is {first.largest.size}.")
        try:
            first.fit(model, lambda called: run(called, inputs), **options)
        except InfeasibleError as error:
            if not is_found or size == 1:
                raise
            if trainer.args.world_size == 1:
                # Accelerate retries with 0.9 of the size: compute where to end.
                first.find_largest(model, run, inputs, **options, limit=size - 1)
            raise _too_large(str(error)) from error


def _too_large(why: str) -> Exception:
    """Return the error that makes accelerate reduce the batch."""
    return torch.OutOfMemoryError(
        f"recoup: with this batch the budget is out of memory. {why}"
    )


@contextmanager
def _silent(trainer: Any) -> Iterator[None]:
    """Drop what a loss function logs: nothing takes it back from files and services."""
    own = {name: each for name, each in vars(trainer).items() if name == "log"}
    trainer.log = lambda *_, **__: None
    try:
        yield
    finally:
        del trainer.log
        vars(trainer).update(own)


def _calling_trainer() -> Any:
    """Return the Trainer that calls a callback, which is not among its arguments."""
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
