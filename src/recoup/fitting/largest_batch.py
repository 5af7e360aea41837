"""largest_batch: the largest size of a batch that trains within a budget."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.backend.compiler.partitioning import Executor
from recoup.backend.compiler.suspension import suspended_compilation
from recoup.backend.memory.meters import is_out_of_memory
from recoup.core.display import as_html
from recoup.core.graph import Graph
from recoup.core.growth import Axis, Growth, on_line, resized
from recoup.core.segments import Action
from recoup.core.units import parse_budget, print_bytes, print_seconds
from recoup.errors import InfeasibleError, UsageError
from recoup.fitting.arguments import actions_of, optimizers_of
from recoup.fitting.budgets import Budget, budget_bytes
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, check_compile, fit
from recoup.fitting.fit_result import FitResult
from recoup.measurement.steps.floor import measure_floor
from recoup.measurement.steps.optimizers import missing_state_bytes, state_tensors
from recoup.measurement.steps.training_step import device_of, training_step, untouched
from recoup.planners.planner import plan_with
from recoup.planners.search import Search

_SIZE: Axis = ("size", 0)
_PLANNING_SECONDS = 0.5
"""The time after which planning for one size starts no long computation."""

_FIRST = (2, 4)
"""The sizes that are measured first. Some models cannot train on a single sample."""

_GROWTH = 32
"""Sizes up to this multiple of the largest measured one are predicted."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that `largest_batch` found.

    Attributes:
        size: The size, as `make_batch` takes it.
        budget_bytes: The budget.
        measured_peak_bytes: The peak of a real step with a batch of this size.
        slowdown: How much longer than the plain step it takes, predicted: 0.2 is 20 %.
            Less than 0 where compiled blocks are faster.
        measured_seconds: The time of a real step.
        plain_size: The largest size without recoup, predicted; 0: none fits.
        measured_sizes: The sizes that ran.
        total_seconds: How long the search took.
        executor: What ran the blocks of the real step: "exact" or "inductor"; False:
            torch, eagerly.
    """

    size: int
    budget_bytes: int
    measured_peak_bytes: int
    slowdown: float
    measured_seconds: float
    plain_size: int
    measured_sizes: tuple[int, ...]
    total_seconds: float
    executor: Literal[False] | Executor = False

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def __str__(self) -> str:
        compiled = f", blocks compiled ({self.executor})" if self.executor else ""
        return (
            f"batch {self.size} (plain {self.plain_size}) in a budget of "
            f"{print_bytes(self.budget_bytes)}: measured peak "
            f"{print_bytes(self.measured_peak_bytes)}; step "
            f"{print_seconds(self.measured_seconds)}, {self.slowdown:+.1%} by "
            f"prediction{compiled}; {len(self.measured_sizes)} sizes measured in "
            f"{print_seconds(self.total_seconds)}"
        )


def largest_batch(  # noqa: PLR0913 (as `fit`)
    model: nn.Module,
    make_batch: Callable[[int], Any],
    budget: Budget = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[Any], object] | None = None,
    slowdown: float | None = 0.33,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    accumulate: bool = False,
    allow: Iterable[Action] = (Action.KEEP,),
    limit: int = 1 << 16,
    compile: Compile = False,  # noqa: A002 (torch's own word)
) -> LargestBatch:
    """Find the largest batch that trains within a budget, by planning.

    A few sizes are measured, those between them predicted and planned for, and the
    result is checked on a real step by `fit`. The model is afterwards as before: call
    `fit` with a batch of the size that was found.

    Costs four steps for each measured size, about five of them, some planning for each,
    and one `fit`. With `compile=` sizes are searched by plans without a compiler, and
    blocks are compiled only for the sizes that are checked: one, and a larger one if
    the compiled step was fast enough for it.

    Args:
        model: The model.
        make_batch: Makes a batch of a size, as `fit` takes it. The size may be the
            number of samples, or the length of a sequence; larger ones take more
            memory.
        budget: The most bytes on the device, as for `fit`, but no share; None for what
            the device has. On a CPU it must be given: a search would fill the
            machine's memory.
        loss: Computes the loss, as for `fit`.
        step: Runs forward and backward on a batch by itself, instead of `loss`.
        slowdown: How much longer than the plain step of the same size a step may take,
            predicted; None for any.
        optimizer: Room is left for its state.
        accumulate: Gradients of earlier steps are there when a step begins.
        allow: Actions allowed on a value besides recomputing it.
        limit: No larger size is looked for.
        compile: The executor of the blocks, as for `fit`. A step that fits without
            recoup is never too slow.

    Raises:
        InfeasibleError: Not even a batch of size 1 fits.
        UsageError: The arguments describe no step, no budget or no slowdown.

    Examples:
        >>> import torch
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        >>> model = nn.Sequential(*(layer() for _ in range(4)))
        >>> def make_batch(size):
        ...     return torch.ones(size, 64)
        >>> found = largest_batch(model, make_batch, "3MB", loss=torch.sum, slowdown=9)
        >>> found.size > found.plain_size
        True
        >>> found.measured_peak_bytes <= found.budget_bytes
        True
    """
    started = time.perf_counter()
    device = device_of(model)
    allowed_bytes = _allowed_bytes(budget, device)
    if limit < 1:
        raise UsageError(f"expected limit of at least 1, got {limit}.")
    if step is not None and loss is not None:
        raise UsageError("expected loss= or step=, got both; a step has its own loss.")
    check_slowdown(slowdown)
    check_compile(compile)
    optimizers = optimizers_of(optimizer)
    reserved_bytes = sum(missing_state_bytes(each, device) for each in optimizers)

    def described(size: int) -> tuple[Any, Callable[[], object] | None]:
        batch = make_batch(size)
        return (batch, None) if step is None else (None, partial(step, batch))

    def measure(size: int) -> Graph:
        batch, run = described(size)
        measured = training_step(
            model, batch, loss=loss, step=run, accumulate=accumulate
        )
        moments = [tensor for each in optimizers for tensor in state_tensors(each)]
        around = suspended_compilation(model) if compile else nullcontext()
        with around, untouched(measured) as repeated:
            return measure_floor(repeated, resident=moments)

    def checked(size: int) -> FitResult:
        batch, run = described(size)
        _, report = fit(
            model,
            batch,
            allowed_bytes,
            loss=loss,
            step=run,
            optimizer=optimizer,
            accumulate=accumulate,
            allow=allow,
            progress=False,
            # A runtime value: the result is of either kind.
            compile=cast("Literal['auto']", compile),
        )
        report.remove()
        return report

    sizes = _Sizes(measure, allowed_bytes - reserved_bytes, actions_of(allow), slowdown)
    size, report = _largest_checked(sizes, checked, allowed_bytes, limit, bool(compile))
    sizes.graphs.setdefault(size, report.graph)
    return LargestBatch(
        size=size,
        budget_bytes=allowed_bytes,
        measured_peak_bytes=report.measured_peak_bytes,
        slowdown=_slowdown_of(report),
        measured_seconds=report.measured_seconds,
        plain_size=sizes.largest_plain(size),
        measured_sizes=tuple(sorted(sizes.graphs)),
        total_seconds=time.perf_counter() - started,
        executor=_executor_of(report),
    )


def _largest_checked(
    sizes: "_Sizes",
    check: Callable[[int], FitResult],
    allowed_bytes: int,
    limit: int,
    is_compiled: bool,  # noqa: FBT001
) -> tuple[int, FitResult]:
    """Return the largest size whose real step fits, and the result of `fit`.

    The errors of the predictions for one size are expected for the others. After the
    first compiled step that is fast enough, a larger size is searched once, because the
    search expects the times of steps without a compiler.
    """
    may_grow = is_compiled and sizes.slowdown is not None
    best: tuple[int, FitResult] | None = None
    size = sizes.largest(limit)
    while best is None or size > best[0]:
        try:
            report = check(size)
        except InfeasibleError as error:
            if size == 1:
                raise
            # Room for the bytes of a real step beyond its prediction.
            sizes.leave_free(error.floor_bytes - allowed_bytes)
        else:
            found = _slowdown_of(report)
            if size == 1 or sizes.is_accepted(size, found):
                best = size, report
                if not may_grow:
                    break
                may_grow = False
                sizes.expect_ratio(size, found)
                size = sizes.largest(limit)
                continue
            expect = sizes.expect_ratio if is_compiled else sizes.expect_slowdown
            expect(size, found)
        limit = size - 1
        size = sizes.largest(limit, measure=False)
    return best


def _executor_of(report: FitResult) -> Literal[False] | Executor:
    if not isinstance(report, CompiledFit):
        return False
    return "inductor" if report.plan.executor == "inductor" else "exact"


def _slowdown_of(report: FitResult) -> float:
    return report.predicted_seconds / report.plain_seconds - 1


def _allowed_bytes(budget: Budget, device: torch.device) -> int:
    """Return the budget of a search.

    Raises:
        UsageError: It is no budget, or does not bound a search.
    """
    if budget is None and device.type == "cpu":
        raise UsageError(
            "expected a budget on a CPU, got none; the search would fill this "
            "machine's memory. Give bytes, such as '8GiB'."
        )
    if budget is not None and isinstance(parse_budget(budget), float):
        raise UsageError(
            f"expected a budget in bytes, got a share, {budget!r}; the plain peak that "
            "it is a share of grows with the batch. Give bytes, such as '8GiB'."
        )
    return budget_bytes(budget, 0, device)


def check_slowdown(slowdown: float | None) -> None:
    """Raise unless a slowdown can be asked for.

    Raises:
        UsageError: It is less than 0.
    """
    if slowdown is not None and not slowdown >= 0:
        raise UsageError(
            f"expected slowdown of at least 0, got {slowdown!r}; 0.2 is 20 % longer."
        )


class _Sizes:
    """Measured sizes, and predictions for others.

    Attributes:
        graphs: The steps that were measured, by size.
        slowdown: The accepted slowdown; None: any.
    """

    def __init__(
        self,
        measure: Callable[[int], Graph],
        target_bytes: int,
        allow: frozenset[Action],
        slowdown: float | None,
    ) -> None:
        self.graphs: dict[int, Graph] = {}
        self._measure = measure
        self._target_bytes = target_bytes
        self._allow = allow
        self.slowdown = slowdown
        self._limit = slowdown
        self._known: dict[int, bool] = {}

    def leave_free(self, nbytes: int) -> None:
        """Leave these bytes free from now on, at least one."""
        self._target_bytes -= max(1, nbytes)
        self._known.clear()

    def expect_slowdown(self, size: int, found: float) -> None:
        """Expect of all sizes the error that a prediction of one size had."""
        assert self._limit is not None, "it was exceeded"
        predicted = max(self._slowdown_of(self._graph(size)) or 0.0, 1e-6)
        self._limit *= min(max(predicted / found, 0.5), 0.9)
        self._known.clear()

    def expect_ratio(self, size: int, found: float) -> None:
        """Expect that compiled blocks change the time of all sizes as of one."""
        assert self.slowdown is not None, "any slowdown is accepted"
        assert self._limit is not None, "any slowdown is accepted"
        predicted = self._slowdown_of(self._graph(size)) or 0.0
        limit = (1 + self.slowdown) * (1 + predicted) / (1 + found) - 1
        if found > self.slowdown:
            limit = min(limit, 0.9 * self._limit)
        self._limit = max(0.0, limit)
        self._known.clear()

    def is_accepted(self, size: int, found: float) -> bool:
        """Return whether a step with this slowdown is fast enough."""
        is_fast = self.slowdown is None or found <= self.slowdown
        return is_fast or self._fits_plain(size)

    def largest(self, limit: int, *, measure: bool = True) -> int:
        """Return the largest size that fits; 1 if none does.

        Args:
            limit: No larger size is returned.
            measure: Measure the sizes that were predicted to be the largest, and
                predict again, until no larger one is predicted to fit.
        """
        lowest, highest = 1, limit
        for size in _FIRST if measure and limit > 1 else ():
            if not self._measured_fits(min(size, limit)):
                highest = size - 1
                break
            lowest = min(size, limit)
        while lowest < highest:
            most = min(highest, _GROWTH * max(self.graphs))
            size = _last(lowest, most, self._fits)
            if size == lowest or not measure:
                return size
            if size in self.graphs or self._measured_fits(size):
                lowest = size
            else:
                highest = size - 1
        return lowest

    def largest_plain(self, limit: int) -> int:
        """Return the largest size up to a limit that fits as it is; 0 if none does."""
        return _last(
            0,
            limit,
            self._fits_plain,
        )

    def _fits_plain(self, size: int) -> bool:
        search = Search(self._graph(size), self._allow)
        return search.plain_bytes <= self._target_bytes

    def _measured_fits(self, size: int) -> bool:
        if size in self.graphs:
            return self._fits(size)
        try:
            self.graphs[size] = self._measure(size)
        except Exception as error:
            if not is_out_of_memory(error) or not self.graphs:
                raise
            return False
        self._known.clear()
        return self._fits(size)

    def _fits(self, size: int) -> bool:
        """Return whether a step of a size has a plan within bytes and slowdown."""
        if size not in self._known:
            found = self._slowdown_of(self._graph(size))
            self._known[size] = found is not None and (
                self._limit is None or found <= self._limit
            )
        return self._known[size]

    def _slowdown_of(self, graph: Graph) -> float | None:
        """Return how much longer a step takes within the bytes; None: no plan fits."""
        search = Search(graph, self._allow)
        if search.plain_bytes <= self._target_bytes:
            return 0.0
        until = time.perf_counter() + _PLANNING_SECONDS
        try:
            found = plan_with(search, self._target_bytes, until=until)
        except InfeasibleError:
            return None
        return found.seconds / search.plain_seconds - 1

    def _graph(self, size: int) -> Graph:
        """Return the step of a size, predicted from the nearest if it did not run."""
        if size in self.graphs:
            return self.graphs[size]
        nearest, *others = sorted(self.graphs, key=lambda known: abs(known - size))
        base = self.graphs[nearest]
        for known in others:
            share = (size - nearest) / (known - nearest)
            found = on_line(base, self.graphs[known], share)
            if found is not None:
                return found
        growth = Growth({_SIZE: nearest}, [each.bytes for each in base.storages])
        return resized(base, growth.predicted({_SIZE: size}))


def _last(lowest: int, highest: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, the lowest if no other does.

    Examples:
        >>> _last(1, 100, lambda number: number < 38)
        37
    """
    stride = 1
    low, high = lowest, highest
    while low < high and stride:
        size = min(low + stride, high)
        if fits(size):
            low, stride = size, 2 * stride
        else:
            high, stride = size - 1, 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
