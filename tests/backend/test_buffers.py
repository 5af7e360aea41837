"""Buffers found quickly are those that torch finds."""

import torch
from torch import nn

from recoup.backend.state.snapshots import buffer_slots, buffers_in


class Odd(nn.Module):
    """Shares a part, has buffers that are None or not to be saved, and a cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.ones(2))
        self.register_buffer("missing", None)
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.norm = nn.BatchNorm1d(2)
        self.list = nn.ModuleList([self.norm, nn.Sequential(nn.BatchNorm2d(3))])
        self.absent: nn.Module | None
        self.register_module("absent", None)
        self.list.append(self)


def test_they_are_torchs_each_once():
    model = Odd()
    found = buffers_in(buffer_slots(model.modules()))
    assert {id(buffer) for buffer in found} == {id(b) for b in model.buffers()}
    assert len(found) == len(list(model.buffers())) == 8


def test_a_buffer_that_is_replaced_is_found():
    model = Odd()
    model.own = torch.zeros(2)
    found = buffers_in(buffer_slots(model.modules()))
    assert any(buffer is model.own for buffer in found)
