"""Rounding a mixture: the choice fits, and no exchange of two is faster."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from recoup.planners.linear_program import Guide, System, mixture, near


def make_system(
    seconds: list[list[float]],
    use: list[list[list[float]]],
    limits: list[float],
    *,
    copies: list[list[float]] | None = None,
    third: float = 1.0,
) -> System:
    """Return a program from the seconds and rows of each interval and option."""
    counts = [len(options) for options in seconds]
    owners = np.repeat(np.arange(len(counts)), counts)
    columns = len(owners)
    copy = np.zeros(columns) if copies is None else np.concatenate(copies)
    ones = np.zeros((len(counts), columns + 2))
    ones[owners, np.arange(columns)] = 1.0
    waits = np.zeros((len(limits) + 2, 2))
    waits[-2, 0] = waits[-1, 1] = -1.0
    rows = np.concatenate([np.array(u, dtype=np.float64) for u in use]).T
    return System(
        objective=np.array([*np.concatenate(seconds), 1.0, 1.0]),
        upper=np.hstack([np.vstack([rows, copy, copy]), waits]),
        limits=np.array([*limits, third, 2 * third]),
        ones=ones,
    )


def guide_of(system: System) -> Guide | None:
    """Return the guide from the LP relaxation of a program; None: nothing fits."""
    found = mixture(system)
    if found is None:
        return None
    x, seconds, prices = found
    owner = system.ones[:, :-2].argmax(axis=0)
    cost = system.objective[:-2] + prices @ system.upper[:, :-2]
    least = [cost[owner == n].min() for n in range(len(system.ones))]
    start = [
        int(np.flatnonzero(owner == n)[x[:-2][owner == n].argmax()])
        for n in range(len(system.ones))
    ]
    return Guide(np.array(start), cost - np.array(least)[owner], seconds)


def cost_of(system: System, columns: tuple[int, ...]) -> float:
    """Return the seconds of a choice; infinite: it does not fit."""
    chosen = list(columns)
    if (system.upper[:-2, chosen].sum(axis=1) > system.limits[:-2] + 1e-9).any():
        return float("inf")
    copied = system.upper[-1, chosen].sum()
    waits = np.maximum(copied - system.limits[-2:], 0.0).sum()
    return float(system.objective[chosen].sum() + waits)


def every_choice(system: System) -> list[tuple[int, ...]]:
    owner = system.ones[:, :-2].argmax(axis=0)
    columns = [np.flatnonzero(owner == n).tolist() for n in range(len(system.ones))]
    return list(product(*columns))


@st.composite
def systems(draw: st.DrawFn) -> System:
    intervals = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 3))
    number = st.integers(0, 12)
    seconds, use, copies = [], [], []
    for _ in range(intervals):
        count = draw(st.integers(1, 4))
        seconds.append([float(draw(number)) for _ in range(count)])
        use.append([[draw(number) / 10 for _ in range(rows)] for _ in range(count)])
        copies.append(
            [draw(st.sampled_from([0.0, 0.0, 0.5, 1.5])) for _ in range(count)]
        )
    limits = [draw(st.integers(2, 30)) / 10 for _ in range(rows)]
    return make_system(seconds, use, limits, copies=copies)


@settings(max_examples=200, deadline=None)
@given(system=systems())
def test_the_rounded_choice_fits_and_no_exchange_of_two_is_faster(system):
    guide = guide_of(system)
    if guide is None:
        return
    found = near(system, guide)
    if found is None:
        return
    now = tuple(found.tolist())
    cost = cost_of(system, now)
    assert cost < float("inf")
    assert cost >= guide.bound_seconds - 1e-6
    for other in every_choice(system):
        if sum(a != b for a, b in zip(now, other, strict=True)) <= 2:
            assert cost <= cost_of(system, other) + 1e-6


def knapsack(count: int) -> System:
    generator = np.random.default_rng(3)
    use = generator.integers(1, 100, (count, 6, 2)) / 1000
    seconds = 1.0 / (0.01 + use.sum(axis=2)) + generator.random((count, 6))
    return make_system(seconds.tolist(), use.tolist(), [0.03 * count] * 2)


@pytest.mark.parametrize("count", [8, 16, 24])
def test_the_rounded_choice_is_near_that_of_branch_and_bound(count):
    system = knapsack(count)
    guide = guide_of(system)
    assert guide is not None
    found = near(system, guide)
    assert found is not None
    branched = milp(
        system.objective,
        integrality=np.append(np.ones(system.ones.shape[1] - 2), (0, 0)),
        constraints=[
            LinearConstraint(system.upper, -np.inf, system.limits),
            LinearConstraint(system.ones, 1, 1),
        ],
        options={"node_limit": 2000, "mip_rel_gap": 1e-3},
    )
    assert branched.fun is not None
    best = float(branched.fun)
    cost = cost_of(system, tuple(found.tolist()))
    assert guide.bound_seconds - 1e-9 <= cost <= best * 1.01


def test_an_infeasible_start_is_repaired_or_refused():
    system = make_system([[0.0, 5.0]] * 2, [[[0.8], [0.1]]] * 2, [1.0])
    start = np.array([0, 2])
    found = near(system, Guide(start, np.zeros(4), 0.0))
    assert found is not None
    assert cost_of(system, tuple(found.tolist())) == 5.0
    tight = make_system([[0.0, 5.0]] * 2, [[[0.8], [0.1]]] * 2, [0.1])
    assert near(tight, Guide(start, np.zeros(4), 0.0)) is None
