"""A byte budget for a JAX loop: sizes are known by tracing, and nothing is run."""

from typing import Any

import jax
import jax.numpy as jnp

from recoup.core.units import print_bytes
from recoup.errors import UsageError
from recoup.loops.jax.loop import stacked_feed
from recoup.loops.jax.rows import inexact, merged
from recoup.loops.steps import Step
from recoup.schedules.revolve import Revolve


def fit_jax_budget(step: Step, state: Any, steps: int, budget_bytes: int) -> Revolve:
    """Return the schedule for a budget.

    A tape in JAX holds states, and one step's residuals at a time. States are best
    used as slots then: nothing takes fewer evaluations than Revolve with all of them.
    The residuals of a step are what its traced derivative carries, captured arrays
    included, which bounds them from above.

    Raises:
        UsageError: The residuals of a single step do not fit.
    """
    state = jax.tree.map(jnp.asarray, state)
    state_bytes = _bytes_of(state)
    tape_bytes = _residual_bytes(step, state) if steps else 0
    if budget_bytes < tape_bytes:
        raise UsageError(
            f"a budget of {print_bytes(budget_bytes)} does not hold the tape of one "
            f"step, which takes {print_bytes(tape_bytes)}. Raise the budget."
        )
    slots = 1 + (budget_bytes - tape_bytes) // max(state_bytes, 1)
    return Revolve(steps, slots=min(slots, max(steps, 1)))


def _residual_bytes(step: Step, state: Any) -> int:
    first = jax.tree.map(lambda rows: rows[0], stacked_feed(step))
    index: Any = jnp.zeros((), jnp.int32)

    def pull_of(state: Any, given: Any) -> Any:
        def call(state_part: Any, given_part: Any) -> Any:
            after, output = step.run(
                merged(state, state_part), index, merged(given, given_part)
            )
            return inexact(after), inexact(output)

        return jax.vjp(call, inexact(state), inexact(given))[1]

    return _bytes_of(jax.eval_shape(pull_of, state, first))


def _bytes_of(tree: Any) -> int:
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "dtype") and hasattr(leaf.dtype, "itemsize")
    )
