"""Savings: Tangent's figures for a loop, and actual states held and recomputed."""

import math

from recoup.schedules.even import Even, StoreAll, compute_checkpoint_positions


def get_memory_savings(
    seq_length: int, num_checkpoints: int | None = None
) -> dict[str, float]:
    """Return the savings of even checkpoints, in states.

    The first six figures are those of Tangent's guide. They count checkpoints alone;
    the others count the peak of held states and the recomputed steps.

    Args:
        seq_length: The number of steps of the loop.
        num_checkpoints: The number of states to hold; by default the square root.

    Returns:
        A dictionary with these keys:

        - `without_checkpointing`: states of the plain loop;
        - `with_checkpointing`, `num_checkpoints`: states held as checkpoints;
        - `savings_ratio`, `savings_percent`: the part of the states not held, from 0
          to 1 and in percent;
        - `recomputation_factor`: steps per checkpoint. The guide uses this name, but it
          is the length of a segment; every step is recomputed at most once;
        - `checkpoint_interval`: the same under its right name;
        - `peak_with_checkpointing`: checkpoints, the initial state, and the longest
          segment, which is on the tape at one time;
        - `peak_savings_percent`: the savings at that peak;
        - `extra_forward_steps`, `extra_forward_per_step`: step evaluations in backward,
          as counted.

    Raises:
        UsageError: An argument is negative.

    Examples:
        >>> stats = get_memory_savings(1000)
        >>> f"{stats['savings_percent']:.1f} %"
        '96.9 %'
        >>> f"{stats['recomputation_factor']:.1f}"
        '32.3'
        >>> stats["peak_with_checkpointing"], stats["extra_forward_steps"]
        (64, 968)
    """
    wanted = num_checkpoints
    if wanted is None:
        wanted = math.isqrt(max(seq_length, 0))
    held = len(compute_checkpoint_positions(seq_length, wanted))
    schedule = Even(seq_length, wanted) if held else StoreAll(seq_length)
    counts = schedule.counts()
    peak = counts.peak_tape + held + (1 if held < seq_length and held else 0)
    interval = seq_length / held if held else float(seq_length)
    return {
        "without_checkpointing": seq_length,
        "with_checkpointing": held,
        "savings_ratio": _saved(held, seq_length),
        "savings_percent": 100 * _saved(held, seq_length),
        "num_checkpoints": held,
        "recomputation_factor": interval,
        "checkpoint_interval": interval,
        "peak_with_checkpointing": peak,
        "peak_savings_percent": 100 * _saved(peak, seq_length),
        "extra_forward_steps": counts.extra_evaluations,
        "extra_forward_per_step": counts.extra_per_step,
    }


def estimate_checkpoint_savings(
    seq_length: int, num_checkpoints: int | None = None
) -> dict[str, float]:
    """Return the same as `get_memory_savings`; the guide uses both names.

    Examples:
        >>> for length in (100, 500, 1000, 5000):
        ...     stats = estimate_checkpoint_savings(length)
        ...     print(
        ...         f"{length:4d}: {stats['num_checkpoints']:3d} checkpoints, "
        ...         f"{stats['savings_percent']:5.1f}% reduction"
        ...     )
         100:  10 checkpoints,  90.0% reduction
         500:  22 checkpoints,  95.6% reduction
        1000:  31 checkpoints,  96.9% reduction
        5000:  70 checkpoints,  98.6% reduction
    """
    return get_memory_savings(seq_length, num_checkpoints)


def should_checkpoint(seq_length: int, threshold: float = 0.5) -> bool:
    """Return whether checkpoints save at least `threshold` of the states.

    They do from two steps on, so this is a weak criterion; whether recomputation pays
    off depends on the available memory.

    Args:
        seq_length: The number of steps of the loop.
        threshold: The minimum share of states to save, from 0 to 1.

    Examples:
        >>> [should_checkpoint(n) for n in (1, 10, 1000)]
        [False, True, True]
    """
    return get_memory_savings(seq_length)["savings_ratio"] >= threshold


def _saved(held: int, steps: int) -> float:
    return 1 - held / steps if steps else 0.0
