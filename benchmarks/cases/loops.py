"""Time and memory of a checkpointed loop, versus other tools.

Four questions: a recurrence in torch versus torch.utils.checkpoint; a large state on
the device; a scan in JAX versus equinox; a wave equation versus the adjoint of
torchdiffeq. A contender whose package is missing is left out.
"""

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import (
    Row,
    Spread,
    describe_machine,
    in_turns,
    markdown_table,
    write_results,
)
from recoup import checkpointed_loop
from recoup.backend.memory.meters import device_meter
from recoup.schedules import Chunked, Even, Revolve

Step = Callable[[Tensor], Tensor]
Loop = Callable[[Step, Tensor, int], Tensor]


def plain_loop(step: Step, state: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        state = step(state)
    return state


def segments(step: Step, state: Tensor, steps: int, *, count: int) -> Tensor:
    """Checkpoint with torch.utils.checkpoint, segment by segment."""
    length = -(-steps // count)
    for start in range(0, steps, length):
        run = partial(plain_loop, step, steps=min(length, steps - start))
        state = checkpoint(run, state, use_reentrant=False)
    return state


def nested(step: Step, state: Tensor, steps: int, *, leaf: int) -> Tensor:
    """Checkpoint with torch.utils.checkpoint, by halves, down to `leaf` steps."""
    if steps <= leaf:
        return plain_loop(step, state, steps)
    first = steps // 2
    run = partial(nested, step, steps=first, leaf=leaf)
    state = checkpoint(run, state, use_reentrant=False)
    return nested(step, state, steps - first, leaf=leaf)


def scheduled(step: Step, state: Tensor, steps: int, *, schedule: Any) -> Tensor:
    return checkpointed_loop(step, state, steps, schedule=schedule)[0]


def budgeted(step: Step, state: Tensor, steps: int, *, budget: str) -> Tensor:
    return checkpointed_loop(step, state, steps, budget=budget)[0]


class Recurrence:
    """The recurrence that is measured; it counts its steps."""

    def __init__(self, width: int, batch: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        matrix = torch.randn(width, width, generator=generator, dtype=dtype)
        self.matrix = (matrix * 0.9 / width**0.5).to(device).requires_grad_()
        self.bias = torch.zeros(width, dtype=dtype, device=device, requires_grad=True)
        state = torch.randn(batch, width, generator=generator, dtype=dtype)
        self.state = state.to(device).requires_grad_()
        self.device = device
        self.calls = 0

    def step(self, state: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(state @ self.matrix + self.bias)

    def gradients(self, loop: Loop, steps: int) -> tuple[Tensor, ...]:
        final = loop(self.step, self.state, steps)
        inputs = [self.state, self.matrix, self.bias]
        return torch.autograd.grad(final.square().sum(), inputs)


def timed(recurrence: Recurrence, loop: Loop, steps: int) -> float:
    synchronize(recurrence.device)
    start = time.perf_counter()
    recurrence.gradients(loop, steps)
    synchronize(recurrence.device)
    return time.perf_counter() - start


def timed_untaped(recurrence: Recurrence, steps: int) -> float:
    """Return the seconds of the loop without a graph, what an evaluation more costs."""
    synchronize(recurrence.device)
    start = time.perf_counter()
    with torch.no_grad():
        plain_loop(recurrence.step, recurrence.state.detach(), steps)
    synchronize(recurrence.device)
    return time.perf_counter() - start


def measured(recurrence: Recurrence, loop: Loop, steps: int) -> dict[str, Any]:
    """Return evaluations, peak bytes beyond what was there, and the gradients."""
    recurrence.calls = 0
    with device_meter(recurrence.device) as meter:
        before = meter.live_bytes
        gradients = recurrence.gradients(loop, steps)
        peak_bytes = meter.peak_bytes - before
    return {"calls": recurrence.calls, "peak": peak_bytes, "gradients": gradients}


def torch_rows(
    recurrence: Recurrence, steps: int, contenders: Mapping[str, Loop], *, rounds: int
) -> list[Row]:
    """Measure all contenders in turns, and compare their gradients with the plain ones.

    The first contender is the plain loop. Beside the time stands what evaluations alone
    would take: the plain loop, and every evaluation beyond it at the price of one
    without a graph.
    """
    runs = {n: partial(timed, recurrence, run, steps) for n, run in contenders.items()}
    runs["untaped"] = partial(timed_untaped, recurrence, steps)
    seconds = in_turns(runs, warmup=1, rounds=rounds)
    untaped = 1e3 * Spread.of(seconds["untaped"]).median
    expected: tuple[Tensor, ...] | None = None
    base = 0.0
    rows: list[Row] = []
    for name, loop in contenders.items():
        found = measured(recurrence, loop, steps)
        spread = Spread.of([1e3 * value for value in seconds[name]])
        expected = found["gradients"] if expected is None else expected
        base = spread.median if not rows else base
        equal = all(map(torch.equal, found["gradients"], expected))
        again = found["calls"] / steps - 1
        rows.append(
            {
                "loop": name,
                "ms": round(spread.median, 2),
                "least to largest": f"{spread.least:.1f} to {spread.largest:.1f}",
                "times plain": round(spread.median / base, 2),
                "by evaluations": round(1 + again * untaped / base, 2),
                "evaluations": found["calls"],
                "peak MiB": round(found["peak"] / 2**20, 2),
                "gradients": "bitwise" if equal else "rounding",
            }
        )
    return rows


def small_state_rows(device: torch.device, *, rounds: int) -> list[Row]:
    """A recurrence so small that the host decides: 1000 steps, 8 by 64, 10 slots."""
    steps = 1000
    contenders: dict[str, Loop] = {
        "plain": plain_loop,
        "torch checkpoint, 10 segments": partial(segments, count=10),
        "torch checkpoint, 31 segments": partial(segments, count=31),
        "torch checkpoint, nested halves": partial(nested, leaf=16),
        "recoup even, 31": partial(scheduled, schedule=Even(steps, 31)),
        "recoup revolve, 10 slots": partial(
            scheduled, schedule=Revolve(steps, slots=10)
        ),
    }
    for slots, chunk in ((4, 8), (10, 10), (10, 20), (10, 50), (10, 90), (10, 100)):
        contenders[f"recoup chunked, {slots} slots, tape {chunk}"] = partial(
            scheduled, schedule=Chunked(steps, slots=slots, chunk=chunk)
        )
    return torch_rows(Recurrence(64, 8, device), steps, contenders, rounds=rounds)


def large_state_rows(device: torch.device, *, rounds: int) -> list[Row]:
    """A state large enough that the device decides."""
    on_gpu = device.type != "cpu"
    width, batch, steps = (4096, 2048, 200) if on_gpu else (256, 256, 200)
    contenders: dict[str, Loop] = {
        "plain": plain_loop,
        "torch checkpoint, root segments": partial(segments, count=int(steps**0.5)),
        "torch checkpoint, nested halves": partial(nested, leaf=16),
        "recoup even, root": partial(scheduled, schedule=Even(steps, int(steps**0.5))),
        "recoup revolve, 10 slots": partial(
            scheduled, schedule=Revolve(steps, slots=10)
        ),
        "recoup chunked, 10 slots, tape 10": partial(
            scheduled, schedule=Chunked(steps, slots=10, chunk=10)
        ),
        "recoup budget, 20 states": partial(
            budgeted, budget=f"{20 * batch * width * (4 if on_gpu else 8)}B"
        ),
    }
    recurrence = Recurrence(width, batch, device)
    return torch_rows(recurrence, steps, contenders, rounds=min(rounds, 2))


def jax_rows(device: torch.device, *, rounds: int) -> list[Row]:
    """A scan in JAX versus equinox's checkpointed while loop, at equal slots."""
    if importlib.util.find_spec("jax") is None:
        return []
    os.environ.setdefault("JAX_PLATFORMS", device.type)
    from benchmarks.jax_loops import measure_jax

    rows: list[Row] = []
    for width, batch, slots in ((64, 8, 10), (64, 8, 3), (256, 16, 31)):
        rows += measure_jax(width, batch, slots, steps=1000, rounds=rounds)
    return rows


def wave_rows(device: torch.device, *, rounds: int) -> list[Row]:
    """A wave equation: exact gradients here, a continuous adjoint there."""
    from benchmarks.waves import measure_waves

    return measure_waves(device, steps=200, rounds=rounds)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


PARTS: dict[str, tuple[str, Callable[..., list[Row]]]] = {
    "rnn": ("loops-small", small_state_rows),
    "wave": ("loops-wave", wave_rows),
    "large": ("loops-large", large_state_rows),
    "jax": ("loops-jax", jax_rows),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, with commas")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # Loops as small as these measure the CPU; an accelerator only waits.
    processor = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for part in options.parts.split(","):
        theme, measure = PARTS[part]
        where = accelerator or processor if part == "large" else processor
        started = time.perf_counter()
        print(f"{part}, on {where} ...", flush=True)
        rows = measure(where, rounds=options.rounds)
        if not rows:
            print(f"{part}: a package is missing.", flush=True)
            continue
        page = write_results(
            theme,
            rows,
            machine=describe_machine(where),
            settings={
                "rounds": options.rounds,
                "times": "median of interleaved rounds",
            },
            folder=options.out,
        )
        seconds = time.perf_counter() - started
        print(f"{page} after {seconds:.0f} s\n{markdown_table(rows)}\n", flush=True)


if __name__ == "__main__":
    main()
