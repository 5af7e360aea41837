"""The search for what compiled blocks save: options per kind, a choice for all."""

import functools
import sys
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from recoup.backend.compiler.joint_graphs import JointGraph
from recoup.backend.compiler.partitioning import Executor, saved_bytes
from recoup.backend.compiler.stored_numbers import StoredNumbers, stored_for
from recoup.backend.training.sharded_units import (
    gathered,
    unit_of,
)
from recoup.backend.training.sharing_processes import SharingProcesses
from recoup.core.compiled_plan import (
    BlockFrame,
    BlockOption,
    BlockPartition,
    BlockStep,
    CompiledPlan,
    MeasuredKind,
    SavedSet,
)
from recoup.core.graph import Graph
from recoup.core.plan import Plan
from recoup.engine.applied.applied_plan import digest_of
from recoup.engine.applied.compiled_blocks import (
    CompiledBlocks,
    CompiledForward,
    probe,
)
from recoup.engine.applied.offloaded_saves import HOST
from recoup.errors import UnsupportedError
from recoup.fitting.decision import Infeasible, settle
from recoup.fitting.following.adaptation import Adapted, watched_loop
from recoup.fitting.progress import Progress
from recoup.measurement.steps.training_step import TrainingStep
from recoup.measurement.timing.block_bench import (
    BlockBench,
    BlockKinds,
    Forward,
    KernelTimes,
    SampleCall,
    costed,
)
from recoup.measurement.timing.block_frames import (
    StepMarks,
    block_step,
    run_marked,
)
from recoup.measurement.timing.pace import pace_of
from recoup.planners.block_choice import (
    KindOption,
    choose_options,
    compiled_first,
    least_peak,
    offloaded,
    saved_sets,
    worth_measuring,
)

_BENCH_ROUNDS = 5

_ENOUGH = 4
"""The most options of a kind of block to compile for speed: the smallest, two
neighbours that fill the budget, and a replacement for a mispredicted one."""

_REGION = BlockPartition("", 0, "", (), 0, 0)
"""Runs a block in a region that recomputes all of it."""

_UNKNOWN = BlockOption(0, False, 0, 0, 0.0, is_measured=False)


@dataclass
class BlockKind:
    """Equal blocks and their options.

    Args:
        number: The number of the kind.
        block: One of the blocks.
        bench: The bench that measures options on it.
        executor: The executor of captured graphs.
        partitions: The partition of each option; None runs the block uncompiled.
        stored: What is known about options.
        sharing: The processes that measure the same.
        unit: The unit that gathers the block's parameters; None: they are whole.
        likeness: What options of equal time share; empty: unknown.
        sets: The saved sets of the first options, from fastest to smallest.
        moves: The bytes of each of these that can be offloaded, which adds as many
            options; empty without offloading.
        link_bytes_per_second: The bandwidth to the host.

    Attributes:
        options: The measured or predicted costs of each option.
        compiled: The number of compiled options.
        is_varied: Whether its blocks share no compiled code, since they differ in
            numbers: each option is compiled for each block that uses it.
    """

    number: int
    block: nn.Module
    bench: BlockBench
    executor: Executor
    partitions: list[BlockPartition | None]
    stored: StoredNumbers
    sharing: SharingProcesses
    unit: nn.Module | None = None
    likeness: str = ""
    sets: Sequence[SavedSet] = ()
    moves: Sequence[int] = ()
    link_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        first = self.partitions[: len(self.moves)]
        self.partitions += [p and replace(p, offloads=True) for p in first]
        self.options = [_UNKNOWN] * len(self.partitions)
        self.compiled = 0
        self.is_varied = False

    @property
    def reference(self) -> int:
        """The option of the reference step, which holds almost nothing."""
        if self.is_varied or not self.sets:
            return self._region
        return compiled_first(self.sets)

    @property
    def _region(self) -> int:
        regions = (n for n, p in enumerate(self.partitions) if p and not p.digest)
        return next(regions)

    def measure_first(self) -> None:
        """Measure the reference, or all options if nothing can be compiled."""
        for option in (compiled_first(self.sets),) if self.sets else (0, 1):
            self.measure(option)
        if self.is_varied:
            self.add_region()

    def measure(self, option: int) -> None:
        """Compile and measure an option; update the predictions of the others."""
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
        """Add and measure an option that recomputes the whole block in a region."""
        if all(partition is None or partition.digest for partition in self.partitions):
            self.partitions.append(_REGION)
            self.options.append(self._measured(len(self.options)))

    def _predicted(self, option: int) -> BlockOption:
        """Predict an option from the next smaller measured one, or else a larger one.

        If options on both sides are measured, the time is interpolated: otherwise
        options would be compiled one by one, each because the last one was slower than
        predicted.
        """
        known = [n for n in range(len(self.sets)) if self.options[n].is_measured]
        above = [n for n in known if n < option]
        below = next((n for n in known if n > option), known[-1])
        mine, other, found = self.sets[option], self.sets[below], self.options[below]
        backward_bytes = mine.backward_bytes - other.backward_bytes
        seconds = mine.seconds - other.seconds
        if above and above[-1] != below:
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
            self.compiled += bool(partition.digest)
        self.bench.unpark()
        try:
            with gathered(self.unit, self.block):
                measured = self.bench.measure(forward)
                seconds = self._seconds(partition, forward)
        finally:
            self.bench.park()
        return _agreed(self.sharing.gather(replace(measured, seconds=seconds)))

    def _seconds(self, partition: BlockPartition | None, forward: Forward) -> float:
        def measured() -> float:
            (seconds,) = self.bench.seconds([forward], rounds=_BENCH_ROUNDS)
            return seconds

        if partition is None or not self.likeness:
            return measured()
        names = partition.saves if partition.digest else "region"
        key = f"{type(self.block).__qualname__} {self.executor} {names} {self.likeness}"
        return self.stored.number(key, measured)


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The eager step without recoup, and other resident memory.

    Attributes:
        peak_bytes: Its predicted peak.
        seconds: Its predicted time.
        graph: The measured step.
        resident: Other objects in memory, such as an optimizer's state.
        reserved_bytes: Bytes reserved for optimizer state that does not exist yet.
        link_bytes_per_second: The bandwidth to the host; 0: no offloading.
    """

    peak_bytes: int
    seconds: float
    graph: Graph
    resident: Sequence[object] = ()
    reserved_bytes: int = 0
    link_bytes_per_second: float = 0.0


class BlockSearch:
    """The state of one fit: knowledge of the step, and the active plan.

    Processes that share the model's parameters search in lock step: they decide by the
    same numbers, so that they gather the same blocks and run the same steps. Bytes are
    the largest of any process, times and saved sets those of the first one.

    Attributes:
        measured_bytes: The largest peak of the last step, in any process.
    """

    def __init__(
        self,
        step: TrainingStep,
        executor: Executor,
        tell: Progress,
        plain: PlainStep,
        rest: Plan | None,
    ) -> None:
        self._step = step
        self.sharing = SharingProcesses(step.model)
        self.measured_bytes = 0
        self._executor: Executor = executor
        self._tell = tell
        self._plain = plain
        self._resident = plain.resident
        self._rest = rest
        self.applied: CompiledBlocks | None = None
        self.kinds: list[BlockKind] = []
        self.kind_of: dict[str, int] = {}
        self._code_of: dict[str, int] = {}
        self._stored = stored_for(step.device, executor)
        self._kernels = KernelTimes(step.device, self._stored)
        self.eager: dict[str, str] = {}
        self.draws = False
        self.order: tuple[str, ...] = ()
        self.rounds = 0
        self.marks: StepMarks | None = None

    def capture(self, found: BlockKinds, blocks: Mapping[str, nn.Module]) -> None:
        """Find the options of each kind of block, and measure the first of them.

        Blocks that differ in numbers only are one kind, with code for each.
        """
        self.eager = dict(found.refused)
        self._code_of = dict(found.kinds)
        kind_of_code: list[int] = []
        alike: dict[Hashable, int] = {}
        for code, (name, call) in enumerate(found.samples):
            self._tell(f"capturing {name}")
            block = blocks[name]
            joint: JointGraph | None = None
            likeness: Hashable = code
            try:
                joint = self._probed(name, block, call)
                likeness = (_geometry(block), joint.likeness())
            except UnsupportedError as error:
                names = (n for n, kind in found.kinds.items() if kind == code)
                self.eager.update(dict.fromkeys(names, str(error)))
            number = alike.setdefault(likeness, len(self.kinds))
            kind_of_code.append(number)
            if number == len(self.kinds):
                bench = BlockBench(block, call, self._step.device)
                unit = unit_of(self._step.model, name)
                self.kinds.append(self._kind(code, bench, joint, block, unit))
            else:
                self.kinds[number].is_varied = True
        self.kind_of = {n: kind_of_code[code] for n, code in found.kinds.items()}
        for kind in self.kinds:
            if kind.sets:
                self._tell(f"compiling {type(kind.block).__name__}")
            kind.measure_first()
        if not any(p and p.digest for kind in self.kinds for p in kind.partitions):
            first = [f"{name}: {why}" for name, why in list(self.eager.items())[:2]]
            raise UnsupportedError(
                f"no block of this {type(self._step.model).__name__} can be compiled "
                f"({'; '.join(first)}). Use compile=False."
            )

    def _probed(self, name: str, block: nn.Module, call: SampleCall) -> JointGraph:
        """Return the joint graph of a block.

        Raises:
            UnsupportedError: It cannot be captured, or not alike in all processes.
        """
        joint, refused = None, ""
        try:
            with gathered(unit_of(self._step.model, name), block):
                joint = call.run(partial(probe, block, self._executor))
        except UnsupportedError as error:
            refused = str(error)
        said = self.sharing.gather((refused, "" if joint is None else joint.digest))
        if reasons := [reason for reason, _ in said if reason]:
            raise UnsupportedError(reasons[0])
        assert joint is not None, "nothing was refused"
        if len({digest for _, digest in said}) > 1:
            raise UnsupportedError("processes capture different graphs of it")
        return joint

    def _kind(
        self,
        code: int,
        bench: BlockBench,
        joint: JointGraph | None,
        block: nn.Module,
        unit: nn.Module | None,
    ) -> BlockKind:
        """Return a kind of block with its options, none of them measured."""
        options = (len(self.kinds), block, bench, self._executor)
        shared = (self._stored, self.sharing, unit)
        if joint is None:
            return BlockKind(*options, [None, _REGION], *shared)
        self.draws = self.draws or joint.draws
        mine = [
            replace(found, forward_bytes=forward, backward_bytes=backward)
            for found in saved_sets(costed(joint, self._kernels))
            for forward, backward in (self._peaks(joint, found.names),)
        ]
        link = self._plain.link_bytes_per_second
        least = HOST.smallest_bytes
        moved = [saved_bytes(joint, s.names, least=least) for s in mine if link]
        all_found = self.sharing.gather((mine, moved))
        sets, moves = max(all_found, key=lambda found: found[0][0].held_bytes)
        return BlockKind(
            *options,
            [_partition(code, joint, saved.names) for saved in sets],
            *shared,
            joint.likeness(),
            sets,
            moves,
            link,
        )

    def _peaks(self, joint: JointGraph, names: tuple[str, ...]) -> tuple[int, int]:
        """Return `joint.peaks`, which takes a partition, if it is not known yet."""
        found = functools.cache(lambda: joint.peaks(names))
        key = f"{self._executor} {names} {joint.likeness()}"
        return (
            int(self._stored.number(f"forward {key}", lambda: found()[0])),
            int(self._stored.number(f"backward {key}", lambda: found()[1])),
        )

    def reference(self) -> BlockStep:
        """Measure a step in which every block holds as little as possible."""
        references = [kind.reference for kind in self.kinds]
        self.apply(self.plan_of({n: references[k] for n, k in self.kind_of.items()}))
        self._tell("measuring the compiled step at the least memory")
        for _ in range(2):
            self.run()
        marks = run_marked(self._step, self._blocks(), resident=self._resident)
        self.order = marks.names
        chosen = zip(self.kinds, references, strict=True)
        options = [kind.options[number] for kind, number in chosen]
        seconds = pace_of(self._step).seconds
        mine = block_step(marks, self.kind_of, options, seconds)
        return _largest(self.sharing.gather(mine))

    def settle(self, step: BlockStep, budget_left: int) -> tuple[int, ...] | Infeasible:
        """Choose options, compile them, check them on a real step, and correct."""
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
            self.run()
            marks = run_marked(self._step, self._blocks(), resident=self._resident)
            self.rounds += 1
            self.marks = marks
            self.measured_bytes = max(self.sharing.gather(marks.peak_bytes))
            return predicted, self.measured_bytes, last

        return settle(attempt, budget_left)

    def options_of(self, step: BlockStep, choice: Sequence[int]) -> list[BlockOption]:
        """Return the chosen option of each block."""
        return [
            self.kinds[frame.kind].options[option]
            for frame, option in zip(step.frames, choice, strict=True)
        ]

    def plan_of(self, choice: Mapping[str, int]) -> CompiledPlan:
        """Return the plan with the chosen options, including the rest of the model."""
        blocks: list[BlockPartition] = []
        for name, option in choice.items():
            kind = self.kinds[self.kind_of[name]]
            partition = kind.partitions[option]
            if partition is not None:
                held_bytes = kind.options[option].held_bytes
                blocks.append(
                    replace(
                        partition,
                        module=name,
                        kind=self._code_of[name],
                        held_bytes=held_bytes,
                    )
                )
        return CompiledPlan(
            self._executor,
            tuple(blocks),
            model=digest_of(self._step.model, is_unsharded=True),
            rest=self._rest,
        )

    def floor_bytes(self, step: BlockStep) -> int:
        """Return the predicted peak of the smallest choice of measured options."""
        known = [[o for o in kind.options if o.is_measured] for kind in self.kinds]
        pairs = zip(step.frames, least_peak(step, known), strict=True)
        return step.peak_bytes([known[frame.kind][n] for frame, n in pairs])

    def captured_kinds(self) -> tuple[MeasuredKind, ...]:
        """Return the kinds that can be compiled, with what is known of their sets."""
        found: list[MeasuredKind] = []
        for kind in self.kinds:
            blocks = tuple(n for n, k in self.kind_of.items() if k == kind.number)
            options = tuple(kind.options[: len(kind.sets)])
            if options:
                found.append(MeasuredKind(type(kind.block).__name__, blocks, options))
        return tuple(found)

    def frontier(self, step: BlockStep, points: int) -> tuple[CompiledPlan, ...]:
        """Return plans of known options, from the smallest peak to the fastest."""
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
        """Apply the plan; return the observer of the training loop, if any."""
        reserved = plain.reserved_bytes
        self.apply(replace(plan, rest=None))
        model, rest = self._step.model, plan.rest
        loop = watched_loop(model, self.marks, plain.graph, budget_left, reserved, rest)
        if loop is None:
            self.apply(plan)
        return loop

    def run(self) -> None:
        """Run the step as it is now, and compile what is not."""
        self._step.begin()
        self._step.run()

    def take_off(self) -> None:
        """Restore the blocks' own forwards."""
        if self.applied is not None:
            self.applied.remove()
            self.applied = None

    def _choose(self, step: BlockStep, target: int | None) -> tuple[int, ...] | None:
        """Choose measured options, after compiling and measuring promising ones.

        Args:
            step: The step.
            target: The peak to plan for; None: the smallest possible.
        """
        while True:
            choice, missing = self._wanted(step, target)
            if choice is None and not missing:
                for kind in self.kinds:
                    kind.add_region()
                choice, missing = self._wanted(step, target)
            if not missing:
                return choice
            for number, option in sorted(missing):
                kind = self.kinds[number]
                self._tell(f"compiling {type(kind.block).__name__}")
                kind.measure(option)

    def _wanted(
        self, step: BlockStep, target: int | None
    ) -> tuple[tuple[int, ...] | None, Set[KindOption]]:
        """Return a choice, and the options to measure before accepting it."""
        options = [kind.options for kind in self.kinds]
        if target is not None:
            enough = {k.number for k in self.kinds if k.compiled >= _ENOUGH}
            return worth_measuring(step, options, target, enough)
        choice = least_peak(step, options)
        pairs = zip((frame.kind for frame in step.frames), choice, strict=True)
        return choice, {(k, n) for k, n in pairs if not options[k][n].is_measured}

    def apply(self, plan: CompiledPlan) -> None:
        """Replace the active plan."""
        self.take_off()
        self.applied = CompiledBlocks(self._step.model, plan)

    def _blocks(self) -> dict[str, nn.Module]:
        return {n: self._step.model.get_submodule(n) for n in self.kind_of}


def _agreed(found: Sequence[BlockOption]) -> BlockOption:
    """Return an option as all processes see it."""
    return BlockOption(
        held_bytes=max(option.held_bytes for option in found),
        saves_output=any(option.saves_output for option in found),
        forward_bytes=max(option.forward_bytes for option in found),
        backward_bytes=max(option.backward_bytes for option in found),
        seconds=found[0].seconds,
    )


def _largest(steps: Sequence[BlockStep]) -> BlockStep:
    """Return the step with the largest peaks of any process at each place."""
    frames = zip(*(step.frames for step in steps), strict=True)
    outside = zip(*(step.outside_bytes for step in steps), strict=True)
    return BlockStep(
        tuple(map(_largest_frame, frames)), tuple(map(max, outside)), steps[0].seconds
    )


def _largest_frame(frames: Sequence[BlockFrame]) -> BlockFrame:
    return replace(
        frames[0],
        forward_peak_bytes=max(frame.forward_peak_bytes for frame in frames),
        backward_peak_bytes=max(frame.backward_peak_bytes for frame in frames),
        output_bytes=max(frame.output_bytes for frame in frames),
    )


def _partition(kind: int, joint: JointGraph, saves: tuple[str, ...]) -> BlockPartition:
    nbytes = saved_bytes(joint, saves)
    return BlockPartition("", kind, joint.digest, saves, nbytes, 0)


def _geometry(block: nn.Module) -> Hashable:
    """Return what blocks of one kind share besides their graph."""
    tensors = (*block.parameters(), *block.buffers())
    shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return type(block), shapes
