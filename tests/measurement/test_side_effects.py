"""Side effects of a call: every kind is found, and pure code has none."""

import io
import logging
import random
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from recoup.measurement.tracing.side_effects import SideEffects, call_and_look

SEEN: list[object] = []
TABLE: dict[str, object] = {}
COUNT = 0
STATE: ContextVar[int] = ContextVar("STATE", default=0)
FILE = io.StringIO()


class Base(nn.Module):
    shared: ClassVar[list[object]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.history: list[object] = []
        self.last: Tensor | None = None
        self.register_buffer("mean", torch.zeros(4))
        self.generator = None

    def forward(self, x: Tensor) -> Tensor:
        self.effect(x)
        return self.linear(x).tanh()

    def effect(self, x: Tensor) -> None:
        raise NotImplementedError


def block(effect: Callable[[Any, Tensor], object]) -> Base:
    kind = type("Block", (Base,), {"effect": effect})
    return kind()


def assign_global(self: Base, x: Tensor) -> None:
    global COUNT
    COUNT += 1


def count_calls(self: Base, x: Tensor) -> None:
    self.calls += 1


def keep_tensor(self: Base, x: Tensor) -> None:
    self.last = x


def assign_item(self: Base, x: Tensor) -> None:
    TABLE["x"] = x


def write_buffer(self: Base, x: Tensor) -> None:
    self.get_buffer("mean").add_(1)


def write_argument(self: Base, x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


def draw(self: Base, x: Tensor) -> None:
    torch.rand(2, generator=GENERATOR)


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    "effect",
    [
        assign_global,
        count_calls,
        keep_tensor,
        assign_item,
        write_buffer,
        write_argument,
        draw,
        lambda self, x: print(x.shape),  # noqa: T201
        lambda self, x: FILE.write("x"),
        lambda self, x: sys.stderr.write("x"),
        lambda self, x: logging.getLogger("recoup.test").warning("x"),
        lambda self, x: SEEN.append(1),
        lambda self, x: self.history.append(1),
        lambda self, x: self.shared.append(1),
        lambda self, x: TABLE.update(a=1, b=COUNT, c=x),
        lambda self, x: random.random(),
        lambda self, x: time.time(),
        lambda self, x: STATE.set(1),
        lambda self, x: setattr(self, "calls", 3),
        lambda self, x: torch.save(x, io.BytesIO()),
    ],
)
def test_every_effect_is_found(effect):
    found = SideEffects()
    model = block(effect)
    with found.looking([("block", model)]):
        model(torch.randn(2, 4))
    assert found.reasons["block"]


class Pure(Base):
    """Builds lists and dictionaries of its own, reads attributes, draws numbers."""

    def effect(self, x: Tensor) -> None:
        parts = []
        for each in x.unbind(0):
            scaled = each * self.calls
            parts.append(scaled)
        table = dict.fromkeys(range(3), 0)
        table.update({4: len(parts)})
        torch.stack(parts).sum().item()
        nn.functional.dropout(x, 0.5)
        STATE.get()
        sorted(table)
        with torch.no_grad():
            x.detach().clone().add_(1)


@pytest.mark.parametrize(
    "model",
    [
        Pure(),
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(4)),
        nn.TransformerEncoderLayer(4, 2, batch_first=True),
    ],
)
def test_pure_code_has_none(model):
    found = SideEffects()
    with found.looking([("block", model)]):
        model(torch.randn(2, 3, 4)).sum().backward()
    assert found.reasons == {"block": ""}
    assert "forward" not in vars(model)


def test_a_replaced_forward_is_not_looked_at():
    model = nn.Linear(4, 4)
    model.__dict__["forward"] = lambda x: x
    found = SideEffects()
    with found.looking([("block", model)]):
        model(torch.ones(1))
    assert "replaced" in found.reasons["block"]
    assert "forward" in vars(model)


def test_one_bad_call_of_several_counts():
    model = block(lambda self, x: x.shape[0] > 1 and SEEN.append(x))
    found = SideEffects()
    with found.looking([("block", model)]):
        for rows in (1, 2, 1):
            model(torch.randn(rows, 4))
    assert found.reasons["block"]


def test_the_result_and_a_profile_function_stay():
    def nothing(*_: object) -> None:
        return None

    sys.setprofile(nothing)
    try:
        result, effect = call_and_look(lambda x: [x], (1,), {})
        assert sys.getprofile() is nothing
    finally:
        sys.setprofile(None)
    assert (result, effect) == ([1], "")


def test_an_error_ends_the_looking():
    def fail(self: Base, x: Tensor) -> None:
        raise ValueError("no")

    model = block(fail)
    with pytest.raises(ValueError, match="no"), SideEffects().looking([("b", model)]):
        model(torch.ones(1, 4))
    assert sys.getprofile() is None
    assert "forward" not in vars(model)
