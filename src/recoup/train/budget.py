"""A plan for a budget that all processes of a run agree on."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from recoup.api.budgets import infeasible_with, told_bytes
from recoup.api.fit import Fit, fit
from recoup.core.errors import InfeasibleError
from recoup.core.plan import Plan
from recoup.core.units import parse_bytes, print_bytes
from recoup.measure.floor import run_step
from recoup.measure.optimizers import missing_state_bytes
from recoup.measure.training import TrainingStep, training_step, untouched
from recoup.train.processes import Processes, Report
from recoup.train.units import UnitPlan, units_of


def fit_together(
    model: nn.Module,
    run: Callable[[], object],
    budget: int | str,
    *,
    optimizer: Optimizer,
    processes: Processes,
) -> Fit | UnitPlan:
    """Fit a model into a budget, the same in all processes.

    The budget is the smallest that any process has, the floor the largest, and the
    plan is the first process's. All must call it together. Costs what `fit` costs.
    A model that is sharded in several units gets regions inside these.

    Args:
        model: The model itself, without its wrapper.
        run: Runs forward and backward once, through the wrapper.
        budget: The most bytes on the device at any moment of a step.
        optimizer: Room is left for its state.
        processes: Those that train the model.

    Raises:
        InfeasibleError: No plan fits in one of the processes.
        UnsupportedError: The model has sharded units inside sharded units.
    """
    agreed_bytes = min(processes.gather(parse_bytes(budget)))
    units = units_of(model) if processes.is_sharded else []
    if units:
        return _fit_units(model, units, run, agreed_bytes, optimizer, processes)
    fitted, floor_bytes = None, 0
    step = training_step(model, step=run)

    def run_in_step() -> None:
        processes.tell(Report(batches=1))
        run()

    try:
        _, fitted = fit(
            model,
            budget=agreed_bytes,
            step=run_in_step,
            optimizer=optimizer,
            progress=False,
        )
    except InfeasibleError as error:
        floor_bytes = error.floor_bytes
        if processes.count == 1:
            raise
    finally:
        _follow(step, processes)
    floor_bytes = max(processes.gather(floor_bytes))
    if fitted is None or floor_bytes:
        if fitted is not None:
            fitted.remove()
        raise InfeasibleError(
            f"a budget of {print_bytes(agreed_bytes)} cannot be met in every process: "
            f"the smallest that can is {print_bytes(floor_bytes)}.",
            budget_bytes=agreed_bytes,
            floor_bytes=floor_bytes,
        )
    plan = processes.gather(fitted.plan.to_json())[0]
    if processes.count > 1:
        if not processes.is_first:
            fitted.adopt(Plan.from_json(plan))
        # A plan is verified when it first runs, which takes memory: not in training.
        with untouched(step) as repeated:
            repeated.run()
    return fitted


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
    model: nn.Module,
    units: list[nn.Module],
    run: Callable[[], object],
    budget_bytes: int,
    optimizer: Optimizer,
    processes: Processes,
) -> UnitPlan:
    step = training_step(model, step=run)
    moments = [dict(state) for state in optimizer.state.values()]
    reserved_bytes = max(processes.gather(missing_state_bytes(optimizer, step.device)))

    plan = UnitPlan(units)

    def measure() -> int:
        # The regions lie outside: `untouched` restores the attributes of modules, and
        # those that `checkpoint_module` sets are among them.
        with untouched(step) as repeated:
            run_step(repeated)
            cost = run_step(repeated, resident=moments)
        return max(processes.gather(cost.peak_bytes))

    try:
        plan.settle(budget_bytes, measure, reserved_bytes)
    except InfeasibleError as error:
        margin_bytes = told_bytes(error.floor_bytes, step.device)
        margin_bytes -= error.floor_bytes
        raise infeasible_with(error, margin_bytes, budget_bytes) from None
    return plan
