"""Compiled blocks as data: the costs of their options, steps made of them, and plans.

A model's blocks run in forward one after another and in backward in reverse. Each block
has *options*: partitions of its joint graph that save more or fewer bytes. A step is
described by one reference run, in which every block had its option of fewest bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recoup.core.display import as_html
from recoup.core.graph import Graph
from recoup.core.plan import Plan, check_plan
from recoup.core.readings import plan_file
from recoup.core.units import print_bytes, print_seconds
from recoup.errors import PlanError


@dataclass(frozen=True, slots=True)
class JointForward:
    """The forward half of a block's joint graph, with costs.

    Attributes:
        digest: Identifies the captured graph.
        graph: Operators with the seconds that recomputing each of them takes.
        names: The node of each value.
        demanded: The values that backward reads.
        resident: Values that are in memory in any case.
        save_seconds: The time to write and read each value if it is saved.
    """

    digest: str
    graph: Graph
    names: tuple[str, ...]
    demanded: tuple[int, ...]
    resident: frozenset[int]
    save_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SavedSet:
    """Values that a block saves for backward.

    Attributes:
        names: Their nodes, without inputs of the block.
        held_bytes: Their bytes, inputs included.
        seconds: Predicted time for saving them and recomputing the others.
        forward_bytes: The predicted peak of forward above the bytes at its start.
        backward_bytes: The same of backward.
    """

    names: tuple[str, ...]
    held_bytes: int
    seconds: float
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One option to run a block, measured or predicted.

    Attributes:
        held_bytes: Bytes that it holds between its forward and its backward, without
            its inputs and outputs.
        saves_output: Whether it holds its output as well.
        forward_bytes: The peak of its forward above the bytes in use at its start.
        backward_bytes: The peak of its backward above the bytes in use at its start.
        seconds: Time of forward and backward.
        is_measured: False if it was predicted from the joint graph.
    """

    held_bytes: int
    saves_output: bool
    forward_bytes: int
    backward_bytes: int
    seconds: float
    is_measured: bool = True


@dataclass(frozen=True, slots=True)
class BlockFrame:
    """A block in the reference step.

    Attributes:
        kind: The number of its kind: blocks of one kind have the same options.
        reference: Its option in the reference step.
        forward_peak_bytes: The peak of the step while its forward ran.
        backward_peak_bytes: The peak of the step while its backward ran.
        output_bytes: Bytes of its output, if nothing else holds it until backward;
            else 0.
    """

    kind: int
    reference: BlockOption
    forward_peak_bytes: int
    backward_peak_bytes: int
    output_bytes: int

    def forward_bytes(self, option: BlockOption) -> int:
        """Return the peak while its forward runs, if blocks before it do not change."""
        more = option.forward_bytes - self.reference.forward_bytes
        return self.forward_peak_bytes + more

    def backward_bytes(self, option: BlockOption) -> int:
        """Return the peak while its backward runs, without bytes that options hold."""
        more = option.backward_bytes - self.reference.backward_bytes
        return self.backward_peak_bytes + more

    def added_bytes(self, option: BlockOption) -> int:
        """Return the bytes that an option holds beyond those of the reference."""
        return self._held_bytes(option) - self._held_bytes(self.reference)

    def _held_bytes(self, option: BlockOption) -> int:
        return option.held_bytes + (self.output_bytes if option.saves_output else 0)


@dataclass(frozen=True, slots=True)
class BlockStep:
    """A training step made of blocks, measured once with the reference options.

    Attributes:
        frames: The blocks, in the order of forward.
        outside_bytes: Entry n is the peak outside blocks while the first n blocks
            held their values.
        seconds: The time of the reference step.
    """

    frames: tuple[BlockFrame, ...]
    outside_bytes: tuple[int, ...]
    seconds: float

    def peak_bytes(self, options: Sequence[BlockOption]) -> int:
        """Return the predicted peak of a step with an option for each block."""
        peak = self.outside_bytes[0]
        added = 0
        for number, (frame, option) in enumerate(
            zip(self.frames, options, strict=True), 1
        ):
            forward = frame.forward_bytes(option) + added
            added += frame.added_bytes(option)
            backward = frame.backward_bytes(option) + added
            outside = self.outside_bytes[number] + added
            peak = max(peak, forward, backward, outside)
        return peak

    def total_seconds(self, options: Sequence[BlockOption]) -> float:
        """Return the predicted time of a step with an option for each block.

        Timings vary, so a sum of differences may exceed the step: the result is at
        least the time of its blocks.
        """
        blocks = sum(option.seconds for option in options)
        references = sum(frame.reference.seconds for frame in self.frames)
        return max(self.seconds + blocks - references, blocks)


@dataclass(frozen=True, slots=True)
class MeasuredKind:
    """Blocks that were captured as one graph, and the partitions found for them.

    Attributes:
        name: Their class.
        blocks: Their paths, in the order of the model.
        options: The costs of each partition, from the fastest to the smallest. Those
            that were compiled are measured, the others predicted from the graph.
    """

    name: str
    blocks: tuple[str, ...]
    options: tuple[BlockOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompiledStep:
    """A training step with compiled blocks; `measure` returns it with `compile=`.

    Attributes:
        executor: "exact" or "inductor".
        graph: The eager step, as `measure` returns it without `compile=`.
        peak_bytes: The measured peak of the fastest step that the device has memory
            for: what `fit` gives without a budget.
        seconds: The measured time of that step.
        floor_bytes: The smallest peak with these blocks compiled. `fit` goes below it
            where regions of recoup's need less.
        kinds: The captured blocks and their partitions.
        eager: The blocks that cannot be captured, and why.
    """

    executor: str
    graph: Graph = field(repr=False)
    peak_bytes: int
    seconds: float
    floor_bytes: int
    kinds: tuple[MeasuredKind, ...]
    eager: Mapping[str, str]

    def numbers(self) -> dict[str, Any]:
        """Return all but the graph as plain data, for other programs."""
        return {
            "executor": self.executor,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "floor_bytes": self.floor_bytes,
            "kinds": [asdict(kind) for kind in self.kinds],
            "eager": dict(self.eager),
        }

    def __repr__(self) -> str:
        compiled = sum(len(kind.blocks) for kind in self.kinds)
        return (
            f"CompiledStep({compiled} blocks, {self.executor}, {len(self.eager)} "
            f"eager: peak {print_bytes(self.peak_bytes)}, smallest "
            f"{print_bytes(self.floor_bytes)}, step {print_seconds(self.seconds)})"
        )

    def _repr_html_(self) -> str:
        return as_html(repr(self))


COMPILED_PLANS = plan_file("recoup compiled plan", 1)
"""Files of compiled plans."""

EXECUTORS = ("exact", "inductor")
"""The executor of captured blocks: eager kernels, or Inductor's."""


@dataclass(frozen=True, slots=True)
class BlockPartition:
    """The plan of one block of a model.

    Attributes:
        module: The path of the block.
        kind: Blocks of one kind share compiled code.
        digest: The joint graph that was captured; empty if the block is not compiled
            but recomputed as one region.
        saves: The nodes of that graph that are saved for backward, besides inputs.
        saved_bytes: The bytes of these nodes when they were measured.
        held_bytes: Bytes held between the block's forward and backward, measured.
        offloads: Whether saved values, except inputs, are on the host in between.
    """

    module: str
    kind: int
    digest: str
    saves: tuple[str, ...]
    saved_bytes: int
    held_bytes: int
    offloads: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class CompiledPlan:
    """The values that blocks save for backward, and their executor.

    Attributes:
        executor: "exact" or "inductor".
        blocks: The blocks that do not run as written.
        rest: The plan of the code outside these blocks; None keeps all its values.
        model: The model it was made for, as a digest of its modules; empty: any.
        budget_bytes: The budget it was made for; 0: none.
        peak_bytes: The predicted peak.
        seconds: The predicted time of a step.

    Examples:
        >>> block = BlockPartition("h.0", 0, "ab12", ("addmm",), 64, 64)
        >>> plan = CompiledPlan("exact", (block,))
        >>> CompiledPlan.from_json(plan.to_json()) == plan
        True
    """

    executor: str
    blocks: tuple[BlockPartition, ...]
    model: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    rest: Plan | None = None

    def __repr__(self) -> str:
        budget = print_bytes(self.budget_bytes) if self.budget_bytes else "none"
        rest = f", {self.rest.regions} regions" if self.rest is not None else ""
        return (
            f"CompiledPlan({len(self.blocks)} blocks, {self.executor}{rest}: budget "
            f"{budget}, predicted peak {print_bytes(self.peak_bytes)}, step "
            f"{print_seconds(self.seconds)})"
        )

    def _repr_html_(self) -> str:
        return as_html(repr(self))

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return COMPILED_PLANS.write(self, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CompiledPlan":
        """Return the plan that a JSON text describes; nothing in it is executed.

        Raises:
            PlanError: The text is not such a plan, or has another version.
        """
        plan = COMPILED_PLANS.read(text, cls)
        if plan.executor not in EXECUTORS:
            raise PlanError(
                f"expected an executor of {EXECUTORS}, got {plan.executor!r}."
            )
        if plan.rest is not None:
            check_plan(plan.rest)
        return plan
