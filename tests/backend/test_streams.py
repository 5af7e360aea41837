"""Copies on the CPU happen at once; what tiers compute is not seen."""

import pytest
import torch

from recoup.backend.autograd.saved_tensors import out_of_sight
from recoup.backend.memory.streams import REACHED, DeviceStreams, NoStreams, streams_of
from tests.support.counting import Operators


def test_on_the_cpu_a_copy_is_done_when_it_returns():
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, NoStreams)
    target = streams.allocate(4)
    mark = streams.copy_out(target, torch.arange(4, dtype=torch.uint8), after=())
    assert mark.query()
    assert target.tolist() == [0, 1, 2, 3]
    assert streams.now() is REACHED


def test_what_runs_out_of_sight_is_seen_by_no_mode_and_no_graph():
    x = torch.ones(3, requires_grad=True)
    with Operators() as operators:
        with torch.autocast("cpu", torch.bfloat16), out_of_sight():
            y = x @ x
        seen = list(operators.names)
        x.sin()
    assert seen == []
    assert operators.names == ["sin.default"]
    assert not y.requires_grad
    assert y.dtype is torch.float32
    assert torch.is_grad_enabled()


@pytest.mark.cuda
def test_copies_keep_the_order_that_they_are_told():
    streams = DeviceStreams(torch.device("cuda", 0))
    source = torch.zeros(1 << 24, dtype=torch.uint8, device="cuda")
    there = torch.empty(1 << 24, dtype=torch.uint8, pin_memory=True)
    torch.cuda._sleep(100_000_000)
    source.fill_(7)
    out = streams.copy_out(there, source, after=(streams.now(),))
    assert not out.query()
    streams.hold_back(out)
    source.fill_(9)
    back = streams.allocate(1 << 24)
    mark = streams.copy_in(back, there, after=(streams.now(), out))
    streams.hold_back(mark)
    assert bool((back == 7).all())
    assert bool((there == 7).all())
