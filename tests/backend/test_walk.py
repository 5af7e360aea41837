"""The walker finds objects wherever a function may have them from."""

import dataclasses
import functools
import itertools
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from recoup.backend.state.attributes import Attributes
from recoup.backend.state.walk import hooks_of, reach, variables_of

LAYERS = [nn.Tanh()]
OWN_MODULE: Any = None


class Plain:
    def __init__(self, module):
        self.module = module

    def run(self, x):
        return self.module(x)


class Slotted:
    __slots__ = ("__module",)  # the name that it gets is another

    def __init__(self, module):
        self.__module = module

    def run(self, x):
        return self.__module(x)


@dataclasses.dataclass(slots=True)
class Data:
    module: object
    unset: object = dataclasses.field(init=False)


class Calling(Plain):
    def __call__(self, x):
        return self.indirect(x)

    def indirect(self, x):
        return LAYERS[0](x)


class OwnList(list):
    """A container that has attributes too."""

    thing: object


class Holder(nn.Module):
    """A module with others that are no parts of it."""

    def __init__(self, module):
        super().__init__()
        self.part = nn.Linear(1, 1)
        self.others = [module]

    def forward(self, x):
        return LAYERS[0](self.others[0](self.part(x)))


def default(thing):
    def function(x, layer=thing):
        return layer(x)

    return function


def keyword_default(thing):
    def function(x, *, layer=thing):
        return layer(x)

    return function


def generator(thing):
    found = (layer for layer in (yield thing))
    yield found


def started(thing):
    made = generator(thing)
    next(made)
    return made


def own_list(thing):
    made = OwnList()
    made.thing = thing
    return made


def class_attribute(thing):
    class Owner:
        shared = thing

        def step(self):
            return self.inner()

        def inner(self):
            return self.shared

    return Owner().step


def static_and_property(thing):
    class Owner:
        @property
        def loss(self):
            return self.helper()

        @staticmethod
        def helper():
            return thing

        def step(self):
            return self.loss

    return Owner().step


def hooked(thing):
    made = nn.Tanh()
    made.register_forward_hook(lambda *_: thing)
    return made


def array_of_objects(thing):
    made = np.empty(2, dtype=object)
    made[1] = thing
    return made


PLACES = {
    "list": lambda t: [t],
    "tuple": lambda t: (1, t),
    "set": lambda t: {t} if t.__hash__ else [t],
    "dictionary": lambda t: {"a": {"b": t}},
    "key": lambda t: {t: 1} if t.__hash__ else {"k": t},
    "ordered dictionary": lambda t: OrderedDict(a=t),
    "mapping proxy": lambda t: types.MappingProxyType({"a": t}),
    "deque": lambda t: deque([t]),
    "own container": lambda t: OwnList([t]),
    "attribute of a container": own_list,
    "object": Plain,
    "namespace": lambda t: types.SimpleNamespace(inside=t),
    "slots": Slotted,
    "dataclass": Data,
    "array of objects": array_of_objects,
    "method": lambda t: Plain(t).run,
    "method of slots": lambda t: Slotted(t).run,
    "method of a list": lambda t: [t].append,
    "attribute of a class": class_attribute,
    "static method and property": static_and_property,
    "closure": lambda t: lambda x: t(x),
    "default": default,
    "keyword default": keyword_default,
    "partial": lambda t: functools.partial(len, t),
    "partial keyword": lambda t: functools.partial(dict, layer=[t]),
    "inner function": lambda t: lambda x: [(lambda: t)() for _ in x],
    "generator expression": lambda t: lambda xs: sum(t(x) for x in xs),
    "generator": started,
    "decorated function": lambda t: torch.no_grad()(lambda x: t(x)),
    "cached function": lambda t: functools.cache(lambda x: t(x)),
    "wrapped function": lambda t: functools.wraps(lambda: t)(lambda: None),
    "compiled": lambda t: torch.compile(lambda x: t(x), backend="eager"),
    "module's list": Holder,
    "module's hook": hooked,
    "sequence": lambda t: nn.Sequential(nn.Tanh(), Holder([t])),
}
HIDDEN = {
    "module": nn.Sigmoid,
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "buffer": lambda: torch.zeros(2),
    "generator": torch.Generator,
    "Python's generator": lambda: random.Random(0),
    "NumPy's generator": lambda: np.random.default_rng(0),
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))]),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_object_is_found_in(place):
    for make in HIDDEN.values():
        hidden = make()
        kept = PLACES[place](hidden)
        found = reach(kept, kind=type(hidden))
        assert any(each is hidden for each in found)


@given(st.lists(st.sampled_from(sorted(PLACES)), max_size=12), st.data())
def test_an_object_is_found_at_any_depth(places, data):
    hidden = HIDDEN[data.draw(st.sampled_from(sorted(HIDDEN)))]()
    thing = hidden
    for place in places:
        thing = PLACES[place](thing)
    assert any(each is hidden for each in reach(thing, kind=type(hidden)))


def test_a_weak_reference_is_not_followed():
    module = nn.Tanh()
    assert reach([weakref.ref(module)], kind=nn.Module) == []


def test_globals_are_found_where_code_names_them():
    assert reach(lambda x: LAYERS[0](x), kind=nn.Module) == LAYERS
    assert reach(lambda xs: [LAYERS[0](x) for x in xs], kind=nn.Module) == LAYERS
    assert reach(Calling(None), kind=nn.Module) == LAYERS
    assert reach(lambda x: x, kind=nn.Module) == []


def test_globals_of_a_named_module_are_found(monkeypatch):
    own: Any = types.ModuleType("a_users_module")
    own.head, own.other = nn.Tanh(), nn.Sigmoid()
    monkeypatch.setitem(globals(), "OWN_MODULE", own)
    assert reach(lambda x: OWN_MODULE.head(x), kind=nn.Module) == [own.head]


def test_parts_of_modules_are_found_once_with_what_else_they_hold():
    module = nn.Sigmoid()
    holder = Holder(module)
    found = reach(holder, holder.part, kind=nn.Module)
    assert len(found) == 4
    assert {id(each) for each in found} == {
        id(each) for each in (holder, holder.part, module, *LAYERS)
    }
    tensors = reach(holder, kind=Tensor)
    assert {id(t) for t in tensors} == {id(p) for p in holder.parameters()}


def test_what_refers_to_itself_is_gone_through_once():
    things: list[object] = [nn.Tanh()]
    things.append(things)
    holder = Plain(things)
    things.append(holder)
    assert reach(things, holder, kind=nn.Module) == things[:1]


def test_a_chain_longer_than_the_recursion_limit_is_followed():
    hidden = nn.Tanh()
    thing: object = hidden
    for _ in range(2 * sys.getrecursionlimit()):
        thing = [thing]
    assert reach(thing, kind=nn.Module) == [hidden]


class LazyMapping(OrderedDict[str, Any]):
    """A mapping that imports something when it is read, as those of transformers."""

    def refuse(self, *args: object) -> Any:
        raise AssertionError("a walk called a method of the user's")

    __iter__ = __len__ = keys = values = items = refuse


class LazyList(list[Any]):
    __iter__ = __len__ = LazyMapping.refuse  # pyright: ignore[reportAssignmentType]


def test_a_method_made_of_a_partial_is_followed():
    """A class of torchao replaces `extra_repr` of a module by one: it has no name."""
    hidden = nn.Tanh()
    method = types.MethodType(functools.partial(max, hidden), object())
    assert list(reach(method, kind=nn.Module)) == [hidden]


def test_a_container_is_read_without_its_own_methods():
    layer, other = nn.Tanh(), nn.ReLU()
    mapping, several = LazyMapping(), LazyList([other])
    OrderedDict.__setitem__(mapping, "layer", layer)
    assert reach([mapping, several], kind=nn.Module) == [layer, other]
    owner = types.SimpleNamespace(mapping=mapping, several=several)
    before = Attributes(owner)
    OrderedDict.__delitem__(mapping, "layer")
    list.clear(several)
    before.restore()
    assert reach(owner, kind=nn.Module) == [layer, other]


def test_code_of_libraries_is_not_followed():
    found = reach(nn.functional.dropout, kind=types.FunctionType)
    assert found == [nn.functional.dropout]
    assert reach("text", 3, torch.ones(3), len, kind=nn.Module) == []


def test_every_object_is_looked_at_once():
    """The work is linear: shared objects do not multiply it."""
    looked = itertools.count()

    class Counting(type):
        def __instancecheck__(cls, thing):
            next(looked)
            return False

    class Never(metaclass=Counting):
        pass

    thing: object = [nn.Tanh()]
    for _ in range(40):
        thing = [thing, thing]
    reach(thing, kind=Never)
    assert next(looked) < 500


def test_hooks_of_tensors_lead_on():
    parameter, momentum = nn.Parameter(torch.ones(1)), {"of": torch.zeros(1)}

    def update(p):
        momentum["of"].add_(p.grad)

    parameter.register_post_accumulate_grad_hook(update)
    assert reach(parameter, kind=Tensor) == [parameter]
    found = reach(*hooks_of(parameter), kind=Tensor)
    assert len(found) == 1
    assert found[0] is momentum["of"]


def test_variables_are_named_in_inner_code_too():
    shift = 2
    found = dict(variables_of(lambda xs: [x * shift + len(LAYERS) for x in xs]))
    assert found == {"shift": 2, "LAYERS": LAYERS}
