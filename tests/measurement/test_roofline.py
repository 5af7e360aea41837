"""Estimated times: arithmetic or traffic over a device's figures, the longer one."""

from functools import partial

import pytest
import torch

from recoup.core.device_figures import FIGURES, Figures, figures_of
from recoup.measurement.timing.roofline import Roofline, flops_of, here

SLOW = Figures("slow", 0, 100.0, ((2, 4000.0), (4, 1000.0)), 0.0, "made up")
aten = torch.ops.aten


def seconds(operator, *args):
    line = Roofline(SLOW)
    _, number = line.run(partial(operator, *args))
    assert line.again(partial(operator, *args), number) == number
    return line.seconds(number)


def test_an_elementwise_operator_takes_the_time_of_its_traffic():
    x = torch.empty(10, device="meta")
    assert seconds(aten.exp.default, x) == (40 + 40) / 100
    assert seconds(aten.add.Tensor, x, x.double()) == (40 + 80 + 80) / 100


def test_an_expanded_tensor_is_read_once():
    row = torch.empty(10, device="meta").expand(100, 10)
    assert seconds(aten.exp.default, row) == (40 + 4000) / 100


def test_a_product_takes_the_time_of_its_arithmetic_if_that_is_longer():
    x = torch.empty(400, 400, device="meta")
    assert seconds(aten.mm.default, x, x) == 2 * 400**3 / 1000
    assert seconds(aten.mm.default, x.half(), x.half()) == 2 * 400**3 / 4000
    assert seconds(aten.mm.default, x.double(), x.double()) == 2 * 400**3 / 1000
    thin = torch.empty(1, 400, device="meta")
    assert seconds(aten.mm.default, thin, x) == 4 * (400 + 400**2 + 400) / 100


def test_attention_on_the_cpu_is_counted_as_elsewhere():
    q = torch.empty(2, 3, 16, 8, device="meta")
    forward = partial(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    assert flops_of(forward, q) == 2 * (2 * 2 * 3 * 16 * 16 * 8)


@pytest.mark.parametrize("name", FIGURES)
def test_the_table_is_in_order(name):
    figures = figures_of(name)
    assert figures.name == name
    sizes = [size for size, _ in figures.flops_per_second]
    speeds = [speed for _, speed in figures.flops_per_second]
    assert sizes == sorted(sizes)
    assert speeds == sorted(speeds, reverse=True)
    assert figures.source


def test_the_figures_of_this_cpu_are_positive():
    figures = here()
    assert figures.bytes_per_second > 0
    assert figures.flops_of(4) > figures.flops_of(8) > 0
