"""fit: name a budget in bytes, get the fastest plan that fits, applied and checked."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.api.adaptation import Adapted
from recoup.api.budgets import Budget, budget_bytes, infeasible_with
from recoup.api.findings import fit_findings
from recoup.api.progress import Progress, progress_for
from recoup.core.errors import InfeasibleError, UsageError
from recoup.core.graph import Graph
from recoup.core.plan import Plan, plan_for
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.core.units import print_bytes, print_seconds
from recoup.engine.plans import digest_of
from recoup.engine.verification import Verify
from recoup.measure.floor import Cost, measure_floor, run_step, time_step
from recoup.measure.optimizers import missing_state_bytes
from recoup.measure.training import TrainingStep, training_step, untouched
from recoup.planners.infeasible import infeasible
from recoup.planners.plan import EXACT, floor_with, plan_with
from recoup.planners.search import Search
from recoup.planners.solution import Solution
from recoup.report.findings import Findings
from recoup.report.pages import fragment, page

Model = TypeVar("Model", bound=nn.Module)

_ROUNDS = 4
"""How often a plan that misses the budget is corrected."""

_ROOM = 0.02
"""A plan that leaves more than this share of the budget unused is tried once more."""


@dataclass
class Fit:
    """What `fit` did to a model, and what it costs.

    Attributes:
        model: The model, with the plan in force.
        plan: The plan.
        graph: The step as it was measured.
        budget_bytes: The budget, in bytes.
        plain_peak_bytes: The peak of the plain run, as predicted.
        plain_seconds: The time of the plain step, as predicted.
        predicted_peak_bytes: The peak of the plan, as predicted.
        predicted_seconds: The time of a step with the plan, as predicted.
        measured_peak_bytes: The peak of a real step with the plan.
        measured_seconds: The time of a real step with the plan.
        reserved_bytes: Kept free for an optimizer's state that does not exist yet.
        gap: By which part of its time the step could at best be shorter.
        planner: The algorithm that found the plan.
        planning_seconds: How long planning took.
        total_seconds: How long all of `fit` took.
        rounds: How many plans were tried on a real step.
        retries: How often a step ran out of memory and was run again.
    """

    model: nn.Module
    plan: Plan
    graph: Graph = field(repr=False)
    budget_bytes: int
    plain_peak_bytes: int
    plain_seconds: float
    predicted_peak_bytes: int
    predicted_seconds: float
    measured_peak_bytes: int
    measured_seconds: float
    reserved_bytes: int
    gap: float
    planner: str
    planning_seconds: float
    total_seconds: float
    rounds: int
    retries: int = 0
    _adapted: Adapted | None = field(default=None, repr=False)
    _search: Search | None = field(default=None, repr=False)

    @cached_property
    def floor_bytes(self) -> int:
        """The smallest budget that can be met; looked for when first asked."""
        search = self._search or Search(self.graph, EXACT)
        return search.floor[1].peak_bytes + self.reserved_bytes

    def remove(self) -> nn.Module:
        """Take the plan off the model, which is then as it was before `fit`."""
        if self._adapted is not None:
            self._adapted.remove()
            self._adapted = None
        return self.model

    def tighten(self) -> bool:
        """Plan anew for a tenth less memory; say whether that was possible."""
        if self._adapted is None or not self._adapted.tighten():
            return False
        self.plan = self._adapted.plan
        return True

    def adopt(self, plan: Plan) -> None:
        """Put another plan for the same step in force, such as another process's.

        Raises:
            UsageError: The plan has been removed from the model.
        """
        if self._adapted is None:
            raise UsageError("the plan was removed from the model: call fit again.")
        self._adapted.adopt(plan)
        self.plan = plan

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step; if it runs out of memory, plan tighter and run it once more.

        Args:
            step: Runs forward and backward. It must be safe to run again: gradients
                that it left are dropped before.
        """
        try:
            return step()
        except torch.OutOfMemoryError:
            if not self.tighten():
                raise
        self.retries += 1
        self.model.zero_grad(set_to_none=True)
        torch.accelerator.empty_cache()
        return step()

    def findings(self, *, title: str = "", points: int = 7) -> Findings:
        """Return all that was found, for `recoup.report`; see `fit_findings`."""
        return fit_findings(self, title=title, points=points)

    def write_page(self, path: str | Path, *, title: str = "") -> Path:
        """Write one self-contained HTML page: memory, plans, blocks, baselines."""
        target = Path(path)
        target.write_text(page(self.findings(title=title)), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        return fragment(self.findings(points=0))

    def __str__(self) -> str:
        held = self.plan.count()
        actions = ", ".join(f"{count} {action}" for action, count in held.items())
        slower = self.predicted_seconds / self.plain_seconds - 1
        return (
            f"budget {print_bytes(self.budget_bytes)}: measured peak "
            f"{print_bytes(self.measured_peak_bytes)} (predicted "
            f"{print_bytes(self.predicted_peak_bytes)}, plain "
            f"{print_bytes(self.plain_peak_bytes)}); step "
            f"{print_seconds(self.measured_seconds)}, {slower:+.1%} by prediction; "
            f"{len(self.plan.spans)} regions ({actions or 'all recomputed'}), at most "
            f"{self.gap:.1%} from the best possible"
        )


def fit(  # noqa: PLR0913 (a step can be described in several ways)
    model: Model,
    batch: Any = None,
    budget: Budget = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    optimizer: Optimizer | None = None,
    allow: Iterable[Action] = (Action.KEEP,),
    blocks: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    progress: Progress | bool | None = None,
    verify: Verify = "first",
) -> tuple[Model, Fit]:
    """Make a model train within a budget of memory, as fast as it can be done.

    One step is measured at the least memory it can run in, the fastest plan that fits
    is worked out, applied to the model, and checked on a real step; where the
    measurement differs from the prediction, the plan is corrected. Parameters, buffers,
    gradients and random generators are afterwards as they were before. Train with any
    loop; gradients are bitwise those of the plain model.

    Costs seven steps and the planning; two more steps for each correction.

    Args:
        model: The model; it stays the same object with the same parameters.
        batch: What it is called with: a tensor, a tuple of positional arguments, or a
            mapping of keyword arguments. With a loss that takes the output and a
            target: a pair of what the model is called with and the target.
        budget: The most bytes on the device at any moment of a step, everything
            counted: a number, a text as "8GiB", a float up to 1 as a share of the plain
            peak, or None for what the device has.
        loss: Computes the loss from the output (and the target). Without it the output
            must be the loss, or have it as `loss`.
        step: Runs forward and backward by itself, instead of `batch` and `loss`.
        optimizer: Room is left for its state, if that does not exist yet.
        allow: What may be done with a value besides recomputing it.
        blocks: The paths of the modules between which the model is cut; by default
            they are found.
        device: Where to count memory; by default where the parameters are.
        progress: A function that is told what is being done; True shows it, None shows
            it in a terminal.
        verify: When replayed values are compared with forward's; see `CheckpointScope`.

    Returns:
        The model, and what was done to it. `Fit.remove` takes it off again.

    Raises:
        InfeasibleError: No plan fits; it names the smallest budget that can be met.
        UsageError: The arguments describe no step, or no budget.

    Examples:
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        >>> model = nn.Sequential(*(layer() for _ in range(8)))
        >>> model, report = fit(model, torch.ones(512, 64), 0.6, loss=Tensor.sum)
        >>> report.measured_peak_bytes <= report.budget_bytes
        True
        >>> report.measured_peak_bytes < report.plain_peak_bytes
        True
        >>> _ = report.remove()
    """
    started = time.perf_counter()
    described = training_step(model, batch, loss=loss, step=step, device=device)
    with progress_for(progress) as tell, untouched(model):
        fitting = _Fitting(described, frozenset(allow), verify, tell)
        fitting.reserve(optimizer)
        fitting.measure(blocks)
        report = fitting.settle(budget)
    report.total_seconds = time.perf_counter() - started
    return model, report


class _Fitting:
    """One run of `fit`: measure, plan, apply, check, correct."""

    def __init__(
        self,
        step: TrainingStep,
        allow: frozenset[Action],
        verify: Verify,
        tell: Progress,
    ) -> None:
        self._step = step
        self._allow = allow
        self._verify: Verify = verify
        self._tell = tell
        self._resident: list[object] = []
        self._reserved_bytes = 0
        self._planning_seconds = 0.0
        self._rounds = 0

    def reserve(self, optimizer: Optimizer | None) -> None:
        """Leave room for an optimizer's state, and count what it has."""
        if optimizer is None:
            return
        self._resident = [dict(state) for state in optimizer.state.values()]
        self._reserved_bytes = missing_state_bytes(optimizer, self._step.device)

    def measure(self, blocks: Sequence[str] | None) -> None:
        """Run the step at floor memory."""
        self._tell("measuring a step at the least memory")
        self._graph = measure_floor(self._step, names=blocks, resident=self._resident)
        self._search = Search(self._graph, self._allow)

    def settle(self, budget: Budget) -> Fit:
        """Plan, apply and check until a plan holds on a real step."""
        plain = simulate(self._graph, ())
        asked_bytes = budget_bytes(budget, plain.peak_bytes, self._step.device)
        budget_left = asked_bytes - self._reserved_bytes
        best: _Tried | None = None
        try:
            for tried in self._attempts(budget_left):
                if tried.cost.peak_bytes > budget_left:
                    tried.adapted.remove()
                    continue
                if best is not None:
                    best.adapted.remove()
                best = tried
        except InfeasibleError as error:
            if best is None:
                best = self._smallest(budget_left, asked_bytes, error)
        except BaseException:
            if best is not None:
                best.adapted.remove()
            raise
        if best is None:
            error = infeasible(self._graph, budget_left, self._search.floor[0])
            best = self._smallest(budget_left, asked_bytes, error)
        return self._report(asked_bytes, best)

    def _attempts(self, budget_left: int) -> Iterator["_Tried"]:
        """Yield plans tried on a real step, each corrected by the one before.

        One that misses the budget is followed by one for that much less; one that takes
        less than was predicted by one for more, once.
        """
        target = budget_left
        before: _Tried | None = None
        fits = False
        for _ in range(_ROUNDS):
            solution = self._plan(target)
            if before is not None and solution.segments == before.solution.segments:
                return
            tried = self._try(solution, budget_left)
            yield tried
            if fits:
                return
            room_bytes = budget_left - tried.cost.peak_bytes
            error_bytes = tried.cost.peak_bytes - solution.simulation.peak_bytes
            fits = room_bytes >= 0
            if fits and (error_bytes >= 0 or room_bytes < _ROOM * budget_left):
                return
            target = (budget_left if fits else target) - error_bytes
            before = tried

    def _smallest(
        self, budget_left: int, asked_bytes: int, error: InfeasibleError
    ) -> "_Tried":
        """Try the smallest plan where no other one fits.

        Raises:
            InfeasibleError: It does not fit; the error says what it takes, measured.
        """
        solution = floor_with(self._search)
        tried = self._try(solution, budget_left)
        if tried.cost.peak_bytes > budget_left:
            tried.adapted.remove()
            wrong_bytes = tried.cost.peak_bytes - solution.simulation.peak_bytes
            more_bytes = self._reserved_bytes + wrong_bytes
            raise infeasible_with(error, more_bytes, asked_bytes) from None
        return tried

    def _plan(self, target: int) -> Solution:
        self._tell(f"planning for {print_bytes(target)}")
        solution = plan_with(self._search, target)
        self._planning_seconds += solution.seconds_planning
        return solution

    def _try(self, solution: Solution, budget_left: int) -> "_Tried":
        """Apply a plan and run a real step: once to verify it, once to measure."""
        self._tell("checking the plan on a real step")
        self._rounds += 1
        made = plan_for(
            self._graph,
            solution.segments,
            model=digest_of(self._step.model),
            budget_bytes=budget_left,
            peak_bytes=solution.simulation.peak_bytes,
            seconds=solution.simulation.seconds,
        )
        adapted = Adapted(
            self._step.model, self._graph, made, self._allow, verify=self._verify
        )
        try:
            self._step.model.zero_grad(set_to_none=True)
            self._step.run()
            cost = run_step(self._step, resident=self._resident)
        except BaseException:
            adapted.remove()
            raise
        return _Tried(solution, adapted, cost)

    def _report(self, asked_bytes: int, tried: "_Tried") -> Fit:
        plain = simulate(self._graph, ())
        predicted = tried.solution.simulation
        seconds = time_step(self._step, repeats=1)
        if self._step.device.type != "cpu":  # there, counting bytes takes time
            seconds = min(seconds, tried.cost.seconds)
        return Fit(
            model=self._step.model,
            plan=replace(tried.adapted.plan, budget_bytes=asked_bytes),
            graph=self._graph,
            budget_bytes=asked_bytes,
            plain_peak_bytes=plain.peak_bytes + self._reserved_bytes,
            plain_seconds=plain.seconds,
            predicted_peak_bytes=predicted.peak_bytes + self._reserved_bytes,
            predicted_seconds=predicted.seconds,
            measured_peak_bytes=tried.cost.peak_bytes + self._reserved_bytes,
            measured_seconds=seconds,
            reserved_bytes=self._reserved_bytes,
            gap=tried.solution.gap,
            planner=tried.solution.planner,
            planning_seconds=self._planning_seconds,
            total_seconds=0.0,
            rounds=self._rounds,
            _adapted=tried.adapted,
            _search=self._search,
        )


@dataclass(frozen=True, slots=True)
class _Tried:
    """A plan in force, and what a real step with it cost."""

    solution: Solution
    adapted: Adapted
    cost: Cost
