"""Regions hold what replays read of earlier contents, each byte once for each."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recoup import CheckpointScope
from recoup.backend.memory.storages import geometry_of
from recoup.engine.recording.intervals import Intervals, hull_of, runs_of
from recoup.engine.recording.region import STATE_BYTES
from recoup.errors import ChangedTensorError
from tests.support.counting import Alive, Peak
from tests.support.twin import Region, compare, plain

ROWS, COLUMNS = 32, 4
WIDE = 1 << 14
BIG = 1 << 19
always = functools.partial(CheckpointScope, verify="always")
off = functools.partial(CheckpointScope, verify="off")

bounds = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted)
steps = st.lists(
    st.tuples(st.sampled_from(["use", "look", "write", "put", "scale"]), bounds),
    max_size=12,
)


def run(bank: Tensor, x: Tensor, steps: list[Any]) -> Tensor:
    """Read rows of a tensor from outside, for backward or not, and write rows."""
    for kind, (start, stop) in steps:
        if kind == "use":
            # The sum is recomputed in backward from the rows as they were here.
            x = torch.tanh(x * bank[start:stop].sum(0))
        elif kind == "look":
            bank[start:stop].mean(0)
        else:
            with torch.no_grad():
                change(bank, kind, start, stop)
    return x


def change(bank: Tensor, kind: str, start: int, stop: int) -> None:
    if kind == "write":
        bank[start:stop] = start + 0.5
    elif kind == "put":
        bank[torch.arange(start, stop)] = stop - 0.25
    else:
        bank[start:stop].mul_(0.5)


def least_bytes(steps: list[Any]) -> int:
    """Return the bytes of all that is used before the last write, each content once.

    An oracle that goes by rows: the contents of a row are new after each write. What is
    used after the last write is held by reference.
    """
    contents, used = [0] * ROWS, set[tuple[int, int]]()
    writes = [n for n, (kind, _) in enumerate(steps) if kind not in ("use", "look")]
    for number, (kind, (start, stop)) in enumerate(steps):
        rows = range(start, stop)
        if number in writes:
            for row in rows:
                contents[row] = number + 1
        elif kind == "use" and writes and number < writes[-1]:
            used |= {(row, contents[row]) for row in rows}
    return len(used) * WIDE * 4


def without_puts(steps: list[Any]) -> list[Any]:
    """Return the steps whose writes lie in one interval of memory each."""
    return [step for step in steps if step[0] != "put"]


@given(steps)
def test_writes_to_rows_of_a_tensor_from_outside_are_bitwise_the_twins(steps):
    def step(region: Region) -> dict[str, Any]:
        bank = torch.linspace(0, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS)
        x = torch.linspace(-1, 1, COLUMNS, requires_grad=True)
        with region("rows"):
            y = run(bank, x, steps)
        loss = y.sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
        return {"first": first, "second": second, "bank": bank}

    assert compare(step, always) == []
    assert compare(nested(step), always) == []


def nested(step: Any) -> Any:
    def around(region: Region) -> Any:
        with region("outer"):
            return step(region)

    return around


@given(steps.map(without_puts))
def test_no_more_is_held_than_what_is_used_and_overwritten(steps):
    bank = torch.ones(ROWS, WIDE)
    assert bank.nbytes > STATE_BYTES  # smaller ones are copied whatever happens
    x = torch.linspace(-1, 1, WIDE, requires_grad=True)
    with Alive() as alive:
        with off("rows"):
            y = run(bank, x, steps)
        held = alive.total_bytes - (0 if y is x else y.nbytes)
    numbers = 4 * len(steps)  # the zero-dimensional tensors that writes take
    assert held <= least_bytes(steps) + numbers


def bank_of(context: Any, write: Any) -> int:
    """Return the bytes alive at the peak of a loop that reads and writes a bank."""
    w = torch.eye(8, requires_grad=True)
    bank = torch.ones(BIG // 8, 8)
    x, most = torch.ones(16, 8), 0
    with Alive() as alive:
        with context("bank"):
            for place in range(16):
                x = torch.tanh(x @ w)
                with torch.no_grad():
                    bank[:1000].mean(0)
                    write(bank, place, x)
                most = max(most, alive.total_bytes)
        most = max(most, alive.total_bytes)
        x.sum().backward()
    return most


def slice_write(bank: Tensor, place: int, x: Tensor) -> None:
    bank[place * 16 : (place + 1) * 16] = x


def put_write(bank: Tensor, place: int, x: Tensor) -> None:
    bank[torch.arange(place * 16, (place + 1) * 16)] = x


def copy_write(bank: Tensor, place: int, x: Tensor) -> None:
    bank.index_copy_(0, torch.arange(place * 16, (place + 1) * 16), x)


@pytest.mark.parametrize("write", [slice_write, put_write, copy_write])
def test_a_bank_that_is_read_and_written_is_not_copied(write):
    written = 16 * 16 * 8 * 4
    peak = bank_of(off, write)
    # The parts written, twice with their indices, and sixteen small activations.
    assert peak < 6 * written < BIG


def test_a_bank_whose_reads_are_replayed_is_copied_once():
    w = torch.eye(8, requires_grad=True)
    bank = torch.rand(BIG // 8, 8)
    x = torch.ones(16, 8)
    with Alive() as alive:
        with off("bank"):
            for place in range(16):
                x = torch.tanh(x @ w * bank.mean(0))
                with torch.no_grad():
                    slice_write(bank, place, x)
        assert alive.total_bytes < 1.2 * bank.nbytes
        x.sum().backward()


def test_writes_without_reads_between_them_are_kept_once():
    w = torch.eye(8, requires_grad=True)
    bank = torch.rand(BIG // 8, 8)
    with Alive() as alive, off("bank"):
        x = torch.tanh(w * bank.mean(0))
        for place in range(8):
            bank.mul_(0.5)
            bank[:, place].add_(1)
        assert alive.total_bytes < 1.2 * bank.nbytes
    x.sum().backward()


OUTPUTS = {
    "rows": lambda out, t, row: out[t].copy_(row),
    "columns": lambda out, t, row: out.T[t].copy_(row[:32]),
    "blocks": lambda out, t, row: out[t, :16].copy_(row[:16]),
}


@pytest.mark.parametrize("fill", OUTPUTS)
def test_an_output_that_is_filled_while_it_is_read_is_recomputed(fill):
    def step(region: Region) -> dict[str, Any]:
        x = torch.linspace(-1, 1, 32 * 32).reshape(32, 32)
        w = torch.ones(1, requires_grad=True)
        with region("scan"):
            out = torch.empty(32, 32)
            lines = out.T if fill == "columns" else out
            with torch.no_grad():
                for t in range(32):
                    before = lines[t - 1, :16].sum() if t else 0
                    OUTPUTS[fill](out, t, x[t] + before)
            y = (lines[:, :16] * w).sin()
        y.sum().backward()
        return {"w": w.grad, "y": y}

    assert compare(step, always) == []
    assert kept_of(step) == set()


def peak_of_scan(context: Any, holder: list[Tensor] | None = None) -> int:
    """Return the most bytes of a step that fills an output, which a list may hold."""
    x = torch.rand(64, 256)
    w = torch.ones(1, requires_grad=True)

    def forward() -> Tensor:
        with context("scan"):
            out = torch.empty(64, 256)
            with torch.no_grad():
                for t in range(64):
                    out[t] = x[t] * 0.5 + (out[t - 1] if t else 0)
            if holder is not None:
                holder.append(out)
            return (out * w).sin().sum()

    with Peak() as peak:
        forward().backward()
    return peak.peak_bytes


def test_an_output_that_is_filled_while_it_is_read_takes_no_more_than_the_plain_step():
    assert peak_of_scan(off) <= peak_of_scan(plain)


def test_an_output_that_the_user_holds_is_made_once_more_and_no_other():
    output_bytes = 64 * 256 * 4
    assert peak_of_scan(off, []) <= peak_of_scan(plain, []) + output_bytes


def kept_of(step: Any) -> set[str]:
    scopes: list[CheckpointScope] = []

    def region(name: str) -> CheckpointScope:
        scopes.append(CheckpointScope(name, verify="off"))
        return scopes[-1]

    step(region)
    return set(scopes[0].kept_operators)


def test_memory_that_nobody_was_seen_to_fill_is_still_kept():
    def step(region: Region) -> dict[str, Any]:
        w = torch.ones(1, requires_grad=True)
        with region("hidden"):
            out = torch.empty(8, 8)
            out[:4] = 1
            out.numpy()[4:] = 2  # no operator
            y = (out * w).sin()
        y.sum().backward()
        return {"w": w.grad, "y": y}

    assert compare(step, always) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 20))))
def test_intervals_are_sets_of_bytes(changes):
    ours, expected = Intervals(), set[int]()
    for adds, start, stop in changes:
        span = set(range(start, stop))
        (ours.add if adds else ours.remove)(start, stop)
        expected = expected | span if adds else expected - span
        assert {n for a, b in ours for n in range(a, b)} == expected
        assert ours.covers(start, stop) == (span <= expected)
        inside = {n for a, b in ours.within(start, stop) for n in range(a, b)}
        outside = {n for a, b in ours.gaps(start, stop) for n in range(a, b)}
        assert (inside, outside) == (span & expected, span - expected)


@given(st.data())
def test_runs_are_the_elements_of_a_tensor(data):
    size = st.integers(1, 4)
    tensor = torch.arange(4 * 4 * 4).reshape(4, 4, 4)
    for dim in range(3):
        start = data.draw(st.integers(0, 3))
        tensor = tensor.narrow(dim, start, min(data.draw(size), 4 - start))
    if data.draw(st.booleans()):
        tensor = tensor.transpose(0, 2)
    runs = runs_of(tensor)
    assert runs is not None
    found = sorted(n // 8 for start, stop in runs for n in range(start, stop, 8))
    assert found == sorted(tensor.flatten().tolist())
    assert hull_of(geometry_of(tensor)) == (8 * found[0], 8 * found[-1] + 8)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_later_write_to_what_an_inner_region_has_written_is_seen(is_transposed):
    """Also if it is too large to be copied: the region around it holds the rest."""
    weight = torch.randn(400, 400, requires_grad=True)
    x = torch.randn(400, 400, dtype=torch.float64)
    with CheckpointScope("outer", verify="off"):
        with CheckpointScope("inner", verify="off"):
            y = ((x * 1.5) * weight).sin()
            x[:, 1:].mul_(2)
        if is_transposed:
            x.t_()
    x.mul_(3)
    with pytest.raises(ChangedTensorError, match="changed in place"):
        y.sum().backward()


def test_a_small_tensor_that_is_transposed_after_a_write_is_copied():
    def step(region: Region) -> dict[str, Any]:
        weight = torch.linspace(-1, 1, 4, requires_grad=True)
        x = torch.arange(4.0).view(2, 2)
        with region("region"):
            x.mul_(2)
            y = weight.view(2, 2) * (x * 1.5).exp()
            x.t_()
        x.mul_(3)
        y.sum().backward()
        return {"weight": weight.grad, "x": x}

    assert compare(step, always) == []
