"""fit with compile=: blocks captured by the compiler, partitioned for the budget.

Capture each kind of block, find sets of saved values on the Pareto front of bytes and
time, measure a step in which every block saves the least, choose a set for each block
by dynamic programming, compile and measure the choice, check it on a real step.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from recoup.backend.compiler.partitioning import Executor
from recoup.backend.compiler.suspension import written_path
from recoup.backend.memory.meters import is_out_of_memory
from recoup.backend.training.sharded_units import has_units_inside
from recoup.backend.training.sharing_processes import SharingProcesses
from recoup.core.compiled_plan import (
    BlockOption,
    BlockStep,
    CompiledPlan,
    CompiledStep,
)
from recoup.core.graph import Graph
from recoup.core.plan import Plan, plan_for_step
from recoup.core.units import print_bytes, print_seconds
from recoup.engine.applied.applied_plan import digest_of
from recoup.engine.applied.compiled_blocks import (
    CompiledBlocks,
    block_at,
)
from recoup.engine.applied.model_blocks import block_names, outer_names, repeated_names
from recoup.engine.applied.planned_runs import Cuts
from recoup.errors import InfeasibleError, UnsupportedError
from recoup.fitting.block_search import BlockSearch, PlainStep
from recoup.fitting.budgets import free_bytes
from recoup.fitting.closed_loop import Settled
from recoup.fitting.collected_findings import environment, resident_bytes
from recoup.fitting.decision import Infeasible
from recoup.fitting.fit_result import FitResult
from recoup.fitting.following.adaptation import Adapted
from recoup.fitting.following.optimizer_memory import forget_optimizers
from recoup.fitting.progress import Progress
from recoup.measurement.steps.gradient_difference import difference_from, gradients_of
from recoup.measurement.steps.training_step import TrainingStep, device_of
from recoup.measurement.timing.block_bench import BlockKinds, sample_calls
from recoup.measurement.timing.pace import pace_of
from recoup.measurement.tracing.observation import cut
from recoup.planners.block_choice import (
    mixtures,
    recomputed_bytes,
)
from recoup.report.compiled_view import BlockPeak, compose_compiled
from recoup.report.composition import Known
from recoup.report.findings import Findings
from recoup.report.texts import slower_words


@dataclass(repr=False, kw_only=True)
class CompiledFit(FitResult):
    """The result of `fit` with `compile=`: the plan and its costs.

    Attributes:
        plan: What each block saves.
        eager: Blocks that are not compiled, and why. Those in the plan recompute
            everything in a region; the others run as they were written.
        floor_bytes: The smallest budget that these blocks can meet, predicted.
        difference: The largest relative difference of a gradient to the eager step; 0
            is bitwise equality.
        noise: The same between two eager steps: kernels that are not deterministic.
        draws_otherwise: The compiled blocks draw other random numbers than the eager
            ones, as any model compiled by Inductor does; then `difference` says little.
        blocks: The predicted peaks while each block runs, and the bytes that it holds.
        outside_bytes: Those before the blocks, between their forward and backward, and
            after them.
    """

    plan: CompiledPlan
    eager: Mapping[str, str]
    floor_bytes: int
    difference: float
    noise: float
    draws_otherwise: bool
    blocks: tuple[BlockPeak, ...] = field(repr=False)
    outside_bytes: tuple[int, int, int] = field(repr=False)
    _loop: Adapted | None = field(default=None, repr=False)
    _applied: CompiledBlocks | None = field(default=None, repr=False)

    def apply(self) -> nn.Module:
        """Put the plan on the model, again after `remove`; return the model."""
        if self._applied is None:
            loop = self._loop
            plan = self.plan if loop is None else replace(self.plan, rest=None)
            self._applied = CompiledBlocks(self.model, plan)
            if loop is not None:
                loop.put_on(self.model)
        return self.model

    def remove(self) -> nn.Module:
        """Give the blocks their own forwards again; return the model."""
        if self._applied is not None:
            self._applied.remove()
            self._applied = None
            forget_optimizers(self.model)
            if self._loop is not None:
                self._loop.remove()
        return self.model

    def numbers(self) -> dict[str, Any]:
        """Return the costs as plain data, for other programs."""
        return {
            **super().numbers(),
            "difference": self.difference,
            "noise": self.noise,
            "executor": self.plan.executor,
            "compiled": [block.module for block in self.plan.blocks if block.digest],
            "eager": dict(self.eager),
        }

    def findings(self, *, title: str = "", points: int = 0) -> Findings:
        """Return all that was found; of compiled blocks one plan is known."""
        del points
        peak = (
            f"measured on a real step: {self.measured_peak_bytes} B, budget "
            f"{self.budget_bytes} B"
        )
        return compose_compiled(
            self.graph,
            self.plan,
            self.blocks,
            self.outside_bytes,
            Known(
                title=title or type(self.model).__name__,
                budget_bytes=self.budget_bytes,
                floor_bytes=self.floor_bytes,
                plain_seconds=self.plain_seconds,
                measured_peak_bytes=self.measured_peak_bytes,
                measured_seconds=self.measured_seconds,
                resident=resident_bytes(self.model),
                reserved_bytes=self.reserved_bytes,
                environment=environment(device_of(self.model)),
                checks=(
                    ("peak memory", peak),
                    ("gradients", self._gradients()),
                    *((f"{n} is not compiled", why) for n, why in self.eager.items()),
                ),
            ),
        )

    def __repr__(self) -> str:
        slower = slower_words(self.measured_seconds, self.plain_seconds)
        compiled = sum(1 for block in self.plan.blocks if block.digest)
        return (
            f"{self._memory(self.measured_peak_bytes)}\n"
            f"  step {print_seconds(self.measured_seconds)} measured, {slower} against "
            "the plain step\n"
            f"  {compiled} blocks compiled ({self.plan.executor}), {len(self.eager)} "
            f"not; gradients {self._gradients()}\n"
            "  .write_page(path), .plan, .remove()"
        )

    def __str__(self) -> str:
        share = self.measured_seconds / self.plain_seconds - 1
        compiled = sum(1 for block in self.plan.blocks if block.digest)
        return (
            f"budget {print_bytes(self.budget_bytes)}: measured peak "
            f"{print_bytes(self.measured_peak_bytes)} (predicted "
            f"{print_bytes(self.predicted_peak_bytes)}, plain "
            f"{print_bytes(self.plain_peak_bytes)}); step "
            f"{print_seconds(self.measured_seconds)}, {share:+.1%} against the plain "
            f"step; {compiled} blocks compiled ({self.plan.executor}), "
            f"{len(self.eager)} not; gradients {self._gradients()}{self._compared()}"
        )

    def _gradients(self) -> str:
        if not self.difference:
            return "bitwise those of the eager step"
        if self.draws_otherwise:
            return "those of the compiled model, which draws other random numbers"
        text = f"within {self.difference:.1e} of the eager step"
        if self.noise:
            text += f" (two eager steps differ by {self.noise:.1e})"
        return text


def fit_compiled(  # noqa: PLR0913 (which part of a step is compiled)
    step: TrainingStep,
    asked: int,
    *,
    executor: Executor,
    plain: PlainStep,
    blocks: Sequence[str] | None = None,
    tell: Progress,
    rest: Plan | None = None,
) -> CompiledFit:
    """Find partitions of a step's blocks that fit the budget; see `fit`.

    The result is not applied yet, because `untouched` restores everything. Call its
    `apply` afterwards, which compiles nothing again.

    Raises:
        InfeasibleError: No choice of partitions fits.
        UnsupportedError: No block of the model can be captured.
    """
    started = time.perf_counter()
    model = step.model
    found = _blocks_at(model, blocks or best_names(model, plain.graph))
    search = BlockSearch(step, executor, tell, plain, rest)
    gather = search.sharing.gather
    reserved = plain.reserved_bytes
    loop: Adapted | None = None
    try:
        tell("running the eager step at the least memory")
        with cut(step, Cuts(tuple(found))):
            expected = gradients_of(step)
            noise = max(gather(difference_from(expected, step)))
            calls = _calls_of(step, found)
        tell("timing the plain step")
        plain_seconds = _plain_seconds(step, plain, search.sharing)
        search.capture(calls, found)
        del calls  # its tensors would count in the peaks that follow
        reference = search.reference()
        choice = search.settle(reference, asked - reserved)
        if isinstance(choice, Infeasible):
            raise _infeasible(asked, choice.needed_bytes + reserved)
        options = search.options_of(reference, choice)
        measured_bytes = search.measured_bytes + reserved
        plan = search.plan_of(dict(zip(search.order, choice, strict=True)))
        loop = search.watched(plan, plain, asked - reserved)
        seconds = gather(pace_of(step).seconds)[0]
        difference = max(gather(difference_from(expected, step)))
    finally:
        search.take_off()
        if loop is not None:
            loop.finish_measuring()
            loop.remove()
    peak_bytes = reference.peak_bytes(options) + reserved
    predicted_seconds = reference.total_seconds(options)
    return CompiledFit(
        model=model,
        plan=replace(
            plan,
            budget_bytes=asked,
            peak_bytes=peak_bytes,
            seconds=predicted_seconds,
        ),
        eager=search.eager,
        budget_bytes=asked,
        plain_peak_bytes=plain.peak_bytes,
        plain_seconds=plain_seconds,
        predicted_peak_bytes=peak_bytes,
        predicted_seconds=predicted_seconds,
        measured_peak_bytes=measured_bytes,
        measured_seconds=seconds,
        floor_bytes=search.floor_bytes(reference) + reserved,
        reserved_bytes=reserved,
        difference=difference,
        noise=noise,
        draws_otherwise=search.draws and executor == "inductor",
        total_seconds=time.perf_counter() - started,
        rounds=search.rounds,
        graph=plain.graph,
        blocks=_block_peaks(search.order, reference, options),
        outside_bytes=(
            reference.outside_bytes[0],
            reference.outside_bytes[-1] + _added_bytes(reference, options),
            reference.outside_bytes[0],
        ),
        _loop=loop,
    )


def _plain_seconds(
    step: TrainingStep, plain: PlainStep, sharing: SharingProcesses
) -> float:
    """Return the time of the plain step: measured, if there is memory for it now.

    Not measured where several processes share an accelerator's model: one that ran out
    of memory would leave the others waiting.
    """
    free = sharing.gather(free_bytes(step.device))
    may_fail = len(free) > 1 and step.device.type != "cpu"
    if may_fail or plain.peak_bytes > min(free):
        return plain.seconds
    try:
        return sharing.gather(pace_of(step).seconds)[0]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return plain.seconds
    finally:
        step.begin()
        if step.device.type != "cpu":
            torch.accelerator.empty_cache()  # others may need what it took


def compiled_frontier(
    step: TrainingStep, *, executor: Executor, graph: Graph, points: int
) -> tuple[CompiledPlan, ...]:
    """Return plans of compiled blocks from the smallest peak to the fastest.

    Peaks and times are predicted; one option of each kind of block is compiled.
    """
    with _captured(step, executor, graph, None) as search:
        return search.frontier(search.reference(), points)


def compiled_step(
    step: TrainingStep,
    *,
    executor: Executor,
    graph: Graph,
    blocks: Sequence[str] | None = None,
) -> CompiledStep:
    """Measure the step with compiled blocks: at its smallest, and at its fastest.

    Raises:
        InfeasibleError: The device has too little memory for any choice.
    """
    with _captured(step, executor, graph, blocks) as search:
        reference = search.reference()
        least = search.settle(reference, 0)
        assert isinstance(least, Infeasible), "no step takes no memory"
        gather = search.sharing.gather
        free = min(gather(free_bytes(step.device)))
        choice = search.settle(reference, free)
        if isinstance(choice, Infeasible):
            raise _infeasible(free, choice.needed_bytes)
        return CompiledStep(
            executor=executor,
            graph=graph,
            peak_bytes=search.measured_bytes,
            seconds=gather(pace_of(step).seconds)[0],
            floor_bytes=least.needed_bytes,
            kinds=search.captured_kinds(),
            eager=search.eager,
        )


@contextmanager
def _captured(
    step: TrainingStep, executor: Executor, graph: Graph, blocks: Sequence[str] | None
) -> Generator[BlockSearch]:
    """Capture the blocks of a step without a budget; take all off at the end."""
    model = step.model
    search = BlockSearch(step, executor, lambda _: None, PlainStep(0, 0.0, graph), None)
    names = search.sharing.gather(blocks or best_names(model, graph))[0]
    found = _blocks_at(model, names)
    try:
        with cut(step, Cuts(tuple(found))):
            calls = _calls_of(step, found)
        search.capture(calls, found)
        del calls  # its tensors would count in the peaks that follow
        yield search
    finally:
        search.take_off()


def _calls_of(step: TrainingStep, blocks: Mapping[str, nn.Module]) -> BlockKinds:
    """Return `sample_calls` of the blocks; those with units inside are refused."""
    inner = {name for name, block in blocks.items() if has_units_inside(block)}
    whole = {name: block for name, block in blocks.items() if name not in inner}
    found = sample_calls(step, whole)
    why = "fully_shard gathers parts of it by themselves"
    return replace(found, refused={**found.refused, **dict.fromkeys(inner, why)})


def _blocks_at(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    written = [written_path(model, name) for name in names]
    return {name: block_at(model, name) for name in written}


def fit_with_regions(
    settled: Settled, fitted: Callable[..., CompiledFit], model: nn.Module, graph: Graph
) -> CompiledFit | None:
    """Find compiled blocks that fit together with parts of a plan without a compiler.

    Args:
        settled: The plan without a compiler, which fits; it is not active.
        fitted: `fit_compiled` of the step, but for the blocks and the rest.
        model: The model.
        graph: The step.

    Returns:
        The fit; None: there are none.
    """
    names = best_names(model, graph)
    for plans, compiled in mixtures(graph, settled.attempt.solution.plans, names):
        rest = plan_for_step(graph, plans, model=digest_of(model))
        try:
            return fitted(blocks=compiled, rest=rest)
        except (InfeasibleError, UnsupportedError):
            continue
    return None


def best_names(model: nn.Module, graph: Graph) -> tuple[str, ...]:
    """Return the blocks to compile: those that leave the least to hold.

    Of blocks in blocks, as the convolutions of a residual block, larger ones hold less
    between them, and more while one of them is recomputed.
    """
    levels = [repeated_names(model, block_names(model))]
    while (outer := outer_names(model, levels[-1])) != levels[-1]:
        levels.append(outer)
    return min(levels, key=lambda names: recomputed_bytes(graph, names))


def _added_bytes(step: BlockStep, options: Sequence[BlockOption]) -> int:
    pairs = zip(step.frames, options, strict=True)
    return sum(frame.added_bytes(option) for frame, option in pairs)


def _block_peaks(
    names: Sequence[str], step: BlockStep, options: Sequence[BlockOption]
) -> tuple[BlockPeak, ...]:
    """Return the predicted peak of the step while each block runs."""
    found: list[BlockPeak] = []
    added = 0
    for name, frame, option in zip(names, step.frames, options, strict=True):
        forward = frame.forward_bytes(option) + added
        added += frame.added_bytes(option)
        backward = frame.backward_bytes(option) + added
        found.append(BlockPeak(name, forward, backward, option.held_bytes))
    return tuple(found)


def _infeasible(asked: int, floor: int) -> InfeasibleError:
    reason = f"the smallest partitions of all blocks need {print_bytes(floor)}."
    advice = "or a smaller batch."
    return InfeasibleError(
        f"a budget of {print_bytes(asked)} cannot be met with compiled blocks: "
        f"{reason} Give it {floor} bytes, {advice}",
        advice=advice,
        budget_bytes=asked,
        floor_bytes=floor,
        reason=reason,
    )
