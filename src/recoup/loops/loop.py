"""The checkpointed loop: one function for torch tensors, NumPy and JAX arrays."""

import importlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from recoup.backend.state.walk import reach
from recoup.core.units import parse_bytes
from recoup.engine.tiers.protocol import Tier
from recoup.errors import UsageError
from recoup.loops.drive import Checkpoints, LoopPlan
from recoup.loops.state_trees import flatten
from recoup.loops.steps import Feed, Listed, LoopStep, Stacked
from recoup.schedules.even import Even, StoreAll
from recoup.schedules.online import Online
from recoup.schedules.schedule import Schedule


def checkpointed_loop(  # noqa: PLR0913 (independent options)
    func: Callable[..., Any],
    initial_state: Any,
    seq_length: int | None = None,
    num_checkpoints: int | None = None,
    *,
    inputs: Any = None,
    with_index: bool = False,
    with_outputs: bool = False,
    schedule: Schedule | Online | None = None,
    budget: int | str | None = None,
    store: Tier | Sequence[Tier] | None = None,
    condition: Callable[[Any], Any] | None = None,
    captures: Sequence[Any] = (),
    vjp: Callable[..., Any] | None = None,
    verify: str = "first",
    tolerance: float | None = None,
) -> tuple[Any, Checkpoints]:
    """Run a loop that can be differentiated without keeping every state.

    The gradients are those of the plain loop, for the initial state, the inputs of the
    steps and every tensor that `func` captures. With torch they are bitwise equal,
    unless a captured tensor is also used outside the loop.

    Costs: the states held and steps recomputed of the schedule's `counts()`; by default
    the square root of the number of steps, and not quite one more run of the loop.

    Args:
        func: One step: `state -> state`. It must depend only on its arguments and
            captures.
        initial_state: The initial state: any nesting of tuples, lists and dictionaries
            of torch tensors, NumPy arrays or JAX arrays. It is always held, and not
            counted among the checkpoints.
        seq_length: The number of steps. With a condition, the maximum.
        num_checkpoints: The number of states to hold; by default the square root of
            `seq_length`, rounded down.
        inputs: One input for each step, as in a scan: a tree of arrays whose first axis
            is the step, or a `Listed` of trees. `func` gets it after the state.
        with_index: Whether `func` gets the index of the step, after the state.
        with_outputs: Whether `func` returns the new state and an output; the outputs of
            all steps are stacked. The first result is then the pair of both.
        schedule: A schedule instead, such as `Revolve(seq_length, slots=11)`.
        budget: Bytes that may be held for backward, such as `"64MiB"`: slots and tape
            are chosen together. One step runs once more, to be measured (twice with
            NumPy, not at all with JAX, where sizes are known beforehand).
        store: The storage of states, for torch: a tier such as `Host()`, or one for
            each tier of a `Multistage` schedule. The initial state is not moved. A
            lossy tier gives approximate gradients, and nothing is verified.
        condition: The loop runs while `condition(state)` holds; its length need not
            be known.
        captures: Tensors that `func` uses and that cannot be found by inspecting it.
        vjp: For plain NumPy functions: `vjp(state, cotangent)` returns the cotangent of
            the state before the step; it gets index and input as `func` does.
        verify: The recomputed states that must be bitwise equal to forward's: those
            of the first sweep (`"first"`), all that are ever held (`"always"`), none
            (`"off"`). With torch and NumPy.
        tolerance: The relative and absolute difference allowed there; it costs the
            memory of the compared states.

    Returns:
        The final state, and the states held by position (see `Checkpoints`).

    Raises:
        UsageError: Arguments exclude each other, or a step changes the structure of
            the state.
        CaptureError: A gradient would be lost: a captured tensor was not found.
        MismatchError: In backward: a step depends on more than its arguments.

    Examples:
        >>> import torch
        >>> weight = torch.eye(3, requires_grad=True)
        >>> state = torch.full((3,), 0.1, requires_grad=True)
        >>> final, checkpoints = checkpointed_loop(
        ...     lambda h: torch.tanh(h @ weight), state, 1000
        ... )
        >>> len(checkpoints), list(checkpoints)[:4]
        (31, [31, 62, 93, 124])
        >>> final.sum().backward()
        >>> weight.grad.shape, len(checkpoints)  # freed as they were used
        (torch.Size([3, 3]), 0)
    """
    _check_verification(verify, tolerance)
    seq_length = _whole("seq_length", seq_length)
    num_checkpoints = _whole("num_checkpoints", num_checkpoints)
    leaves, _ = flatten(initial_state)
    feed = _feed(inputs)
    steps = _steps(seq_length, feed, condition)
    step = LoopStep(func, feed, with_index, with_outputs)
    kind = _kind_of(leaves, step)
    # Imported when needed: NumPy's autograd and JAX are optional packages.
    backend = importlib.import_module(f"recoup.loops.{kind}.loop")
    if budget is not None:
        if schedule is not None or num_checkpoints is not None:
            raise UsageError(
                "expected budget= alone, got num_checkpoints or a schedule as well; "
                "the budget chooses the schedule."
            )
        if steps is None:
            raise UsageError(
                "expected a loop of known length with budget=, got a condition; use "
                "num_checkpoints, or Online(slots=...)."
            )
        budget_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
        schedule = backend.fit_schedule(
            step, initial_state, steps, budget_bytes, captures, vjp
        )
    schedule, shows_beginning = _schedule(steps, num_checkpoints, schedule, condition)
    plan = LoopPlan(
        schedule,
        condition=condition,
        most_steps=steps,
        shows_beginning=shows_beginning,
        verify=verify,
        tolerance=tolerance,
        stores=_stores(store, kind),
    )
    final, outputs, checkpoints = backend.run_loop(
        step, initial_state, plan, captures, vjp
    )
    return ((final, outputs) if with_outputs else final), checkpoints


def _whole(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"expected an integer for {name}=, got {value!r}.") from error


def _stores(store: Tier | Sequence[Tier] | None, kind: str) -> tuple[Tier, ...]:
    if store is None:
        return ()
    if kind != "torch":
        raise UsageError(
            f"expected store= with torch tensors only, got {kind} arrays; leave it out."
        )
    return (store,) if isinstance(store, Tier) else tuple(store)


def _check_verification(verify: str, tolerance: float | None) -> None:
    if verify not in ("first", "always", "off"):
        raise UsageError(f'expected verify="first", "always" or "off", got {verify!r}.')
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(
            f"expected tolerance= 0 or more, or None for equal bits, got {tolerance!r}."
        )


def _schedule(
    steps: int | None,
    num_checkpoints: int | None,
    schedule: Schedule | Online | None,
    condition: Callable[[Any], Any] | None,
) -> tuple[Schedule | Online, bool]:
    """Return the schedule, and whether it shows the initial state."""
    if schedule is None:
        if condition is not None:
            wanted = 31 if num_checkpoints is None else num_checkpoints
            return Online(slots=wanted + 1), False
        assert steps is not None, "checked with the arguments"
        count = math.isqrt(steps) if num_checkpoints is None else num_checkpoints
        if count < 0:
            raise UsageError(
                f"expected 0 or more checkpoints, got {count}; give 0 or more, or None "
                "for the square root of the number of steps."
            )
        return Even(steps, count) if count else StoreAll(steps), 0 < steps <= count
    if condition is None and isinstance(schedule, Online):
        raise UsageError(
            f"expected a schedule for {steps} steps, got an Online schedule, which "
            "is for loops of unknown length; use Revolve or Chunked, or give a "
            "condition."
        )
    if condition is not None and not isinstance(schedule, Online):
        raise UsageError(
            f"expected Online(slots=...) or num_checkpoints for a loop with a "
            f"condition, whose length is not known, got {schedule!r}."
        )
    if num_checkpoints is not None:
        raise UsageError(
            "expected num_checkpoints or a schedule, got both; a schedule defines the "
            "number of states, leave num_checkpoints out."
        )
    if not isinstance(schedule, Online) and schedule.steps != steps:
        raise UsageError(
            f"expected a schedule of {steps} steps, as the loop has, got one of "
            f"{schedule.steps} steps."
        )
    return schedule, False


def _feed(inputs: Any) -> Feed | None:
    if inputs is None or isinstance(inputs, (Stacked, Listed)):
        return inputs
    return Stacked(inputs)


def _steps(
    seq_length: int | None, feed: Feed | None, condition: Callable[[Any], Any] | None
) -> int | None:
    if seq_length is not None and seq_length < 0:
        raise UsageError(f"expected 0 or more steps, got seq_length={seq_length}.")
    if feed is None:
        if seq_length is None and condition is None:
            raise UsageError(
                "expected seq_length, inputs or a condition to end the loop, got none "
                "of them."
            )
        return seq_length
    if seq_length is None:
        return feed.length
    if seq_length > feed.length or (seq_length < feed.length and condition is None):
        raise UsageError(
            f"expected inputs for seq_length={seq_length} steps, got inputs for "
            f"{feed.length} steps; leave seq_length out to use them all."
        )
    return seq_length


def _kind_of(leaves: list[Any], step: LoopStep) -> str:
    arrays = [*leaves, *step.fed]
    if any(isinstance(leaf, Tensor) for leaf in arrays):
        return "torch"
    if reach(step.function, kind=Tensor) and not any(
        hasattr(leaf, "dtype") for leaf in arrays
    ):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None and (
        any(isinstance(leaf, jax.Array) for leaf in arrays)
        or reach(step.function, kind=jax.Array)
    ):
        return "jax"
    return "numpy"
