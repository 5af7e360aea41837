"""A wave equation stepped in time: exact gradients of the steps, or an adjoint."""

import importlib.util
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, Spread, in_turns
from recoup import checkpointed_loop
from recoup.backend.memory.meters import device_meter
from recoup.schedules import Chunked, Even, Revolve

POINTS = 256
STEP_SECONDS = 1e-3


class Wave(nn.Module):
    """Displacement and velocity on a ring whose speed of sound is to be learnt."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        place = torch.arange(POINTS, dtype=torch.float64, device=device) / POINTS
        self.speed = nn.Parameter(1 + 0.1 * torch.sin(2 * torch.pi * place))
        bump = torch.exp(-200 * (place - 0.5) ** 2)
        self.register_buffer("begin", torch.stack([bump, torch.zeros_like(bump)]))

    def forward(self, _: Tensor, state: Tensor) -> Tensor:
        displacement, velocity = state
        curvature = displacement.roll(1) - 2 * displacement + displacement.roll(-1)
        force = (self.speed**2) * curvature * POINTS**2
        return torch.stack([velocity, force])

    def step(self, state: Tensor) -> Tensor:
        """One step of the classical fourth-order Runge-Kutta method (3/8 rule)."""
        h = STEP_SECONDS
        zero = state.new_zeros(())
        k1 = self(zero, state)
        k2 = self(zero, state + h * k1 / 3)
        k3 = self(zero, state + h * (k2 - k1 / 3))
        k4 = self(zero, state + h * (k1 - k2 + k3))
        return state + h * (k1 + 3 * (k2 + k3) + k4) / 8


def plain(wave: Wave, steps: int) -> Tensor:
    state = wave.begin
    for _ in range(steps):
        state = wave.step(state)
    return state


def scheduled(wave: Wave, steps: int, *, schedule: object) -> Tensor:
    return checkpointed_loop(wave.step, wave.begin, steps, schedule=schedule)[0]


def by_torchdiffeq(wave: Wave, steps: int) -> Tensor:
    from torchdiffeq import odeint_adjoint

    times = torch.tensor([0.0, steps * STEP_SECONDS], dtype=torch.float64)
    options = {"step_size": STEP_SECONDS}
    return odeint_adjoint(wave, wave.begin, times, method="rk4", options=options)[-1]


def gradient(run: Callable[[Wave, int], Tensor], wave: Wave, steps: int) -> Tensor:
    return torch.autograd.grad(run(wave, steps)[0].square().sum(), wave.speed)[0]


def timed(run: Callable[[Wave, int], Tensor], wave: Wave, steps: int) -> float:
    start = time.perf_counter()
    gradient(run, wave, steps)
    return time.perf_counter() - start


def measure_waves(device: torch.device, *, steps: int, rounds: int) -> list[Row]:
    """Measure all contenders in turns; compare gradients with the plain loop's."""
    contenders: dict[str, Callable[[Wave, int], Tensor]] = {
        "plain": plain,
        "recoup even, 20": partial(scheduled, schedule=Even(steps, 20)),
        "recoup revolve, 8 slots": partial(scheduled, schedule=Revolve(steps, slots=8)),
        "recoup chunked, 8 slots, tape 5": partial(
            scheduled, schedule=Chunked(steps, slots=8, chunk=5)
        ),
    }
    if importlib.util.find_spec("torchdiffeq") is not None:
        contenders["torchdiffeq adjoint, rk4"] = by_torchdiffeq
    wave = Wave(device)
    runs = {name: partial(timed, run, wave, steps) for name, run in contenders.items()}
    seconds = in_turns(runs, warmup=1, rounds=rounds)
    expected = gradient(plain, wave, steps)
    rows: list[Row] = []
    for name, run in contenders.items():
        with device_meter(device) as meter:
            before = meter.live_bytes
            found = gradient(run, wave, steps)
            peak_bytes = meter.peak_bytes - before
        error = ((found - expected).norm() / expected.norm()).item()
        spread = Spread.of([1e3 * value for value in seconds[name]])
        rows.append(
            {
                "loop": name,
                "ms": round(spread.median, 2),
                "least to largest": f"{spread.least:.1f} to {spread.largest:.1f}",
                "peak MiB": round(peak_bytes / 2**20, 2),
                "relative error of the gradient": f"{error:.1e}",
            }
        )
    return rows
