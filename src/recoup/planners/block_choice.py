"""Compiled blocks: the values each may save, and the fastest choice for a budget.

`saved_sets` finds the Pareto front of bytes and time of one captured block by minimum
cuts; `choose_options` chooses an option for each block by dynamic programming,
`least_peak` those of the minimum peak.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from recoup.core.compiled_plan import BlockOption, BlockStep, JointForward, SavedSet
from recoup.core.graph import BEFORE, Graph, module_paths
from recoup.core.segments import Segment
from recoup.planners.min_cut import Choice, Demand, choose, evaluate

_NOTHING = 1e-15

Plans = tuple[tuple[Segment, ...], ...]
"""The segments of each pass of a step."""


def recomputed_bytes(graph: Graph, blocks: Sequence[str]) -> int:
    """Estimate the bytes held if each block recomputes itself, to compare blocks.

    Saved values that leave a block are held, and those inside one block at a time.
    """
    owners = _owners(graph, blocks)
    users: dict[int, set[str]] = {}
    for owner, operation in zip(owners, graph.operations, strict=True):
        for value in (*operation.reads, *operation.makes):
            users.setdefault(graph.values[value].storage, set()).add(owner)
    held: dict[str, int] = {"": 0}
    for storage in {graph.values[save.value].storage for save in graph.saves}:
        inside = users.get(storage, set())
        (block,) = inside if len(inside) == 1 else ("",)
        held[block] = held.get(block, 0) + graph.storages[storage].bytes
    return held.pop("") + max(held.values(), default=0)


_TIE = 1e-5
"""The price of all bytes, as a share of all time, that breaks ties of equal times."""


def mixtures(
    graph: Graph, plans: Plans, blocks: Sequence[str]
) -> Iterator[tuple[Plans, tuple[str, ...]]]:
    """Yield parts of a plan that can be applied together with compiled blocks.

    Each comes with the blocks to compile: the segments outside all blocks, then all
    segments, with the blocks that they do not touch.
    """
    outside: list[tuple[Segment, ...]] = []
    touched: set[str] = set()
    for each, segments in zip(graph.passes, plans, strict=True):
        owners = _owners(each, blocks)
        found: list[Segment] = []
        for segment in segments:
            inside = each.operations_between(segment.start, segment.stop)
            ends = (each.boundaries[n].module for n in (segment.start, segment.stop))
            met = {owners[n] for n in inside}
            met |= {b for end in ends for b in blocks if end.startswith(f"{b}.")}
            touched |= met
            if met <= {""}:
                found.append(segment)
        outside.append(tuple(found))
    if any(outside):
        yield tuple(outside), tuple(blocks)
    if rest := tuple(block for block in blocks if block not in touched):
        yield plans, rest


def _owners(graph: Graph, blocks: Sequence[str]) -> list[str]:
    """Return the block of each operation of forward; empty: none."""
    return [
        next((b for b in blocks if path == b or path.startswith(f"{b}.")), "")
        for path in module_paths(graph)
    ]


def saved_sets(joint: JointForward, *, limit: int = 8) -> tuple[SavedSet, ...]:
    """Return the supported sets of saved values, from the fastest to the smallest.

    Each is a minimum cut of forward at some price of a byte: saving a value costs its
    price and the time to write and read it, recomputing it the time of its operator and
    the cost of that operator's inputs. Results of operators that must not run twice are
    saved in every set.

    Args:
        joint: The block's forward.
        limit: The maximum number of sets; sets that blocks with other sets replace at
            the least cost are dropped first.
    """
    demand = Demand(
        joint.graph,
        range(len(joint.graph.operations)),
        joint.demanded,
        dict.fromkeys(joint.resident, 0),
    )
    fastest, smallest = _fastest(joint, demand), _smallest(joint, demand)
    found = {fastest.names: fastest, smallest.names: smallest}
    gaps = [(fastest, smallest)]
    cuts = 4 * limit
    while gaps and cuts:
        left, right = max(gaps, key=lambda gap: gap[0].held_bytes - gap[1].held_bytes)
        gaps.remove((left, right))
        if left.held_bytes <= right.held_bytes:
            continue
        cuts -= 1
        price = (right.seconds - left.seconds) / (left.held_bytes - right.held_bytes)
        middle = _at(joint, demand, max(price, 0.0))
        line = _between(left, right, middle.held_bytes)
        if middle.names not in found and middle.seconds < line - _NOTHING:
            found[middle.names] = middle
            gaps += [(left, middle), (middle, right)]
    return tuple(_thinned(_pareto(found.values()), limit))


def _at(joint: JointForward, demand: Demand, price: float) -> SavedSet:
    """Return the best set at a price of a byte, in seconds."""
    held = choose(demand, price, joint.save_seconds)
    return _set_of(joint, evaluate(demand, held))


def _fastest(joint: JointForward, demand: Demand) -> SavedSet:
    """Return the fastest set; among several, the smallest."""
    nbytes = sum(storage.bytes for storage in joint.graph.storages)
    return _at(joint, demand, _TIE * _all_seconds(joint) / max(nbytes, 1))


def _smallest(joint: JointForward, demand: Demand) -> SavedSet:
    """Return the set of fewest bytes: at a price that no time outweighs."""
    return _at(joint, demand, 1e3 * _all_seconds(joint) + 1.0)


def _all_seconds(joint: JointForward) -> float:
    recomputed = sum(operation.seconds for operation in joint.graph.operations)
    return recomputed + sum(joint.save_seconds)


def _set_of(joint: JointForward, choice: Choice) -> SavedSet:
    values = joint.graph.values
    saved = sorted(v for v in choice.starts if values[v].producer != BEFORE)
    return SavedSet(
        tuple(joint.names[value] for value in saved),
        choice.held_bytes,
        choice.seconds + sum(joint.save_seconds[value] for value in choice.starts),
    )


def _pareto(sets: Iterable[SavedSet]) -> list[SavedSet]:
    """Return the Pareto-optimal sets, from the fastest to the smallest."""
    kept: list[SavedSet] = []
    for item in sorted(sets, key=lambda s: (s.seconds, s.held_bytes)):
        if not kept or item.held_bytes < kept[-1].held_bytes:
            kept.append(item)
    return kept


def _thinned(sets: list[SavedSet], limit: int) -> list[SavedSet]:
    """Drop the sets that a mixture of their neighbours replaces at the least cost."""
    while len(sets) > max(limit, 2):
        costs = [
            _between(sets[i - 1], sets[i + 1], sets[i].held_bytes) - sets[i].seconds
            for i in range(1, len(sets) - 1)
        ]
        del sets[1 + costs.index(min(costs))]
    return sets


def _between(fast: SavedSet, small: SavedSet, held_bytes: int) -> float:
    """Return the time of blocks of which some have one set, the others another."""
    price = (small.seconds - fast.seconds) / (fast.held_bytes - small.held_bytes)
    return fast.seconds + price * (fast.held_bytes - held_bytes)


_NEARLY = 64


def compiled_first(sets: Sequence[SavedSet]) -> int:
    """Return the number of the fastest set that holds nearly as little as the smallest.

    The smallest one may recompute a whole reduction for the sake of its few results, as
    the mean of a batch.
    """
    spread = sets[0].held_bytes - sets[-1].held_bytes
    limit = sets[-1].held_bytes + spread // _NEARLY
    return next(n for n, found in enumerate(sets) if found.held_bytes <= limit)


def offloaded(
    option: BlockOption, moved_bytes: int, link_bytes_per_second: float
) -> BlockOption:
    """Return an option whose saved values are on the host between both directions.

    Copies overlap with an interval of the step as long as the block itself, a third of
    it in forward. When its backward begins, the values are back.
    """
    copy_seconds = moved_bytes / link_bytes_per_second
    forward_seconds = option.seconds / 3
    waiting = max(0.0, copy_seconds - forward_seconds)
    waiting += max(0.0, copy_seconds - 2 * forward_seconds)
    freed_bytes = min(moved_bytes, max(option.held_bytes, 0))
    return replace(
        option,
        held_bytes=option.held_bytes - freed_bytes,
        backward_bytes=option.backward_bytes + freed_bytes,
        seconds=option.seconds + waiting,
    )


KindOption = tuple[int, int]
"""The number of a kind of block, and of one of its options."""

_LABELS = 2000
"""The most Pareto-optimal partial choices that are kept after each block."""


class _Label(NamedTuple):
    added_bytes: int
    seconds: float
    option: int
    before: "_Label | None"


def choose_options(
    step: BlockStep,
    options: Sequence[Sequence[BlockOption]],
    budget_bytes: int,
    *,
    among: Set[KindOption] | None = None,
) -> tuple[int, ...] | None:
    """Return the number of an option for each block, or None if nothing fits.

    A dynamic program over the blocks in the order of forward. While a block runs, only
    the bytes held by earlier blocks depend on choices, so a partial choice is described
    by bytes held and seconds.

    Only options in `among` may be chosen; None: all.
    """
    if step.outside_bytes[0] > budget_bytes:
        return None
    front = [_Label(0, 0.0, -1, None)]
    for number, frame in enumerate(step.frames, 1):
        reached: list[_Label] = []
        for label in front:
            for index, option in enumerate(options[frame.kind]):
                if among is not None and (frame.kind, index) not in among:
                    continue
                forward = frame.forward_bytes(option) + label.added_bytes
                if forward > budget_bytes:
                    continue
                added = label.added_bytes + frame.added_bytes(option)
                backward = frame.backward_bytes(option) + added
                if max(backward, step.outside_bytes[number] + added) > budget_bytes:
                    continue
                seconds = label.seconds + option.seconds
                reached.append(_Label(added, seconds, index, label))
        front = _best(reached)
    if not front:
        return None
    label = min(front, key=lambda found: found.seconds)
    chosen: list[int] = []
    while label.before is not None:
        chosen.append(label.option)
        label = label.before
    return tuple(reversed(chosen))


_WORTH = 0.005
"""Options that together gain less than this share of the blocks' time are dropped."""


def worth_measuring(
    step: BlockStep,
    options: Sequence[Sequence[BlockOption]],
    budget_bytes: int,
    closed: Set[int] = frozenset(),
) -> tuple[tuple[int, ...] | None, frozenset[KindOption]]:
    """Return the choice to take, or the options to measure before one is taken.

    Measuring an option costs seconds, since it is compiled. Of the predicted options in
    a choice, only those are measured without which it does not fit, or is slower by a
    share of the blocks' time. (That of the step varies from run to run: with it a
    second fit could ask for other options than the first.)

    Args:
        step: The step.
        options: The options of each kind of block.
        budget_bytes: The most bytes of the step.
        closed: Kinds with enough measured options to choose from: more are measured
            only if nothing fits without.

    Returns:
        The fastest choice of measured options, None if nothing fits; and the predicted
        options that a better one needs.
    """
    every = {(k, n) for k, found in enumerate(options) for n in range(len(found))}
    usable = {(k, n) for k, n in every if options[k][n].is_measured}
    measured = choose_options(step, options, budget_bytes, among=usable)
    still_open = usable | {(k, n) for k, n in every if k not in closed}
    wanted = choose_options(step, options, budget_bytes, among=still_open)
    wanted = wanted or choose_options(step, options, budget_bytes)

    def seconds(choice: Sequence[int]) -> float:
        pairs = zip(step.frames, choice, strict=True)
        return step.total_seconds([options[frame.kind][n] for frame, n in pairs])

    if wanted is None:
        return None, frozenset()
    used = Counter(zip((f.kind for f in step.frames), wanted, strict=True))
    needed = {pair for pair in used if pair not in usable}
    references = sum(frame.reference.seconds for frame in step.frames)
    limit = seconds(wanted) + _WORTH * references
    # Those of the fewest blocks gain least.
    for pair in sorted(needed, key=lambda each: (used[each], each)):
        among = usable | needed - {pair}
        found = choose_options(step, options, budget_bytes, among=among)
        if found is not None and seconds(found) <= limit:
            needed.remove(pair)
    return measured, frozenset(needed)


def least_peak(
    step: BlockStep, options: Sequence[Sequence[BlockOption]]
) -> tuple[int, ...]:
    """Return the number of an option for each block, such that the peak is minimal.

    Among options that hold equally little, a measured one is preferred, then the
    fastest.
    """
    choice = tuple(len(options[frame.kind]) - 1 for frame in step.frames)
    least = step.outside_bytes[0] - 1
    while True:
        chosen = [options[f.kind][n] for f, n in zip(step.frames, choice, strict=True)]
        most = step.peak_bytes(chosen)
        if most <= least + 1:
            return choice
        middle = (least + most) // 2
        found = _holding_least(step, options, middle)
        if found is None:
            if most == middle + 1:
                return choice
            least = middle
        else:
            choice = found


def _holding_least(
    step: BlockStep, options: Sequence[Sequence[BlockOption]], budget_bytes: int
) -> tuple[int, ...] | None:
    """Return a choice within a budget in which each block holds as little as it can."""
    if step.outside_bytes[0] > budget_bytes:
        return None
    chosen: list[int] = []
    held = 0
    for number, frame in enumerate(step.frames, 1):
        fitting: list[tuple[int, bool, float, int]] = []
        for index, option in enumerate(options[frame.kind]):
            added = held + frame.added_bytes(option)
            peak = max(
                frame.forward_bytes(option) + held,
                frame.backward_bytes(option) + added,
                step.outside_bytes[number] + added,
            )
            if peak <= budget_bytes:
                rank = (added, not option.is_measured, option.seconds, index)
                fitting.append(rank)
        if not fitting:
            return None
        held, *_, index = min(fitting)
        chosen.append(index)
    return tuple(chosen)


def _best(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda found: (found.added_bytes, found.seconds)):
        if not kept or label.seconds < kept[-1].seconds:
            kept.append(label)
    if len(kept) > _LABELS:
        stride = len(kept) / (_LABELS - 1)
        kept = [*(kept[int(i * stride)] for i in range(_LABELS - 1)), kept[-1]]
    return kept
