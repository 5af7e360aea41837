"""Gradients of ordinary functions, their loops checkpointed by source rewriting."""

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from recoup.errors import UnsupportedError, UsageError
from recoup.loops.rewriting.runtime import LoopOptions, Runtime
from recoup.loops.rewriting.source import Rewritten, rewrite
from recoup.loops.state_trees import flatten, unflatten

Checkpoint = bool | int | Mapping[str, Any]


def grad(
    fn: Callable[..., Any],
    wrt: int | Sequence[int] = 0,
    *,
    checkpoint: Checkpoint = False,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of `fn`.

    It works on torch tensors, NumPy arrays (with `recoup[numpy]`; `numpy` in the
    function is replaced by `autograd.numpy`) and JAX arrays. A non-scalar result is
    summed. Unlike `torch.func.grad` it supports checkpointed loops and regions.

    With `checkpoint`, the source of `fn` is rewritten so that its `for` and `while`
    loops become checkpointed loops: with several variables, nested, with `if`, `break`,
    `continue`, `return`, over any finite iterable, and with lists that are appended to.
    The result has the attribute `source`, the rewritten source. Loops in functions that
    `fn` calls are not rewritten.

    Args:
        fn: The function. It must not depend on side effects of its loops.
        wrt: The positional arguments to differentiate by: a number, or several.
        checkpoint: False: loops run plain. True: the square root of the number of steps
            is held. A number: the number of states to hold. A mapping of options:
            `num_checkpoints`; `strategy`, one of "auto", "revolve", "dynamic" and
            "none"; `memory_budget` in bytes; `min_loop_size`, 100 by
            default: shorter `for` loops run plain; `on_unsupported`, "warn" or "raise";
            `enabled`.

    Returns:
        A function of the same arguments; it returns a gradient, or a tuple of them.

    Raises:
        UsageError: An unknown option.
        UnsupportedError: The source cannot be read, or, with `on_unsupported="raise"`,
            a loop cannot be rewritten. By default such a loop runs plain, and a warning
            names its line.

    Examples:
        >>> def model(x, w):
        ...     for _ in range(3):
        ...         x = torch.sin(x * w)
        ...     return x
        >>> derivative = grad(model, wrt=(0, 1))
        >>> x, w = torch.tensor(0.5), torch.tensor(2.0)
        >>> [round(float(g), 4) for g in derivative(x, w)]
        [0.1958, -0.277]
    """
    options = _options(fn, checkpoint)
    places = (wrt,) if isinstance(wrt, int) else tuple(wrt)
    if not places:
        raise UsageError("expected at least one argument in wrt=, got none.")
    function, source = fn, None
    if options.enabled:
        runtime = Runtime(options)
        rewritten = rewrite(fn, runtime)
        _report(options.name, rewritten, runtime)
        function, source = rewritten.function, rewritten.source

    @functools.wraps(fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        _check_places(places, args, fn)
        found = _differentiated(function, places, args, kwargs)
        return found[0] if isinstance(wrt, int) else tuple(found)

    setattr(gradient, "source", source)  # noqa: B010 (a function has no such field)
    return gradient


def grad_with_checkpointing(
    fn: Callable[..., Any],
    *,
    num_checkpoints: int | None = None,
    wrt: int | Sequence[int] = 0,
    **options: Any,
) -> Callable[..., Any]:
    """Return the gradient of a function whose loops are checkpointed.

    The same as `grad(fn, wrt, checkpoint={"num_checkpoints": ..., ...})`.

    Args:
        fn: The function.
        num_checkpoints: States to hold; None for the square root of the steps.
        wrt: The positional arguments to differentiate by.
        **options: Further options of `grad`'s `checkpoint`.

    Examples:
        >>> from recoup.loops.gradients import example
        >>> derivative = grad_with_checkpointing(example, num_checkpoints=31)
        >>> round(float(derivative(torch.tensor(0.5), torch.tensor(0.999))), 4)
        0.0015
        >>> "run_for" in derivative.source  # readable Python
        True
    """
    return grad(fn, wrt, checkpoint={"num_checkpoints": num_checkpoints, **options})


def example(x: Any, w: Any) -> Any:
    """Return the sine, iterated a thousand times: an example of a loop."""
    for _ in range(1000):
        x = torch.sin(x * w)
    return x


def _options(fn: Callable[..., Any], checkpoint: Checkpoint) -> LoopOptions:
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if isinstance(checkpoint, bool):
        return LoopOptions(name, enabled=checkpoint)
    if isinstance(checkpoint, int):
        return LoopOptions(name, num_checkpoints=checkpoint)
    if not isinstance(checkpoint, Mapping):
        raise UsageError(
            f"expected True, False, a number or a mapping for checkpoint=, got "
            f"{checkpoint!r}."
        )
    known = [field.name for field in fields(LoopOptions) if field.name != "name"]
    unknown = sorted(set(checkpoint) - set(known))
    if unknown:
        raise UsageError(
            f"expected an option of checkpoint= among {', '.join(known)}, got "
            f"{unknown[0]!r}."
        )
    return LoopOptions(name, **checkpoint)


def _report(name: str, rewritten: Rewritten, runtime: Runtime) -> None:
    if not rewritten.loops:
        runtime.refuse(f"{name!r} has no loop to checkpoint.")
    for loop in rewritten.loops:
        if loop.fault is not None:
            runtime.refuse(
                f"the loop at line {loop.line} of {name!r} is not checkpointed and "
                f"runs plain: {loop.fault}. Change it, or call checkpointed_loop."
            )


def _check_places(
    places: Sequence[int], args: Sequence[Any], fn: Callable[..., Any]
) -> None:
    for place in places:
        if not 0 <= place < len(args):
            name = getattr(fn, "__qualname__", "function")
            raise UsageError(
                f"wrt= names positional argument {place} of {name!r}, but {len(args)} "
                "were given; pass it by position."
            )


def _differentiated(
    fn: Callable[..., Any],
    places: Sequence[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> list[Any]:
    """Return the gradients of the arguments at some places, by their library."""
    given = [args[place] for place in places]
    leaves, _ = flatten(given)
    jax = sys.modules.get("jax")
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        differentiate = _by_torch
    elif jax is not None and any(isinstance(leaf, jax.Array) for leaf in leaves):
        differentiate = _by_jax
    else:
        differentiate, fn = _by_autograd, _with_traced_numpy(fn)

    def call(*values: Any) -> Any:
        changed = list(args)
        for place, value in zip(places, values, strict=True):
            changed[place] = value
        return fn(*changed, **kwargs)

    return differentiate(call, given)


def _by_torch(call: Callable[..., Any], given: list[Any]) -> list[Any]:
    leaves, structure = flatten(given)
    with torch.enable_grad():
        watched = [
            leaf.detach().requires_grad_() if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        result = call(*unflatten(structure, watched))
        found_leaves, _ = flatten(result)
        results = [leaf for leaf in found_leaves if isinstance(leaf, Tensor)]
        if not results:
            raise UsageError(
                f"expected a function that returns tensors, got "
                f"{type(result).__name__}."
            )
    inputs = [leaf for leaf in watched if isinstance(leaf, Tensor)]
    asked = [leaf for leaf in results if leaf.requires_grad]
    ones = [torch.ones_like(leaf) for leaf in asked]
    found = iter(
        torch.autograd.grad(asked, inputs, ones, materialize_grads=True)
        if asked
        else [torch.zeros_like(leaf) for leaf in inputs]
    )
    gradients = [next(found) if isinstance(x, Tensor) else None for x in watched]
    return unflatten(structure, gradients)


def _by_autograd(call: Callable[..., Any], given: list[Any]) -> list[Any]:
    import autograd
    import autograd.numpy

    make: Any = autograd.make_vjp
    traced_numpy: Any = autograd.numpy
    pull, result = make(call, tuple(range(len(given))))(*given)
    return list(pull(traced_numpy.ones_like(result)))


def _by_jax(call: Callable[..., Any], given: list[Any]) -> list[Any]:
    import jax

    result, pull = jax.vjp(call, *given)
    return list(pull(jax.tree.map(jax.numpy.ones_like, result)))


def _with_traced_numpy(fn: Any) -> Any:
    """Return the function with NumPy replaced by autograd's among its globals."""
    try:
        import autograd.numpy as traced_numpy
    except ImportError as error:
        raise UnsupportedError(
            "expected HIPS autograd for the gradient of a NumPy function, got none; "
            "install it with: pip install 'recoup[numpy]'."
        ) from error
    numpy = sys.modules.get("numpy")
    if not isinstance(fn, types.FunctionType):
        return fn
    named = {n: traced_numpy for n, v in fn.__globals__.items() if v is numpy}
    if not named:
        return fn
    made = types.FunctionType(
        fn.__code__,
        {**fn.__globals__, **named},
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    made.__kwdefaults__ = fn.__kwdefaults__
    return made
