"""Reachable modules: found wherever a function may have them from."""

import functools
from collections import deque

import pytest
import torch
from torch import nn

from recoup.backend.reachable import reachable_modules

LAYERS = [nn.Tanh()]


class Plain:
    def __init__(self, module):
        self.module = module

    def run(self, x):
        return self.module(x)


class Slotted:
    __slots__ = ("module",)

    def __init__(self, module):
        self.module = module


class Calling(Plain):
    def __call__(self, x):
        return LAYERS[0](x)


class Holder(nn.Module):
    """A module with others that are no parts of it."""

    def __init__(self, module):
        super().__init__()
        self.part = nn.Linear(1, 1)
        self.others = [module]

    def forward(self, x):
        return LAYERS[0](self.others[0](self.part(x)))


def default(module):
    def function(x, layer=module):
        return layer(x)

    return function


def keyword_default(module):
    def function(x, *, layer=module):
        return layer(x)

    return function


PLACES = {
    "itself": lambda m: m,
    "its forward": lambda m: m.forward,
    "closure": lambda m: lambda x: m(x),
    "list": lambda m: [m],
    "dictionary": lambda m: {"a": {"b": m}},
    "deque": lambda m: deque([m]),
    "object": Plain,
    "slots": Slotted,
    "method": lambda m: Plain(m).run,
    "method of a list": lambda m: [m].append,
    "default": default,
    "keyword default": keyword_default,
    "partial": lambda m: functools.partial(len, m),
    "partial keyword": lambda m: functools.partial(dict, layer=[m]),
    "inner function": lambda m: lambda x: [(lambda: m)() for _ in x],
    "decorated function": lambda m: torch.no_grad()(lambda x: m(x)),
    "cached function": lambda m: functools.cache(lambda x: m(x)),
    "compiled": lambda m: torch.compile(lambda x: m(x), backend="eager"),
    "object in a list in a closure": lambda m: (lambda things: lambda: things)(
        [Plain(m)]
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_module_is_found_in(place):
    module = nn.Sigmoid()
    assert reachable_modules(PLACES[place](module)) == [module]


def test_globals_are_found_where_they_are_named():
    assert reachable_modules(lambda x: LAYERS[0](x)) == LAYERS
    assert reachable_modules(lambda xs: [LAYERS[0](x) for x in xs]) == LAYERS
    assert reachable_modules(Calling(None)) == LAYERS


def test_what_a_module_holds_beside_its_parts_is_found_and_its_parts_are_not():
    module = nn.Sigmoid()
    holder = Holder(module)
    assert reachable_modules(holder, holder.part) == [holder, module, *LAYERS]


def test_what_refers_to_itself_is_gone_through_once():
    things: list[object] = [nn.Tanh()]
    things.append(things)
    assert reachable_modules(things, things) == things[:1]


def test_data_is_not_gone_through():
    assert reachable_modules([nn.Tanh()] * 2000, "text", 3, torch.ones(3), len) == []
