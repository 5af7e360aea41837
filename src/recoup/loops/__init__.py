"""Checkpointed loops over torch, NumPy and JAX, and the source rewriting to them.

`torch`, `numpy` and `jax` mirror each other; schedules are in `recoup.schedules`.
"""

from recoup.loops.gradients import grad, grad_with_checkpointing
from recoup.loops.loop import checkpointed_loop
from recoup.loops.savings import (
    estimate_checkpoint_savings,
    get_memory_savings,
    should_checkpoint,
)
from recoup.schedules.even import compute_checkpoint_positions

__all__ = [
    "checkpointed_loop",
    "compute_checkpoint_positions",
    "estimate_checkpoint_savings",
    "get_memory_savings",
    "grad",
    "grad_with_checkpointing",
    "should_checkpoint",
]
