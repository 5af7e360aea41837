"""The checkpointed loop: one function for torch tensors, NumPy and JAX arrays."""

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from recoup.backend.state.walk import reach
from recoup.core.units import parse_bytes
from recoup.engine.tiers.protocol import Tier
from recoup.errors import UsageError
from recoup.loops.drive import Checkpoints, LoopPlan, checked_verification, known_length
from recoup.loops.state_trees import flatten
from recoup.loops.steps import Feed, Listed, LoopStep, Stacked
from recoup.loops.torch.run import fit_torch_budget, run_torch
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
    checked_verification(verify, tolerance)
    seq_length = _whole("seq_length", seq_length)
    num_checkpoints = _whole("num_checkpoints", num_checkpoints)
    leaves, _ = flatten(initial_state)
    feed = _feed(inputs)
    steps = _steps(seq_length, feed, condition)
    step = LoopStep(func, feed, with_index, with_outputs)
    kind = _kind_of(leaves, step)
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
        schedule = _fitted(
            kind, step, initial_state, steps, budget_bytes, captures, vjp
        )
    plan = _plan(steps, num_checkpoints, schedule, condition, verify, tolerance)
    plan = replace(plan, stores=_stores(store, kind))
    final, outputs, checkpoints = _run(kind, step, initial_state, plan, captures, vjp)
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


def _plan(
    steps: int | None,
    num_checkpoints: int | None,
    schedule: Schedule | Online | None,
    condition: Callable[[Any], Any] | None,
    verify: str,
    tolerance: float | None,
) -> LoopPlan:
    if condition is None:
        if isinstance(schedule, Online):
            raise UsageError(
                f"expected a schedule for {steps} steps, got an Online schedule, which "
                "is for loops of unknown length; use Revolve or Chunked, or give a "
                "condition."
            )
        assert steps is not None, "checked with the arguments"
        known, shows_beginning = known_length(steps, num_checkpoints, schedule)
        return LoopPlan(
            schedule=known,
            shows_beginning=shows_beginning,
            verify=verify,
            tolerance=tolerance,
        )
    if schedule is not None and not isinstance(schedule, Online):
        raise UsageError(
            f"expected Online(slots=...) or num_checkpoints for a loop with a "
            f"condition, whose length is not known, got {schedule!r}."
        )
    if schedule is not None and num_checkpoints is not None:
        raise UsageError(
            "expected num_checkpoints or a schedule, got both; leave one out."
        )
    wanted = 31 if num_checkpoints is None else num_checkpoints
    online = schedule if schedule is not None else Online(slots=wanted + 1)
    return LoopPlan(
        online=online,
        condition=condition,
        most_steps=steps,
        verify=verify,
        tolerance=tolerance,
    )


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


def _fitted(
    kind: str, step: LoopStep, state: Any, steps: int, budget_bytes: int, *further: Any
) -> Schedule:
    """Return the schedule for a budget; NumPy and JAX are optional packages."""
    if kind == "torch":
        return fit_torch_budget(step, state, steps, budget_bytes, further[0])
    if kind == "numpy":
        from recoup.loops.numpy.loop import fit_numpy_budget

        return fit_numpy_budget(step, state, steps, budget_bytes, *further)
    from recoup.loops.jax.loop import fit_jax_budget

    return fit_jax_budget(step, state, steps, budget_bytes)


def _run(
    kind: str,
    step: LoopStep,
    state: Any,
    plan: LoopPlan,
    captures: Sequence[Any],
    vjp: Any,
) -> tuple[Any, Any, Checkpoints]:
    if kind == "numpy":
        from recoup.loops.numpy.loop import run_numpy

        return run_numpy(step, state, plan, captures, vjp)
    if kind == "jax":
        from recoup.loops.jax.loop import run_jax

        return run_jax(step, state, plan, captures, vjp)
    if vjp is not None:
        raise UsageError(
            "expected vjp= with plain NumPy functions only, got torch tensors, which "
            "torch differentiates by itself; leave it out."
        )
    return run_torch(step, state, plan, captures)
