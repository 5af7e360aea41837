"""Multi-tensor operations: fewer kernels, less host time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Typed by hand: the stubs do not export names that begin with an underscore.
_copy: Callable[[list[Tensor], list[Tensor]], None] = vars(torch)["_foreach_copy_"]
_lerp: Callable[[list[Tensor], list[Tensor], float], None] = vars(torch)[
    "_foreach_lerp_"
]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target; all have one dtype and one device.

    Examples:
        >>> targets = [torch.zeros(2), torch.zeros(3)]
        >>> copy_all(targets, [torch.ones(2), torch.ones(3)])
        >>> [target.tolist() for target in targets]
        [[1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    _copy(list(targets), list(sources))


def lerp_all(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Interpolate each target towards its end in place.

    Examples:
        >>> targets = [torch.zeros(2)]
        >>> lerp_all(targets, [torch.ones(2)], 0.25)
        >>> targets[0].tolist()
        [0.25, 0.25]
    """
    _lerp(list(targets), list(ends), weight)


def choose_all(
    targets: Sequence[Tensor], sources: Sequence[Tensor], flag: Tensor
) -> None:
    """Copy each source to its target if the flag on their device is set.

    Does not synchronise. All tensors have one dtype and one device.

    Examples:
        >>> targets = [torch.zeros(2), torch.zeros(())]
        >>> sources = [torch.ones(2), torch.ones(())]
        >>> choose_all(targets, sources, torch.tensor([False]))
        >>> choose_all(targets[:1], sources[:1], torch.tensor([True]))
        >>> [target.tolist() for target in targets]
        [[1.0, 1.0], 0.0]
    """
    sizes = [target.numel() for target in targets]
    now, other = (
        torch.cat([each.reshape(-1) for each in some]) for some in (targets, sources)
    )
    chosen = torch.where(flag, other, now).split(sizes)
    copy_all(
        targets,
        [piece.view(each.shape) for piece, each in zip(chosen, targets, strict=True)],
    )
