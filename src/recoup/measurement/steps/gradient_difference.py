"""The gradients of a step, and their difference from those of another run."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from recoup.backend.training.sharded_units import local_part
from recoup.measurement.steps.training_step import TrainingStep

Gradients = Sequence[Tensor | None]
"""The gradient of each parameter, or None."""

_CHUNK_BYTES = 1 << 24
"""Bytes of a gradient compared at once, to bound the temporaries on a GPU."""

_NEGLIGIBLE = 1e-3
"""Gradients below this share of the largest one count as rounding errors."""


def gradients_of(step: TrainingStep) -> list[Tensor | None]:
    """Run a step once; return copies of the parameters' gradients on the CPU.

    Of distributed gradients, this process's parts.
    """
    step.begin()
    step.run()
    gradients = _gradients_in(step)
    found = [None if g is None else g.detach().to("cpu", copy=True) for g in gradients]
    step.begin()
    return found


def difference_from(expected: Gradients, step: TrainingStep) -> float:
    """Run a step once; return `largest_difference` of its gradients.

    The comparison runs on the gradients' device.
    """
    step.begin()
    step.run()
    gradients = _gradients_in(step)
    found = largest_difference(expected, gradients)
    del gradients
    step.begin()
    return found


def _gradients_in(step: TrainingStep) -> list[Tensor | None]:
    gradients = (parameter.grad for parameter in step.model.parameters())
    return [None if g is None else local_part(g) for g in gradients]


@torch.no_grad()
def largest_difference(expected: Gradients, found: Gradients) -> float:
    """Return the largest difference relative to the largest entry of each gradient.

    0.0 means bitwise equality. The divisor is at least a thousandth of the largest
    entry of all gradients, so that rounding errors in tiny gradients count little. The
    difference is infinite if a gradient exists on one side only or shapes differ.

    Examples:
        >>> one = torch.tensor([1.0, 2.0])
        >>> largest_difference([one, None], [one.clone(), None])
        0.0
        >>> largest_difference([one], [one + 0.5]), largest_difference([one], [None])
        (0.25, inf)
    """
    sizes: list[float] = []
    distances: list[float] = []
    for one, other in zip(expected, found, strict=True):
        if one is None or other is None or one.shape != other.shape:
            if one is not other:
                return float("inf")
            continue
        chunks = [_compared(a, b) for a, b in _chunks(one, other)]
        sizes.append(max((size for size, _ in chunks), default=0.0))
        distances.append(max((distance for _, distance in chunks), default=0.0))
    if not any(distances):
        return 0.0
    least = max(_NEGLIGIBLE * max(sizes), torch.finfo(torch.float32).tiny)
    worst = max(d / max(s, least) for d, s in zip(distances, sizes, strict=True))
    return worst or torch.finfo(torch.float64).tiny


def _chunks(expected: Tensor, found: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching parts of both, on the device of the second."""
    length = max(_CHUNK_BYTES // max(expected.element_size(), 1), 1)
    flat = [t.to_dense() if t.is_sparse else t for t in (expected, found)]
    parts = [t.detach().reshape(-1).split(length) for t in flat]
    for one, other in zip(*parts, strict=True):
        if other.numel():
            yield one.to(other.device), other


def _compared(expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the largest entry and the largest difference, 0.0 if bitwise equal."""
    size = float(expected.abs().max().float().nan_to_num(nan=0.0))
    same_format = expected.dtype == found.dtype
    if same_format and torch.equal(expected.view(torch.uint8), found.view(torch.uint8)):
        return size, 0.0
    wide = torch.promote_types(expected.dtype, torch.float32)
    distance = float((expected.to(wide) - found.to(wide)).abs().max())
    if distance != distance:
        return size, float("inf")
    # Zeros of different signs are unequal bitwise.
    return size, distance or torch.finfo(torch.float64).tiny
