"""Boundaries of a measured step that lie between the blocks of a model."""

from collections.abc import Collection, Sequence

from recoup.core.graph import Boundary


def block_boundaries(
    boundaries: Sequence[Boundary], names: Collection[str]
) -> tuple[int, ...]:
    """Return the numbers of the boundaries at which named modules begin and end.

    The first and the last boundary of each call of the model are among them.
    """
    found = {0, len(boundaries) - 1} if boundaries else set[int]()
    for number, boundary in enumerate(boundaries):
        if boundary.module in names:
            found.add(number)
        if number and boundary.model_call != boundaries[number - 1].model_call:
            found |= {number - 1, number}
    return tuple(sorted(found))
