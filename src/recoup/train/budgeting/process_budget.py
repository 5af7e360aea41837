"""A plan for a budget that all processes of a run agree on."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recoup.core.plan import Plan
from recoup.core.segments import Action
from recoup.core.units import parse_budget, print_bytes
from recoup.errors import InfeasibleError, UsageError
from recoup.fitting.budgets import Budget, budget_bytes, infeasible_with, told_bytes
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit, fit
from recoup.measurement.steps.floor import run_step
from recoup.measurement.steps.optimizers import missing_state_bytes
from recoup.measurement.steps.training_step import (
    TrainingStep,
    device_of,
    training_step,
    untouched,
)
from recoup.train.budgeting.sharded_units import UnitPlan, units_of
from recoup.train.processes import Processes, Report


def fit_together(  # noqa: PLR0913 (as `fit`)
    model: nn.Module,
    run: Callable[[], object],
    budget: Budget,
    *,
    optimizer: Optimizer | None,
    processes: Processes,
    accumulate: bool = False,
    allow: Iterable[Action] = (Action.KEEP,),
    compile: Compile = False,  # noqa: A002 (torch's own word)
) -> Fit | CompiledFit | UnitPlan:
    """Fit a model into a budget, the same in all processes.

    The budget is the smallest that any process has, the floor the largest, and the
    plan is the first process's. All must call it together. Costs what `fit` costs.
    A model that is sharded in several units gets regions inside these.

    Args:
        model: The model itself, without its wrapper.
        run: Runs forward and backward once, through the wrapper.
        budget: The most bytes on the device at any moment of a step, as for `fit`;
            several processes and sharded units take bytes alone, not a share.
        optimizer: Room is left for its state.
        processes: Those that train the model.
        accumulate: As for `fit`.
        allow: As for `fit`; sharded units keep or recompute.
        compile: As for `fit`; one process alone.

    Raises:
        InfeasibleError: No plan fits in one of the processes.
        UnsupportedError: The model has sharded units inside sharded units.
        UsageError: The budget is a share, or blocks are to be compiled, and there are
            several processes.
    """
    if processes.count > 1 and compile:
        raise UsageError(
            f"expected compile=False with several processes, got {compile!r}; compile "
            "the model in one process, or leave compile= out."
        )
    step = training_step(model, step=run, accumulate=accumulate)
    units = units_of(model) if processes.is_sharded else []
    agreed = _agreed(budget, model, processes, in_bytes=bool(units))
    if units:
        assert isinstance(agreed, int), "in bytes"
        return _fit_units(step, units, agreed, optimizer, processes)
    fitted, floor_bytes = None, 0

    def run_in_step() -> None:
        processes.tell(Report(batches=1))
        run()

    try:
        executor: Any = compile  # for a type checker it is one of the overloads
        _, fitted = fit(
            model,
            budget=agreed,
            step=run_in_step,
            optimizer=optimizer,
            accumulate=accumulate,
            allow=allow,
            compile=executor,
            progress=False,
        )
    except InfeasibleError as error:
        floor_bytes = error.floor_bytes
        if processes.count == 1:
            raise
    finally:
        _follow(step, processes)
    if processes.count == 1:
        assert fitted is not None, "an error was raised"
        return fitted
    assert isinstance(agreed, int), "in bytes"
    assert not isinstance(fitted, CompiledFit), "one process alone"
    floor_bytes = max(processes.gather(floor_bytes))
    if fitted is None or floor_bytes:
        if fitted is not None:
            fitted.remove()
        raise InfeasibleError(
            f"a budget of {print_bytes(agreed)} cannot be met in every process: "
            f"the smallest that can is {print_bytes(floor_bytes)}.",
            budget_bytes=agreed,
            floor_bytes=floor_bytes,
        )
    plan = processes.gather(fitted.plan.to_json())[0]
    if not processes.is_first:
        fitted.adopt(Plan.from_json(plan))
    # A plan is verified when it first runs, which takes memory: not in training.
    with untouched(step) as repeated:
        repeated.run()
    return fitted


def _agreed(
    budget: Budget, model: nn.Module, processes: Processes, *, in_bytes: bool
) -> int | float:
    """Return the budget of all processes: the smallest, in bytes if there are several.

    Raises:
        UsageError: It is a share where bytes are needed.
    """
    if budget is None:
        found = budget_bytes(None, 0, device_of(model))
    else:
        found = parse_budget(budget)
    if processes.count > 1:
        found = min(processes.gather(found))
    if isinstance(found, float) and (processes.count > 1 or in_bytes):
        raise UsageError(
            f"expected a budget in bytes, got a share, {budget!r}; processes and units "
            "differ in the peak that it is a share of. Give bytes, such as '8GiB'."
        )
    return found


def _follow(step: TrainingStep, processes: Processes) -> None:
    """Run along until every process has measured enough.

    A sharded model exchanges parameters in forward: who is done earlier has to take
    part in the steps of the others.
    """
    if processes.count == 1:
        return
    with untouched(step) as repeated:
        while any(report.batches for report in processes.tell(Report())):
            repeated.begin()
            repeated.run()


def _fit_units(
    step: TrainingStep,
    units: list[nn.Module],
    allowed_bytes: int,
    optimizer: Optimizer | None,
    processes: Processes,
) -> UnitPlan:
    moments = [dict(state) for state in optimizer.state.values()] if optimizer else []
    missing_bytes = missing_state_bytes(optimizer, step.device) if optimizer else 0
    reserved_bytes = max(processes.gather(missing_bytes))

    plan = UnitPlan(units)

    def measure() -> int:
        # The regions lie outside: `untouched` restores the attributes of modules, and
        # those that `checkpoint_module` sets are among them.
        with untouched(step) as repeated:
            run_step(repeated)
            cost = run_step(repeated, resident=moments)
        return max(processes.gather(cost.peak_bytes))

    try:
        plan.settle(allowed_bytes, measure, reserved_bytes)
    except InfeasibleError as error:
        margin_bytes = told_bytes(error.floor_bytes, step.device)
        margin_bytes -= error.floor_bytes
        raise infeasible_with(error, margin_bytes, allowed_bytes) from None
    return plan
