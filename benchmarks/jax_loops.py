"""Scans in JAX: plain, with recoup, and with equinox, one program each."""

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harness import Row, Spread, in_turns
from recoup import checkpointed_loop
from recoup.schedules import Chunked, Revolve

Loop = Callable[[Callable[[Any], Any], Any, int], Any]


def scan(step: Callable[[Any], Any], state: Any, steps: int) -> Any:
    return lax.scan(lambda h, _: (step(h), None), state, length=steps)[0]


def nested_scan(step: Callable[[Any], Any], state: Any, steps: int) -> Any:
    """The usual way in JAX: a scan of checkpointed scans, about the square root."""
    length = next(n for n in range(int(steps**0.5), steps + 1) if steps % n == 0)
    inner = jax.checkpoint(lambda h: scan(step, h, length))
    return lax.scan(lambda h, _: (inner(h), None), state, length=steps // length)[0]


def scheduled(
    step: Callable[[Any], Any], state: Any, steps: int, *, schedule: Any
) -> Any:
    return checkpointed_loop(step, state, steps, schedule=schedule)[0]


def by_equinox(
    step: Callable[[Any], Any], state: Any, steps: int, *, slots: int
) -> Any:
    import equinox.internal as eqxi

    # Captured arrays are part of the carried state there; `step` gets them so.
    final = eqxi.while_loop(
        lambda carry: carry[0] < steps,
        lambda carry: (carry[0] + 1, step(carry[1])),
        (0, state),
        max_steps=steps,
        kind="checkpointed",
        checkpoints=slots,
    )
    return final[1]


def measure_jax(
    width: int, batch: int, slots: int, *, steps: int, rounds: int
) -> list[Row]:
    """Measure gradients of all contenders in turns, after compiling them."""
    generator = np.random.default_rng(0)
    matrix = jnp.array(generator.normal(size=(width, width)) * 0.9 / width**0.5)
    state = jnp.array(generator.normal(size=(batch, width)))
    contenders: dict[str, Loop] = {
        "plain scan": scan,
        "nested scan, square root": nested_scan,
        f"recoup revolve, {slots} slots": partial(
            scheduled, schedule=Revolve(steps, slots=slots)
        ),
        f"recoup chunked, {slots} slots, 10 states": partial(
            scheduled, schedule=Chunked(steps, slots=slots, chunk=10)
        ),
    }
    if importlib.util.find_spec("equinox") is not None:
        contenders[f"equinox, {slots} slots"] = partial(by_equinox, slots=slots)
    compiled: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    expected = None
    for name, loop in contenders.items():

        def total(matrix: Any, state: Any, loop: Loop = loop) -> Any:
            return jnp.sum(loop(lambda h: jnp.tanh(h @ matrix), state, steps) ** 2)

        start = time.perf_counter()
        program = jax.jit(jax.grad(total, (0, 1))).lower(matrix, state).compile()
        seconds = time.perf_counter() - start
        found = program(matrix, state)
        expected = found if expected is None else expected
        same = all(bool((a == b).all()) for a, b in zip(found, expected, strict=True))
        compiled[name] = partial(timed, program, matrix, state)
        facts[name] = {
            "compile s": round(seconds, 2),
            "temporary KiB": round(temporary_bytes(program) / 1024, 1),
            "gradients": "bitwise" if same else "rounding",
        }
    rows: list[Row] = []
    for name, runs in in_turns(compiled, warmup=2, rounds=rounds).items():
        spread = Spread.of([1e3 * value for value in runs])
        rows.append(
            {
                "shape": f"{steps} steps, {batch} by {width}",
                "on": jax.devices()[0].platform,
                "loop": name,
                "ms": round(spread.median, 2),
                "least to largest": f"{spread.least:.1f} to {spread.largest:.1f}",
                **facts[name],
            }
        )
    return rows


def temporary_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def timed(program: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start
