"""The range report: the values that a format would lose, their place and direction."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recoup import CheckpointScope
from recoup.errors import UsageError
from recoup.precision import RangeMonitor
from tests.support.twin import leftovers


class Exploding(nn.Module):
    """Its second layer is too large for float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        large = nn.Linear(4, 4)
        nn.init.constant_(large.weight, 1e6)
        self.inner = nn.Sequential(large, nn.Tanh())

    def forward(self, x):
        return self.inner(self.first(x).abs() + 1)


def watched(factor: float = 1.0, precision: str = "fp16"):
    model = Exploding()
    with RangeMonitor(precision) as monitor:
        (model(torch.ones(2, 4)).mean() * factor).backward()
    return monitor.report()


def test_an_overflow_is_located():
    report = watched()
    (first, *_) = report.overflowing
    assert (first.module, first.in_backward) == ("inner.0", False)
    assert "addmm" in first.operator
    assert first.overflows == first.elements == 8
    assert first.largest > 65504
    assert "inner.0" in str(report)


def test_vanishing_gradients_are_found_in_backward():
    rows = watched(1e-9).underflowing
    assert rows
    assert any(row.in_backward for row in rows)
    assert all(row.smallest < 6e-8 for row in rows)


def test_a_suitable_scale_prevents_vanishing_gradients():
    def step(scale):
        layer, x = nn.Linear(4, 4), torch.ones(2, 4)
        with RangeMonitor("fp16") as monitor:
            (layer(x).sum() * 1e-9 * scale).backward()
        backward = [row for row in monitor.report().rows if row.in_backward]
        return sum(row.underflows for row in backward)

    assert step(1.0) > 0
    assert step(2.0**16) == 0


def test_bfloat16_has_the_range_of_float32():
    assert not watched(1e-9, "bf16").overflowing
    assert not watched(1e-9, "bf16").underflowing


def test_in_float16_the_infinity_itself_is_found():
    model = Exploding()
    with RangeMonitor("fp16") as monitor, torch.autocast("cpu", torch.float16):
        model(torch.ones(2, 4))
    (first, *_) = monitor.report().overflowing
    assert first.module == "inner.0"
    assert first.largest <= 65504


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_the_counts_equal_those_of_the_conversion(values):
    tensor = torch.tensor(values)
    with RangeMonitor("fp16") as monitor:
        result = tensor * 1.0
    (row,) = monitor.report().rows
    half = result.half()
    assert row.overflows == int((~half.isfinite()).sum())
    assert row.underflows == int(((half == 0) & (result != 0)).sum())
    assert row.elements == len(values)


def test_runs_of_one_operator_are_added_up():
    layer = nn.Linear(3, 3)
    with RangeMonitor() as monitor, torch.no_grad():
        for _ in range(3):
            layer(torch.full((1, 3), 1e-12))
    products = [row for row in monitor.report().rows if "addmm" in row.operator]
    assert [row.elements for row in products] == [9]


def test_it_changes_nothing_and_leaves_nothing_behind():
    gradients = []
    for watch in (False, True):
        torch.manual_seed(0)
        model = Exploding()
        x = torch.randn(2, 4)
        with RangeMonitor() if watch else torch.enable_grad(), CheckpointScope("both"):
            out = model(x)
        out.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert list(leftovers()) == []


def test_a_specific_format_is_required():
    with pytest.raises(UsageError, match="expected one format"):
        RangeMonitor("auto")
