"""Choose an option for each compiled block: the fastest step within a budget."""

from collections.abc import Sequence
from typing import NamedTuple

from recoup.core.block_options import BlockOption, BlockStep

_LABELS = 2000
"""The most Pareto-optimal partial choices that are kept after each block."""


class _Label(NamedTuple):
    added_bytes: int
    seconds: float
    option: int
    before: "_Label | None"


def choose_options(
    step: BlockStep, options: Sequence[Sequence[BlockOption]], budget_bytes: int
) -> tuple[int, ...] | None:
    """Return the number of an option for each block, or None if nothing fits.

    A dynamic program over the blocks in the order of forward. While a block runs, only
    what the blocks before it hold depends on choices, so a partial choice is described
    by the bytes held and the seconds.

    Args:
        step: The step.
        options: The options of each kind of block.
        budget_bytes: The most bytes in use at any moment.
    """
    if step.outside_bytes[0] > budget_bytes:
        return None
    front = [_Label(0, 0.0, -1, None)]
    for number, frame in enumerate(step.frames, 1):
        reached: list[_Label] = []
        for label in front:
            for index, option in enumerate(options[frame.kind]):
                forward = frame.forward_bytes(option) + label.added_bytes
                if forward > budget_bytes:
                    continue
                added = label.added_bytes + frame.added_bytes(option)
                backward = frame.backward_bytes(option) + added
                if max(backward, step.outside_bytes[number] + added) > budget_bytes:
                    continue
                seconds = label.seconds + option.seconds
                reached.append(_Label(added, seconds, index, label))
        front = _pareto(reached)
    if not front:
        return None
    label = min(front, key=lambda found: found.seconds)
    chosen: list[int] = []
    while label.before is not None:
        chosen.append(label.option)
        label = label.before
    return tuple(reversed(chosen))


def _pareto(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda found: (found.added_bytes, found.seconds)):
        if not kept or label.seconds < kept[-1].seconds:
            kept.append(label)
    if len(kept) > _LABELS:
        stride = len(kept) / (_LABELS - 1)
        kept = [*(kept[int(i * stride)] for i in range(_LABELS - 1)), kept[-1]]
    return kept
