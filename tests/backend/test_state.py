"""State that was taken is restored, whatever happened to it in between."""

# Torch types a buffer and a gradient as maybe None.
# pyright: reportOptionalMemberAccess=false

import copy
import dataclasses
import random
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recoup.backend.state.attributes import Attributes, Numbers
from recoup.backend.state.snapshots import (
    Buffers,
    Generators,
    Gradients,
    NotedGradients,
    StateSnapshot,
    WrittenTensors,
)


class TestGradients:
    def test_they_are_taken_off_and_come_back_as_the_same_tensors(self):
        x = torch.ones(2, requires_grad=True)
        x.grad = gradient = torch.arange(2.0)
        gradients = Gradients([x])
        gradients.take_off()
        assert x.grad is None
        x.grad = torch.ones(2)
        x.requires_grad_(False)
        gradients.restore()
        assert x.grad is gradient
        assert gradient.tolist() == [0.0, 1.0]
        assert x.requires_grad

    @pytest.mark.cuda
    def test_their_memory_is_free_meanwhile(self):
        x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
        y = torch.zeros(1 << 19, device="cuda", requires_grad=True)
        x.grad = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
        y.grad = x.grad[: 1 << 19]  # a view of one storage
        address, size = x.grad.untyped_storage()._cdata, x.grad.nbytes
        before = torch.cuda.memory_allocated()
        gradients = Gradients([x, y])
        gradients.take_off()
        assert torch.cuda.memory_allocated() == before - size
        gradients.restore()
        assert torch.cuda.memory_allocated() == before
        assert x.grad.untyped_storage()._cdata == address
        assert torch.equal(x.grad.cpu(), torch.arange(1 << 20, dtype=torch.float32))
        assert torch.equal(y.grad, x.grad[: 1 << 19])

    @pytest.mark.parametrize("change", [None, "dropped", "added", "zeroed"])
    def test_noted_ones_come_back_unless_they_were_changed(self, change):
        x = torch.ones(2, requires_grad=True)
        x.grad = torch.ones(2)
        noted = NotedGradients([x])
        if change == "dropped":
            x.grad = None
            x.grad = torch.zeros(2)
        elif change == "added":
            x.sum().backward()
        elif change == "zeroed":
            x.grad.zero_()
        assert noted.restore() is (change in (None, "dropped"))


def generators():
    return [torch.Generator(), random.Random(0), np.random.default_rng(0)]


def draws(known):
    own, python, numpy = known
    return (
        torch.rand(2, generator=own).tolist(),
        python.random(),
        numpy.random(),
        torch.rand(2).tolist(),
        random.random(),
        np.random.rand(),  # noqa: NPY002
    )


class TestGenerators:
    def test_all_draw_the_same_again(self):
        known = generators()
        states = Generators(own=known)
        first = draws(known)
        assert not states.are_unmoved()
        states.restore()
        assert states.are_unmoved()
        assert draws(known) == first
        states.take()
        second = draws(known)
        states.restore()
        assert draws(known) == second != first

    def test_those_of_a_module_are_found_in_its_containers(self):
        module: Any = nn.Tanh()
        module.own = {"of it": generators()}
        before = StateSnapshot(lambda: [m(1) for m in [module]])
        first = draws(module.own["of it"])
        before.restore()
        assert draws(module.own["of it"]) == first


class TestBuffers:
    def test_contents_and_tensors_come_back_without_a_new_version(self):
        norm = nn.BatchNorm1d(3)
        mean, version = norm.running_mean, norm.running_mean._version
        before = Buffers([norm])
        norm(torch.randn(8, 3))
        norm.running_mean = torch.ones(3)
        norm.register_buffer("late", torch.ones(1))
        before.restore()
        assert norm.running_mean is mean
        assert mean.tolist() == [0.0] * 3
        assert mean._version == version
        assert "late" not in dict(norm.named_buffers())

    def test_memory_of_the_copies_is_used_again(self):
        norm = nn.BatchNorm1d(3)
        before = Buffers([norm])
        copies = [copy for _, group in before._groups for copy in group]
        norm(torch.randn(8, 3))
        before.take()
        assert all(
            one is other
            for one, other in zip(
                copies, (c for _, group in before._groups for c in group), strict=True
            )
        )
        after = copy.deepcopy(norm.state_dict())
        norm(torch.randn(8, 3))
        before.restore()
        assert all(torch.equal(after[k], v) for k, v in norm.state_dict().items())


class TestWrittenTensors:
    def test_momentum_of_a_hook_is_restored_and_what_is_read_is_not_copied(self):
        read, written = torch.ones(3), torch.ones(3)
        seen = WrittenTensors([read, written, written])
        with seen.watched():
            written[:2].add_(read[:2])
        assert len(seen.copies) == 1
        written.add_(1)
        seen.restore()
        assert written.tolist() == [1.0] * 3


@dataclasses.dataclass
class Record:
    count: int = 0
    items: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    count: int = 0
    late: int = dataclasses.field(init=False)


class Refusing(OrderedDict):
    """As the outputs of transformers: it refuses to be changed as a dictionary."""

    def update(self, *args, **kwargs):
        raise TypeError

    def clear(self):
        raise TypeError


def rich_module():
    module: Any = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    module.count, module.flag, module.name = 0, False, "a"
    module.items, module.table = [1, [2, 3]], {"a": {"b": 1}}
    module.members, module.queue = {1, 2}, deque([1, 2], maxlen=3)
    module.empty, module.nothing = {}, []
    module.record, module.slotted = Record(), SlottedRecord()
    module.space, module.counter = SimpleNamespace(a=1), Counter("aab")
    module.refusing = Refusing(a=1)
    module.array = np.zeros(3)
    return module


CHANGES = {
    "count": lambda m: setattr(m, "count", m.count + 1),
    "flag": lambda m: setattr(m, "flag", True),
    "another list": lambda m: setattr(m, "items", [7]),
    "list": lambda m: m.items.append(4),
    "inner list": lambda m: m.items[1].clear() if len(m.items) > 1 else None,
    "dictionary": lambda m: m.table.setdefault("c", 3),
    "inner dictionary": lambda m: m.table["a"].update(b=2),
    "set": lambda m: m.members.add(9),
    "queue": lambda m: m.queue.extend([5, 6]),
    "empty dictionary": lambda m: m.empty.update(x=torch.ones(1)),
    "empty list": lambda m: m.nothing.append(torch.ones(1)),
    "object": lambda m: setattr(m.record, "count", 5),
    "list of an object": lambda m: m.record.items.append(5),
    "slot": lambda m: setattr(m.slotted, "count", 5),
    "late slot": lambda m: setattr(m.slotted, "late", 5),
    "namespace": lambda m: setattr(m.space, "b", 2),
    "counter": lambda m: m.counter.update("c"),
    "refusing dictionary": lambda m: m.refusing.__setitem__("b", 2),
    "array": lambda m: m.array.__setitem__(0, 5),
    "new attribute": lambda m: setattr(m, "cache", torch.ones(2)),
    "deleted": lambda m: vars(m).pop("name", None),
    "training": lambda m: m.eval(),
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(1, 1))),
    "submodule": lambda m: m.add_module("late", nn.Tanh()),
}


def picture(module):
    """Return all that a change may touch, by identity where that matters."""
    own = {k: v for k, v in vars(module).items() if k in ("count", "flag", "name")}
    return copy.deepcopy(
        (
            own,
            sorted(k for k in vars(module) if not k.startswith("_")),
            module.items,
            module.table,
            module.members,
            module.queue,
            module.empty,
            module.nothing,
            module.record,
            module.slotted.count,
            hasattr(module.slotted, "late"),
            module.space,
            module.counter,
            list(module.refusing.items()),
            module.array.tolist(),
            [m.training for m in module.modules()],
            [id(p) for p in module.parameters()],
            [id(m) for m in module.modules()],
        )
    )


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_one_that_the_picture_shows(change):
    module = rich_module()
    before = picture(module)
    CHANGES[change](module)
    assert picture(module) != before


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=8))
def test_attributes_are_restored_after_any_changes(changes):
    module = rich_module()
    items, table = module.items, module.table
    before, known = picture(module), Attributes(module)
    for _ in range(2):
        for change in changes:
            CHANGES[change](module)
        known.restore()
        assert picture(module) == before
        assert module.items is items
        assert module.table is table


def test_hooks_that_were_registered_meanwhile_stay():
    module = rich_module()
    known = Attributes(module)
    module.register_forward_hook(lambda *_: None)
    module.count += 1
    known.restore()
    assert len(module._forward_hooks) == 1
    assert module.count == 0


def test_the_object_of_a_method_is_restored_and_what_functions_close_over_is_not():
    class Trainer:
        def __init__(self):
            self.count = 0

        def step(self):
            self.count += 1
            log.append(self.count)

    log: list[int] = []
    trainer = Trainer()
    known = Attributes(trainer.step, lambda: log)
    trainer.step()
    known.restore()
    assert trainer.count == 0
    assert log == [1]


def test_numbers_keep_nothing_alive():
    module: Any = nn.Tanh()
    module.count, module.output = 1, torch.ones(3)
    known = Numbers(module)
    module.count, module.output = 2, None
    known.restore()
    assert module.count == 1
    assert module.output is None


def test_an_attribute_that_hides_one_of_the_class_goes_when_there_were_none():
    class Counter:
        calls = 0

    counter = Counter()
    before = Attributes(counter)
    counter.calls += 1
    before.restore()
    assert vars(counter) == {}
