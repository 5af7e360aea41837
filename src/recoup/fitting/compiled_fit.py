"""fit with compile=: blocks captured by the compiler, partitioned for the budget.

Capture each kind of block, find sets of saved values on the Pareto front of bytes and
time, measure a step in which every block saves the least, choose a set for each block
by dynamic programming, compile and measure what was chosen, check it on a real step.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from recoup.backend.compiler.joint_graphs import JointGraph
from recoup.backend.compiler.partitioning import Executor, saved_bytes
from recoup.backend.compiler.recognition import is_sharded
from recoup.backend.compiler.suspension import written_path
from recoup.core.compiled_plan import (
    BlockOption,
    BlockPartition,
    BlockStep,
    CompiledPlan,
    SavedSet,
)
from recoup.core.graph import Graph
from recoup.core.plan import Plan, plan_for_step
from recoup.core.units import print_bytes, print_seconds
from recoup.engine.applied.applied_plan import digest_of
from recoup.engine.applied.compiled_blocks import (
    CompiledBlocks,
    CompiledForward,
    block_at,
    probe,
)
from recoup.engine.applied.model_blocks import block_names, outer_names, repeated_names
from recoup.engine.applied.offloaded_saves import HOST
from recoup.engine.applied.planned_runs import Cuts
from recoup.errors import InfeasibleError, UnsupportedError
from recoup.fitting.closed_loop import Settled
from recoup.fitting.collected_findings import environment, resident_bytes
from recoup.fitting.decision import Infeasible, settle
from recoup.fitting.fit_result import FitResult
from recoup.fitting.following.adaptation import Adapted, watched_loop
from recoup.fitting.progress import Progress
from recoup.measurement.steps.training_step import TrainingStep, device_of
from recoup.measurement.timing.block_bench import (
    BlockBench,
    BlockKinds,
    Forward,
    KernelTimes,
    costed,
    sample_calls,
)
from recoup.measurement.timing.block_frames import (
    StepMarks,
    block_step,
    gradients_of,
    largest_difference,
    run_marked,
)
from recoup.measurement.timing.pace import pace_of
from recoup.measurement.tracing.observation import cut
from recoup.planners.block_choice import (
    choose_options,
    least_peak,
    mixtures,
    offloaded,
    recomputed_bytes,
    saved_sets,
)
from recoup.report.compiled_view import BlockPeak, compose_compiled
from recoup.report.composition import Known
from recoup.report.findings import Findings
from recoup.report.texts import slower_words

_BENCH_ROUNDS = 5


@dataclass(repr=False, kw_only=True)
class CompiledFit(FitResult):
    """What `fit` with `compile=` did to a model, and what it costs.

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
        blocks: The predicted peaks while each block runs, and what it holds.
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
            if self._loop is not None:
                self._loop.remove()
        return self.model

    def numbers(self) -> dict[str, Any]:
        """Return what it costs as plain data, for other programs."""
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


@dataclass
class _Kind:
    """Blocks that are alike, and the options for them.

    Args:
        number: Its number.
        block: One of them.
        bench: Measures options on it.
        executor: Who runs captured graphs.
        partitions: For each option what it saves; None: run the block as written.
        sets: The saved sets of the first options, from the fastest to the smallest.
        moves: Bytes of each of these that can be on the host instead: as many further
            options. Empty: none are to be.
        link_bytes_per_second: How fast they get there.

    Attributes:
        options: What is known of each option.
    """

    number: int
    block: nn.Module
    bench: BlockBench
    executor: Executor
    partitions: list[BlockPartition | None]
    sets: Sequence[SavedSet] = ()
    moves: Sequence[int] = ()
    link_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        first = self.partitions[: len(self.moves)]
        self.partitions += [p and replace(p, offloads=True) for p in first]
        self.options = [_UNKNOWN] * len(self.partitions)

    def measure(self, option: int) -> None:
        """Compile and measure an option; predict the others anew."""
        count = len(self.sets)
        option -= count if count <= option < count + len(self.moves) else 0
        self.options[option] = self._measured(option)
        for number, found in enumerate(self.options[:count]):
            if not found.is_measured:
                self.options[number] = self._predicted(number)
        link = self.link_bytes_per_second
        for number, moved in enumerate(self.moves):
            self.options[count + number] = offloaded(self.options[number], moved, link)

    def add_region(self) -> None:
        """Add and measure one more option: a region recomputes all of the block."""
        if all(partition is None or partition.digest for partition in self.partitions):
            # The reference stays the last of the sets: it has been measured.
            self.partitions.append(_region(self.number))
            self.options.append(self._measured(len(self.options)))

    def _predicted(self, option: int) -> BlockOption:
        """Return an option predicted from the next smaller one that is measured.

        If a larger one is measured too, the time lies between both: without that, one
        option after the other would be compiled because the last one was slower than
        predicted.
        """
        known = (n for n in range(option + 1, len(self.sets)))
        below = next(n for n in known if self.options[n].is_measured)
        mine, other, found = self.sets[option], self.sets[below], self.options[below]
        backward_bytes = mine.backward_bytes - other.backward_bytes
        seconds = mine.seconds - other.seconds
        above = [n for n in range(option) if self.options[n].is_measured]
        if above:
            modelled = self.sets[above[-1]].seconds - other.seconds
            measured = self.options[above[-1]].seconds - found.seconds
            seconds *= measured / modelled if modelled else 0.0
        return BlockOption(
            held_bytes=found.held_bytes + mine.held_bytes - other.held_bytes,
            saves_output=found.saves_output,
            forward_bytes=found.forward_bytes
            + mine.forward_bytes
            - other.forward_bytes,
            backward_bytes=max(found.backward_bytes + backward_bytes, 0),
            seconds=found.seconds + seconds,
            is_measured=False,
        )

    def _measured(self, option: int) -> BlockOption:
        partition = self.partitions[option]
        forward: Forward = self.block.forward
        if partition is not None:
            forward = CompiledForward(self.block, partition, self.executor)
        self.bench.unpark()
        try:
            measured = self.bench.measure(forward)
            (seconds,) = self.bench.seconds([forward], rounds=_BENCH_ROUNDS)
        finally:
            self.bench.park()
        return replace(measured, seconds=seconds)


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The eager step without recoup, and what is in memory besides it.

    Attributes:
        peak_bytes: Its predicted peak.
        seconds: Its predicted time.
        graph: The step, as it was measured.
        resident: What else is in memory, as an optimizer's state.
        reserved_bytes: Kept free for optimizer state that does not exist yet.
        link_bytes_per_second: How fast values get to the host; 0: they stay.
    """

    peak_bytes: int
    seconds: float
    graph: Graph
    resident: Sequence[object] = ()
    reserved_bytes: int = 0
    link_bytes_per_second: float = 0.0


class _Search:
    """One fit: what is known of the step, and the plan that is active."""

    def __init__(
        self,
        step: TrainingStep,
        executor: Executor,
        tell: Progress,
        plain: PlainStep,
        rest: Plan | None,
    ) -> None:
        self._step = step
        self._executor: Executor = executor
        self._tell = tell
        self._plain = plain
        self._resident = plain.resident
        self._rest = rest
        self.applied: CompiledBlocks | None = None
        self.kinds: list[_Kind] = []
        self.kind_of: dict[str, int] = {}
        self.eager: dict[str, str] = {}
        self.draws = False
        self.order: tuple[str, ...] = ()
        self.rounds = 0
        self.marks: StepMarks | None = None

    def capture(self, found: BlockKinds, blocks: Mapping[str, nn.Module]) -> None:
        """Find the options of each kind of block."""
        self.eager = dict(found.refused)
        self.kind_of = dict(found.kinds)
        times = KernelTimes(self._step.device)
        for number, (name, call) in enumerate(found.samples):
            self._tell(f"capturing {name}")
            block = blocks[name]
            sets: Sequence[SavedSet] = ()
            moves: Sequence[int] = ()
            link = self._plain.link_bytes_per_second
            partitions: list[BlockPartition | None] = [None, _region(number)]
            try:
                joint = call.run(partial(probe, block, self._executor))
            except UnsupportedError as error:
                alike = (n for n, kind in found.kinds.items() if kind == number)
                self.eager.update(dict.fromkeys(alike, str(error)))
            else:
                self.draws = self.draws or joint.draws
                sets = [
                    replace(found, forward_bytes=forward, backward_bytes=backward)
                    for found in saved_sets(costed(joint, times))
                    for forward, backward in (joint.peaks(found.names),)
                ]
                partitions = [_partition(number, joint, s.names) for s in sets]
                if link:
                    least = HOST.smallest_bytes
                    moves = [saved_bytes(joint, s.names, least=least) for s in sets]
                self._tell(f"compiling {type(block).__name__}")
            bench = BlockBench(block, call, self._step.device)
            kind = _Kind(
                number, block, bench, self._executor, partitions, sets, moves, link
            )
            for option in (len(sets) - 1,) if sets else (0, 1):
                kind.measure(option)
            self.kinds.append(kind)
        if not any(p and p.digest for kind in self.kinds for p in kind.partitions):
            first = [f"{name}: {why}" for name, why in list(self.eager.items())[:2]]
            raise UnsupportedError(
                f"no block of this {type(self._step.model).__name__} can be compiled "
                f"({'; '.join(first)}). Use compile=False."
            )

    def reference(self) -> BlockStep:
        """Measure a step in which every block holds as little as it can."""
        references = [max(len(kind.sets), 2) - 1 for kind in self.kinds]
        self.apply(self.plan_of({n: references[k] for n, k in self.kind_of.items()}))
        self._tell("measuring the compiled step at the least memory")
        for _ in range(2):
            self._step.begin()
            self._step.run()
        marks = run_marked(self._step, self._blocks(), resident=self._resident)
        self.order = marks.names
        chosen = zip(self.kinds, references, strict=True)
        options = [kind.options[number] for kind, number in chosen]
        seconds = pace_of(self._step).seconds
        return block_step(marks, self.kind_of, options, seconds)

    def settle(self, step: BlockStep, budget_left: int) -> tuple[int, ...] | Infeasible:
        """Choose, compile what was chosen, check it on a real step, correct."""
        last: tuple[int, ...] | None = None

        def attempt(
            target: int | None,
        ) -> tuple[int | None, int | None, tuple[int, ...]]:
            nonlocal last
            known = None if target is None else last
            last = self._choose(step, target)
            if last is None:
                return None, None, ()
            predicted = step.peak_bytes(self.options_of(step, last))
            if last == known:
                return predicted, None, last
            self.apply(self.plan_of(dict(zip(self.order, last, strict=True))))
            self._tell("checking the choice on a real step")
            self._step.begin()
            self._step.run()
            marks = run_marked(self._step, self._blocks(), resident=self._resident)
            self.rounds += 1
            self.marks = marks
            return predicted, marks.peak_bytes, last

        return settle(attempt, budget_left)

    def options_of(self, step: BlockStep, choice: Sequence[int]) -> list[BlockOption]:
        """Return the chosen option of each block."""
        return [
            self.kinds[frame.kind].options[option]
            for frame, option in zip(step.frames, choice, strict=True)
        ]

    def plan_of(self, choice: Mapping[str, int]) -> CompiledPlan:
        """Return the plan with an option for each block, and for the rest."""
        blocks: list[BlockPartition] = []
        for name, option in choice.items():
            kind = self.kinds[self.kind_of[name]]
            partition = kind.partitions[option]
            if partition is not None:
                held_bytes = kind.options[option].held_bytes
                blocks.append(replace(partition, module=name, held_bytes=held_bytes))
        return CompiledPlan(
            self._executor,
            tuple(blocks),
            model=digest_of(self._step.model),
            rest=self._rest,
        )

    def floor_bytes(self, step: BlockStep) -> int:
        """Return the predicted peak of the smallest choice of measured options."""
        known = [[o for o in kind.options if o.is_measured] for kind in self.kinds]
        pairs = zip(step.frames, least_peak(step, known), strict=True)
        return step.peak_bytes([known[frame.kind][n] for frame, n in pairs])

    def frontier(self, step: BlockStep, points: int) -> tuple[CompiledPlan, ...]:
        """Return plans from the smallest peak to the fastest, by known options."""
        options = [kind.options for kind in self.kinds]
        least = least_peak(step, options)
        lowest = step.peak_bytes(self.options_of(step, least))
        fastest = choose_options(step, options, sys.maxsize)
        assert fastest is not None, "there is no budget"
        highest = step.peak_bytes(self.options_of(step, fastest))
        found: list[CompiledPlan] = []
        for number in range(points):
            target = lowest + (highest - lowest) * number // max(points - 1, 1)
            choice = choose_options(step, options, target) or least
            chosen = self.options_of(step, choice)
            seconds = step.total_seconds(chosen)
            if not found or seconds < found[-1].seconds:
                plan = self.plan_of(dict(zip(self.order, choice, strict=True)))
                peak = step.peak_bytes(chosen)
                found.append(replace(plan, peak_bytes=peak, seconds=seconds))
        return tuple(found)

    def watched(
        self, plan: CompiledPlan, plain: PlainStep, budget_left: int
    ) -> Adapted | None:
        """Return what watches the training loop, and applies the rest of the plan."""
        reserved = plain.reserved_bytes
        self.apply(replace(plan, rest=None))
        model, rest = self._step.model, plan.rest
        loop = watched_loop(model, self.marks, plain.graph, budget_left, reserved, rest)
        if loop is None:
            self.apply(plan)
        return loop

    def take_off(self) -> None:
        """Give the blocks their own forwards again."""
        if self.applied is not None:
            self.applied.remove()
            self.applied = None

    def _choose(self, step: BlockStep, target: int | None) -> tuple[int, ...] | None:
        """Choose until every chosen option is measured, not only predicted.

        Args:
            step: The step.
            target: The peak to plan for; None: the smallest there is.
        """
        while True:
            options = [kind.options for kind in self.kinds]
            choice = target and choose_options(step, options, target)
            if not choice:
                for kind in self.kinds:
                    kind.add_region()
                choice = target and choose_options(step, options, target)
            if target is None:
                choice = least_peak(step, options)
            if not choice:
                return None
            missing = {
                (frame.kind, option)
                for frame, option in zip(step.frames, choice, strict=True)
                if not options[frame.kind][option].is_measured
            }
            if not missing:
                return choice
            for number, option in sorted(missing):
                kind = self.kinds[number]
                self._tell(f"compiling {type(kind.block).__name__}")
                kind.measure(option)

    def apply(self, plan: CompiledPlan) -> None:
        """Apply a plan in place of the one that is active."""
        self.take_off()
        self.applied = CompiledBlocks(self._step.model, plan)

    def _blocks(self) -> dict[str, nn.Module]:
        return {n: self._step.model.get_submodule(n) for n in self.kind_of}


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

    The result is not applied yet: what runs inside `untouched` leaves no trace. Call
    its `apply` afterwards; what was compiled is not compiled again.

    Raises:
        InfeasibleError: No choice of partitions fits.
        UnsupportedError: No block of the model can be captured, or it is sharded.
    """
    started = time.perf_counter()
    model = step.model
    _refuse_sharded(model, executor)
    found = _blocks_at(model, blocks or best_names(model, plain.graph))
    search = _Search(step, executor, tell, plain, rest)
    reserved = plain.reserved_bytes
    loop: Adapted | None = None
    try:
        tell("running the eager step at the least memory")
        with cut(step, Cuts(tuple(found))):
            expected = gradients_of(step)
            noise = largest_difference(gradients_of(step), expected)
            calls = sample_calls(step, found)
        search.capture(calls, found)
        del calls  # its tensors would count in the peaks that follow
        reference = search.reference()
        choice = search.settle(reference, asked - reserved)
        if isinstance(choice, Infeasible):
            raise _infeasible(asked, choice.needed_bytes + reserved)
        options = search.options_of(reference, choice)
        assert search.marks is not None, "the accepted choice ran"
        measured_bytes = search.marks.peak_bytes + reserved
        plan = search.plan_of(dict(zip(search.order, choice, strict=True)))
        loop = search.watched(plan, plain, asked - reserved)
        seconds = pace_of(step).seconds
        difference = largest_difference(gradients_of(step), expected)
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
        plain_seconds=plain.seconds,
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


def compiled_frontier(
    step: TrainingStep, *, executor: Executor, graph: Graph, points: int
) -> tuple[CompiledPlan, ...]:
    """Return plans of compiled blocks from the smallest peak to the fastest.

    Peaks and times are predicted; one option of each kind of block is compiled.
    """
    model = step.model
    _refuse_sharded(model, executor)
    found = _blocks_at(model, best_names(model, graph))
    search = _Search(step, executor, lambda _: None, PlainStep(0, 0.0, graph), None)
    try:
        with cut(step, Cuts(tuple(found))):
            calls = sample_calls(step, found)
        search.capture(calls, found)
        del calls
        return search.frontier(search.reference(), points)
    finally:
        search.take_off()


def _refuse_sharded(model: nn.Module, executor: Executor) -> None:
    if any(is_sharded(type(module)) for module in model.modules()):
        raise UnsupportedError(
            f"compile={executor!r} needs whole parameters, got a "
            f"{type(model).__name__} that fully_shard has sharded: its blocks are "
            "captured without the hooks that gather them. Use compile=False, or "
            "DistributedDataParallel."
        )


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


_UNKNOWN = BlockOption(0, False, 0, 0, 0.0, is_measured=False)


def _partition(kind: int, joint: JointGraph, saves: tuple[str, ...]) -> BlockPartition:
    nbytes = saved_bytes(joint, saves)
    return BlockPartition("", kind, joint.digest, saves, nbytes, 0)


def _region(kind: int) -> BlockPartition:
    return BlockPartition("", kind, "", (), 0, 0)
