"""Findings about compiled blocks: a step as its blocks, forward and backward."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from recoup.core.compiled_plan import CompiledPlan, CompiledStep
from recoup.core.display import table
from recoup.core.graph import Graph, module_paths, next_needed
from recoup.core.simulation import simulate
from recoup.core.units import print_bytes, print_seconds
from recoup.report.composition import Known, compose
from recoup.report.findings import (
    CATEGORIES,
    Allocation,
    Findings,
    Moment,
    Part,
    PartCost,
    PlanView,
    Signed,
    Step,
)

_HELD, _RUNNING, _WORKSPACE = map(CATEGORIES.index, ("held", "running", "workspace"))
_OUTSIDE = "outside the blocks"


@dataclass(frozen=True, slots=True)
class BlockPeak:
    """The memory of a block in a step with a plan.

    Attributes:
        module: The path of the block.
        forward_bytes: The peak of the step while its forward runs.
        backward_bytes: The peak of the step while its backward runs.
        held_bytes: Bytes held in between.
    """

    module: str
    forward_bytes: int
    backward_bytes: int
    held_bytes: int


def plans_text(plans: Sequence[CompiledPlan]) -> str:
    """Return plans of compiled blocks, from the smallest peak to the fastest.

    Examples:
        >>> plan = CompiledPlan("exact", (), peak_bytes=2048, seconds=0.5)
        >>> print(plans_text([plan]))
        With blocks compiled (exact), the step takes at least 2 KiB, and at best 500 ms.
        <BLANKLINE>
        plan   peak  saved by blocks    step
        ----  -----  ---------------  ------
        1     2 KiB              0 B  500 ms
    """
    rows = [
        [
            str(number),
            print_bytes(plan.peak_bytes),
            print_bytes(sum(block.saved_bytes for block in plan.blocks)),
            print_seconds(plan.seconds),
        ]
        for number, plan in enumerate(plans, 1)
    ]
    return (
        f"With blocks compiled ({plans[0].executor}), the step takes at least "
        f"{rows[0][1]}, and at best {rows[-1][3]}.\n\n"
        + table(["plan", "peak", "saved by blocks", "step"], rows)
    )


def compiled_step_text(step: CompiledStep) -> str:
    """Return a measured step of compiled blocks, with the costs of their partitions.

    Examples:
        >>> from recoup.core.compiled_plan import BlockOption, MeasuredKind
        >>> from recoup.core.graph import Graph
        >>> option = BlockOption(1024, False, 4096, 2048, 0.001)
        >>> step = CompiledStep(
        ...     executor="exact",
        ...     graph=Graph((), 0, (), (), (), (), ()),
        ...     peak_bytes=8192,
        ...     seconds=0.5,
        ...     floor_bytes=4096,
        ...     kinds=(MeasuredKind("Layer", ("0", "1"), (option,)),),
        ...     eager={"2": "it branches"},
        ... )
        >>> print(compiled_step_text(step))
        With blocks compiled (exact), the step takes at least 4 KiB.
        At best it takes 500 ms, at a peak of 8 KiB.
        <BLANKLINE>
        What a block can hold until its backward, and its peaks above what is there
        blocks                held  forward  backward  time
        -------------------  -----  -------  --------  ----  --------
        2 x Layer, from '0'  1 KiB    4 KiB     2 KiB  1 ms  measured
        <BLANKLINE>
        2 is not compiled: it branches
    """
    rows: list[list[str]] = []
    for kind in step.kinds:
        words = f"{len(kind.blocks)} x {kind.name}, from {kind.blocks[0]!r}"
        for option in kind.options:
            rows.append(
                [
                    words,
                    print_bytes(option.held_bytes),
                    print_bytes(option.forward_bytes),
                    print_bytes(option.backward_bytes),
                    print_seconds(option.seconds),
                    "measured" if option.is_measured else "predicted",
                ]
            )
            words = ""
    summary = (
        f"With blocks compiled ({step.executor}), the step takes at least "
        f"{print_bytes(step.floor_bytes)}.\nAt best it takes "
        f"{print_seconds(step.seconds)}, at a peak of {print_bytes(step.peak_bytes)}."
    )
    heading = (
        "What a block can hold until its backward, and its peaks above what is there"
    )
    costs = table(["blocks", "held", "forward", "backward", "time", ""], rows)
    reasons = (f"{name} is not compiled: {why}" for name, why in step.eager.items())
    return "\n\n".join([summary, f"{heading}\n{costs}", *reasons])


def compose_compiled(
    graph: Graph,
    plan: CompiledPlan,
    blocks: Sequence[BlockPeak],
    outside: tuple[int, int, int],
    known: Known,
) -> Findings:
    """Return the findings about a step with compiled blocks, and the plain eager one.

    The inside of a compiled block is unknown: a moment is a block's forward or
    backward, with the peak while it runs. Rules for eager steps are left out: their
    times were measured operator by operator, and are not comparable with these.

    Args:
        graph: The eager step, as measured.
        plan: The plan.
        blocks: The memory of each block with it, in the order of forward.
        outside: The peaks before the first block, between the last block's forward and
            its backward, and after the first block's backward.
        known: Further data.
    """
    eager = compose(graph, (), (), known)
    names = [block.module for block in blocks]
    before, turn, end = outside
    totals = [
        before,
        *(block.forward_bytes for block in blocks),
        turn,
        *(block.backward_bytes for block in reversed(blocks)),
        end,
    ]
    plain_totals = _plain_totals(graph, names)
    parts = [_part(eager.step, ""), *(_part(eager.step, name) for name in names)]
    base = min(*totals, *plain_totals)
    step = replace(eager.step, parts=tuple(parts))
    step = _sections(step, graph, base)
    held = [block.held_bytes for block in blocks]
    compiled = _view(step, totals, held, known, base)
    compiled = replace(
        compiled,
        name=f"compiled plan of {print_bytes(compiled.peak_bytes)}",
        seconds=plan.seconds,
        plan=json.dumps(json.loads(plan.to_json())),
    )
    plain = _view(step, plain_totals, [p.saved_bytes for p in parts[1:]], known, base)
    plain_seconds = known.plain_seconds or eager.plain_seconds
    plain = replace(plain, name="plain", seconds=plain_seconds)
    views = sorted((compiled, plain), key=lambda view: view.peak_bytes)
    return replace(
        eager,
        step=step,
        plans=tuple(views),
        chosen=views.index(compiled),
        baselines=(),
        plain_seconds=plain_seconds,
    )


def _plain_totals(graph: Graph, names: Sequence[str]) -> list[int]:
    """Return the peak of the eager step in each section over all passes."""
    count = len(names)
    totals = [0] * (2 * count + 3)
    for each in graph.passes:
        half, section = len(each.operations), 0
        owners = [_owner(path, names) for path in module_paths(each)]
        last_owned = max((n for n, owner in enumerate(owners) if owner), default=-1)
        bytes_at = simulate(each, ()).bytes_at
        for moment, producer in enumerate(next_needed(each)):
            if moment < half:
                section = owners[moment] or section
                if moment > last_owned:
                    section = count + 1
            elif producer is None:
                section = 2 * count + 2
            else:
                reached = 2 * count + 2 - owners[producer] if owners[producer] else 0
                section = max(section, reached, count + 1)
            totals[section] = max(totals[section], bytes_at[moment])
    for number in range(1, len(totals)):
        totals[number] = totals[number] or totals[number - 1]
    return totals


def _owner(path: str, names: Sequence[str]) -> int:
    """Return the number of the block around a module, from 1; 0: none."""
    for number, name in enumerate(names, 1):
        if path == name or path.startswith(f"{name}."):
            return number
    return 0


def _part(step: Step, name: str) -> Part:
    """Return the eager step's operators in one block, or outside all, as one part."""
    mine = [part for part in step.parts if name and _owner(part.module, [name])]
    return Part(
        f"block {name}" if name.isdigit() else name or _OUTSIDE,
        name,
        sum(part.operators for part in mine),
        sum(part.seconds for part in mine),
        sum(part.saved_bytes for part in mine),
    )


def _sections(step: Step, graph: Graph, base: int) -> Step:
    """Return a step whose moments are its blocks, forward and backward."""
    count = len(step.parts) - 1
    order = [0, *range(1, count + 1), 0, *range(count, 0, -1), 0]
    backward = max(graph.step_seconds - graph.forward_seconds, 0.0) / max(count, 1)
    moments: list[Moment] = []
    for number, part in enumerate(order):
        is_forward = number <= count
        seconds = step.parts[part].seconds if is_forward else backward * bool(part)
        moments.append(Moment(int(bool(part)), part, Signed(base), seconds))
    return replace(
        step,
        operators=(_OUTSIDE, "compiled block"),
        moments=tuple(moments),
        phases=(("forward", 0), ("backward", count + 1)),
    )


def _view(
    step: Step, totals: Sequence[int], held: Sequence[int], known: Known, base: int
) -> PlanView:
    """Return a plan from the totals of sections and the bytes that blocks hold."""
    count = len(held)
    left = [total - base for total in totals]
    allocations: list[Allocation] = []
    costs = [PartCost(0, 0, 0.0)]
    for number, wanted in enumerate(held, 1):
        first, last = number, 2 * count + 2 - number
        # A section that used fewer bytes than were held limits them.
        nbytes = min(wanted, *left[first : last + 1])
        if nbytes:
            part = Signed(number)
            allocations.append(Allocation(_HELD, part, part, nbytes, first, last))
        for section in range(first, last + 1):
            left[section] -= nbytes
        saved = step.parts[number].saved_bytes
        costs.append(PartCost(min(wanted, saved), 0, 0.0))
    for section, nbytes in enumerate(left):
        if nbytes:
            part = Signed(step.moments[section].part)
            at = Signed(section)
            kind = _RUNNING if section <= count else _WORKSPACE
            allocations.append(Allocation(kind, part, at, nbytes, section, section))
    peak = max(totals)
    moment = totals.index(peak)
    phase = "backward" if moment > count else "forward"
    return PlanView(
        name="",
        peak_bytes=peak + known.reserved_bytes,
        seconds=0.0,
        host_bytes=0,
        peak_moment=moment,
        peak_place=f"in {phase}, {step.parts[step.moments[moment].part].block}",
        allocations=tuple(allocations),
        reruns=(),
        costs=tuple(costs),
    )
