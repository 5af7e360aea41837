"""A plan for a budget that all processes agree on, including sharded units."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recoup.backend.training.sharded_units import unit_paths
from recoup.core.plan import Plan
from recoup.core.segments import Action
from recoup.core.units import parse_budget, print_bytes
from recoup.engine.scopes.module import checkpoint_module, uncheckpoint_module
from recoup.engine.scopes.policies import KeepCostly
from recoup.engine.verification.replay_check import Verify
from recoup.errors import InfeasibleError, UnsupportedError, UsageError
from recoup.fitting.budgets import Budget, budget_bytes, infeasible_with
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit, fit
from recoup.measurement.steps.floor import run_step
from recoup.measurement.steps.optimizers import missing_state_bytes, state_tensors
from recoup.measurement.steps.training_step import (
    TrainingStep,
    device_of,
    training_step,
    untouched,
)
from recoup.train.processes import Processes, Report

Measure = Callable[[], int]
"""Runs a step in all processes, twice, and returns the largest peak of the second."""


def sharded_parts(model: nn.Module) -> list[nn.Module]:
    """Return the submodules of a model that `fully_shard` has sharded."""
    return [model.get_submodule(path) for path in unit_paths(model)]


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the submodules that `fully_shard` gathers one at a time.

    Raises:
        UnsupportedError: Units are nested. A region around the outer one would be
            replayed without the parameters of the inner one.
    """
    units = sharded_parts(model)
    for unit in units:
        if sharded_parts(unit):
            raise UnsupportedError(
                "expected sharded units that are not nested with budget=, got one "
                f"inside another ({type(unit).__name__}); shard the blocks and the "
                "model around them, or set use_gradient_checkpointing=True instead."
            )
    return units


class UnitPlan:
    """The units of a sharded model that are recomputed, and how much of each.

    Replaying a region across several units would need the parameters of all of them,
    gathered by all processes at the same time. So regions stay inside units, and the
    choice is a level: a number of units, from the first on, recompute all but costly
    results; at higher levels, units recompute everything.

    Attributes:
        level: How much is recomputed, from 0 to `levels`.
        budget_bytes: The budget that the level was chosen for.
        measured_peak_bytes: The largest peak of a step at this level, in any process.
        trials: The number of levels tried on real steps.
    """

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._units = tuple(units)
        self.level = 0
        self.budget_bytes = 0
        self.measured_peak_bytes = 0
        self.trials = 0

    @property
    def levels(self) -> int:
        """The level at which every unit is recomputed as a whole."""
        return 2 * len(self._units)

    @property
    def plan(self) -> tuple[str, ...]:
        """The action on each unit: `keep`, `keep costly` or `recompute`."""
        return tuple(self._choices(self.level))

    def settle(self, budget_bytes: int, measure: Measure, reserved_bytes: int) -> None:
        """Choose the minimum level whose step stays within the budget.

        Costs two steps for each tried level, about twice the logarithm of their number,
        starting with the one that needs least memory.

        Raises:
            InfeasibleError: The step needs more with every unit recomputed.
        """
        self.budget_bytes = budget_bytes

        def peak_at(level: int) -> int:
            self._put(level, verify="off")
            self.trials += 1
            return measure() + reserved_bytes

        try:
            self.level, self.measured_peak_bytes = lowest_level(
                peak_at, self.levels, budget_bytes
            )
            self._put(self.level, verify="first")
            measure()
        except BaseException:
            self.remove()
            raise

    def tighten(self) -> bool:
        """Recompute in a tenth more of the units; return whether that was possible."""
        if self.level == self.levels:
            return False
        self.level = min(self.levels, self.level + max(1, self.levels // 10))
        self._put(self.level, verify="first")
        return True

    def remove(self) -> None:
        """Remove all regions of the units; `plan` stays what it was."""
        for unit in self._units:
            uncheckpoint_module(unit)

    def __str__(self) -> str:
        choices = self.plan
        return (
            f"budget {print_bytes(self.budget_bytes)}: measured peak "
            f"{print_bytes(self.measured_peak_bytes)}; of {len(choices)} units "
            f"{choices.count('recompute')} are recomputed, "
            f"{choices.count('keep costly')} except costly results "
            f"({self.trials} levels tried)"
        )

    def _choices(self, level: int) -> list[str]:
        count = len(self._units)
        costly, whole = min(level, count), max(0, level - count)
        return (
            ["recompute"] * whole
            + ["keep costly"] * (costly - whole)
            + ["keep"] * (count - costly)
        )

    def _put(self, level: int, *, verify: Verify) -> None:
        for number, (unit, choice) in enumerate(
            zip(self._units, self._choices(level), strict=True)
        ):
            uncheckpoint_module(unit)
            if choice != "keep":
                checkpoint_module(
                    unit,
                    name=f"unit {number}",
                    policy=KeepCostly() if choice == "keep costly" else None,
                    verify=verify,
                )


def lowest_level(
    peak_at: Callable[[int], int], levels: int, budget_bytes: int
) -> tuple[int, int]:
    """Return the minimum level whose peak is within a budget, and that peak.

    Starts at the highest level, which needs least, and goes down in strides that
    double while the peak, extrapolated by its last growth, fits.

    Raises:
        InfeasibleError: The highest level does not fit.

    Examples:
        >>> lowest_level(lambda level: 100 - 10 * level, 8, 55)
        (5, 50)
    """
    level, peak = levels, peak_at(levels)
    if peak > budget_bytes:
        raise InfeasibleError(
            f"a budget of {print_bytes(budget_bytes)} cannot be met: with every "
            f"unit recomputed a step takes {print_bytes(peak)}; use a smaller batch.",
            budget_bytes=budget_bytes,
            floor_bytes=peak,
        )
    failed, stride = -1, 1
    while level > failed + 1:
        lower = max(failed + 1, level - stride)
        found = peak_at(lower)
        if found > budget_bytes:
            failed = lower
            stride = max(1, (level - lower) // 2)
            continue
        growth = max(1, (found - peak) // (level - lower))
        level, peak = lower, found
        stride = max(1, min(2 * stride, (budget_bytes - peak) // growth))
    return level, peak


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
    rerun: bool | None = None,
) -> Fit | CompiledFit | UnitPlan:
    """Fit a model into a budget, the same in all processes.

    The budget is the smallest of any process, the floor the largest, and the plan is
    that of the first process. All must call it together. Costs as much as `fit`. A
    model that is sharded in several units gets regions inside these.

    Args:
        model: The model itself, without its wrapper.
        run: Runs forward and backward once, through the wrapper.
        budget: The most bytes on the device at any moment of a step, as for `fit`;
            several processes and sharded units need bytes, not a share.
        optimizer: Memory is reserved for its state.
        processes: The processes that train the model.
        accumulate: As for `fit`.
        allow: As for `fit`; sharded units keep or recompute.
        compile: As for `fit`; one process alone.
        rerun: As for `fit`; sharded units are recorded.

    Raises:
        InfeasibleError: No plan fits in one of the processes.
        UnsupportedError: The model has nested sharded units.
        UsageError: The budget is a share, or blocks are to be compiled, with several
            processes.
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
        processes.exchange(Report(batches=1))
        run()

    try:
        executor: Any = compile  # matches one of the overloads at run time
        _, fitted = fit(
            model,
            budget=agreed,
            step=run_in_step,
            optimizer=optimizer,
            accumulate=accumulate,
            allow=allow,
            compile=executor,
            rerun=rerun,
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
            f"the smallest that can is {print_bytes(floor_bytes)}; give that.",
            budget_bytes=agreed,
            floor_bytes=floor_bytes,
        )
    plan = processes.gather(fitted.plan.to_json())[0]
    if not processes.is_first:
        fitted.adopt(Plan.from_json(plan))
    # A plan is verified when it first runs, which takes memory: do it before training.
    with untouched(step) as repeated:
        repeated.run()
    return fitted


def _agreed(
    budget: Budget, model: nn.Module, processes: Processes, *, in_bytes: bool
) -> int | float:
    """Return the smallest budget of all processes, in bytes if there are several."""
    if budget is None:
        found = budget_bytes(None, 0, device_of(model))
    else:
        found = parse_budget(budget)
    if processes.count > 1:
        found = min(processes.gather(found))
    if isinstance(found, float) and (processes.count > 1 or in_bytes):
        raise UsageError(
            f"expected a budget in bytes, got a share, {budget!r}; the peak that it is "
            "a share of differs among processes and units. Give bytes, such as '8GiB'."
        )
    return found


def _follow(step: TrainingStep, processes: Processes) -> None:
    """Run steps until every process has finished measuring.

    A sharded model exchanges parameters in forward: processes that finish early must
    take part in the steps of the others.
    """
    if processes.count == 1:
        return
    with untouched(step) as repeated:
        while any(report.batches for report in processes.exchange(Report())):
            repeated.begin()
            repeated.run()


def _fit_units(
    step: TrainingStep,
    units: list[nn.Module],
    allowed_bytes: int,
    optimizer: Optimizer | None,
    processes: Processes,
) -> UnitPlan:
    moments = state_tensors(optimizer) if optimizer else []
    missing_bytes = missing_state_bytes(optimizer, step.device) if optimizer else 0
    reserved_bytes = max(processes.gather(missing_bytes))

    plan = UnitPlan(units)

    def measure() -> int:
        # Regions are applied outside this block: `untouched` restores the attributes
        # of modules, including those that `checkpoint_module` sets.
        with untouched(step) as repeated:
            run_step(repeated)
            cost = run_step(repeated, resident=moments)
        return max(processes.gather(cost.peak_bytes))

    try:
        plan.settle(allowed_bytes, measure, reserved_bytes)
    except InfeasibleError as error:
        raise infeasible_with(error, allowed_bytes, step.device) from None
    return plan
