"""Lightning: a callback for its Trainer, and one call for loops with Fabric."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportUntypedBaseClass=false, reportGeneralTypeIssues=false

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.backend.compiler.recognition import uncompiled
from recoup.core.segments import Action
from recoup.errors import UnsupportedError
from recoup.fitting.budgets import Budget
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit
from recoup.fitting.largest_batch import LargestBatch
from recoup.integrations.first_step import FirstStep, fit_loop
from recoup.train.budgeting.process_budget import UnitPlan


class RecoupCallback(Callback):
    """Fit the module of a `lightning.Trainer` into a memory budget.

    The plan is found on the first batch, by the strategy's own `training_step` and
    `backward`: with its precision and with gradients of earlier batches. Parameters,
    gradients, logged metrics and random generators are then restored, and training
    continues with gradients that are bitwise those without the callback. The plan is
    removed when training ends.

    The report goes to the loggers as `recoup_budget_bytes`,
    `recoup_measured_peak_bytes` and so on, and into checkpoints.

    Args:
        budget: The most bytes on the device, as for `recoup.fit`: "8GiB", a number, or
            a share of the plain peak such as 0.6 (one process only). None reads the
            environment variable `RECOUP_BUDGET`; without that, the device's memory.
        compile: The executor of the blocks, as for `recoup.fit`, also where the largest
            batch is searched.
        allow: Actions allowed on a value besides recomputing it.
        slowdown: The accepted slowdown relative to the plain step, such as 0.3. If
            given, the largest batch within the budget is found, by repeating samples of
            the first batch, and logged as `recoup_largest_batch`. For one process and a
            budget in bytes. Costs as much as `recoup.largest_batch`.
        rerun: Whether blocks may be called again, as for `recoup.fit`.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(
        self,
        budget: Budget = None,
        *,
        compile: Compile = False,  # noqa: A002 (torch's own word)
        allow: Iterable[Action | str] = (Action.KEEP,),
        slowdown: float | None = None,
        rerun: bool | None = None,
    ) -> None:
        self._first = FirstStep(budget, compile, allow, slowdown, rerun=rerun)
        self._is_waiting = False
        self._compiled: tuple[Any, Any] | None = None
        self._numbers: dict[str, float] = {}

    @property
    def report(self) -> Fit | CompiledFit | UnitPlan | None:
        """The report of `recoup.fit`; None before the first batch."""
        return self._first.report

    @property
    def largest_batch(self) -> LargestBatch | None:
        """The largest batch per device; None if it was not searched."""
        return self._first.largest

    def state_dict(self) -> dict[str, Any]:
        """Return the report for a checkpoint."""
        return dict(self._numbers)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the first batch."""
        del trainer
        self._first.begin()
        if not pl_module.automatic_optimization:
            raise UnsupportedError(
                "expected automatic optimization, got a module that calls its "
                "optimizer in training_step; call recoup.fit with step= a function "
                "that runs forward and backward."
            )
        # Lightning unwraps a compiled module, and calls its compiled methods.
        step = pl_module.training_step
        self._first.check_compiled(step)
        written = uncompiled(step)
        if written is not step:
            self._compiled = pl_module, step
            pl_module.training_step = written
        self._is_waiting = True

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Fit the module on the first batch that `training_step` does not skip."""
        if not self._is_waiting:
            return
        self._is_waiting = False
        optimizer = trainer.optimizers[0]
        takes_number = is_param_in_hook_signature(
            pl_module.training_step, "batch_idx", min_args=2
        )

        def run(model: nn.Module, batch: Any) -> None:
            del model  # the strategy has it
            given = (batch, batch_idx) if takes_number else (batch,)
            # `self.log` identifies its caller by this function.
            output = call._call_strategy_hook(trainer, "training_step", *given)  # noqa: SLF001
            if output is None:
                raise _NoLossError
            loss = output if isinstance(output, Tensor) else output["loss"]
            loss = loss / trainer.accumulate_grad_batches
            trainer.strategy.backward(loss, optimizer)

        # Lightning drops the gradients of a step after the forward of the next one.
        options: dict[str, Any] = {"optimizer": optimizer, "accumulate": True}
        model = trainer.strategy.model
        try:
            if self._first.slowdown is not None:
                self._first.find_largest(model, run, batch, **options)
            self._first.fit(model, lambda called: run(called, batch), **options)
        except _NoLossError:
            self._is_waiting = True
            return
        self._numbers = self._first.numbers()
        for logger in trainer.loggers:
            logger.log_metrics(dict(self._numbers), step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the plan from the module."""
        del trainer, pl_module
        self._remove()

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        """Remove the plan from the module."""
        del trainer, pl_module, exception
        self._remove()

    def _remove(self) -> None:
        self._first.remove()
        if self._compiled is not None:
            module, module.training_step = self._compiled
            self._compiled = None


class _NoLossError(Exception):
    """`training_step` returned None, with which Lightning skips a batch."""


def fit_once(  # noqa: PLR0913 (as `fit`)
    fabric: Any,
    model: nn.Module,
    batch: Any,
    budget: Budget = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    accumulate: bool = False,
    compile: Compile = False,  # noqa: A002 (torch's own word)
    allow: Iterable[Action | str] = (Action.KEEP,),
    rerun: bool | None = None,
) -> Fit | CompiledFit | UnitPlan:
    """Fit a model that `Fabric.setup` returned, on the first call.

    Call it in the loop before the model: later calls return the report, unless
    `budget`, `compile`, `allow` or `rerun` have changed; then it fits again. All
    processes must call it.

    Args:
        fabric: The Fabric; its `backward` is called.
        model: The model as `Fabric.setup` returned it.
        batch: As for `recoup.fit`.
        budget: As for `RecoupCallback`.
        loss: Computes the loss from the output (and the target), as for `recoup.fit`.
        optimizer: Memory is reserved for its state.
        accumulate: Whether gradients of earlier batches exist when a step begins.
        compile: As for `recoup.fit`.
        allow: As for `recoup.fit`.
        rerun: As for `recoup.fit`.

    Raises:
        InfeasibleError: No plan fits.
        UsageError: The step or the budget is invalid.
    """
    inner = dict(model.named_children()).get("_forward_module", model)
    return fit_loop(
        fabric.backward,
        model,
        batch,
        FirstStep(budget, compile, allow, rerun=rerun),
        inner=inner,
        loss=loss,
        optimizer=optimizer,
        accumulate=accumulate,
    )
