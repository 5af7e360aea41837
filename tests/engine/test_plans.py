"""Applied plans: regions begin and end where the plan says, gradients stay."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from recoup import (
    Action,
    CheckpointScope,
    Plan,
    apply_plan,
    checkpoint_module,
    uncheckpoint_module,
)
from recoup.core.plan import Held, Place, Span
from recoup.engine.applied.applied_plan import Applied, digest_of
from recoup.engine.applied.planned_runs import Cuts
from recoup.engine.recording.active import open_regions
from recoup.engine.recording.observers import subscribe, unsubscribe
from recoup.errors import PlanError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.narrow(torch.tanh(self.wide(x))))


class Model(nn.Module):
    def __init__(self, layers=3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


class Watching:
    """Notes the names of the regions that run."""

    def __init__(self):
        self.names = []

    def began(self, region):
        self.names.append(region.name)

    def ended(self, region):
        pass

    def __enter__(self):
        subscribe(self)
        return self

    def __exit__(self, *_):
        unsubscribe(self)


def enter(name, call=0):
    return Place(name, call, True)


def leave(name, call=0):
    return Place(name, call, False)


def gradients(model, x):
    torch.manual_seed(0)
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters()]


KEPT = (
    Held("aten.addmm.default", 0, 256, Action.KEEP),
    Held("aten.addmm.default", 1, 128, Action.OFFLOAD),
)
PLANS = {
    "each layer": tuple(
        Span(enter(f"layers.{i}"), leave(f"layers.{i}")) for i in range(3)
    ),
    "two and a half": (Span(enter(""), enter("layers.1.narrow")),),
    "with holds": (Span(enter(""), leave("layers.2"), KEPT),),
    "nested": (
        Span(
            enter(""),
            leave("layers.1"),
            inner=(
                Span(enter("layers.0"), leave("layers.0")),
                Span(leave("layers.0"), leave("layers.1"), KEPT),
            ),
        ),
        Span(leave("layers.1"), leave("")),
    ),
    "never ends": (Span(enter("layers.2"), leave("layers.0")),),
    "never begins": (Span(enter("layers.0", 7), leave("layers.0", 7)),),
    "nothing": (),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_plan_changes_a_bit(name, dtype):
    model = Model().to(dtype)
    x = torch.randn(8, 4, dtype=dtype)
    plain = gradients(model, x)
    applied = apply_plan(model, Plan(PLANS[name]), verify="always")
    planned = gradients(model, x)
    applied.remove()
    assert all(map(torch.equal, plain, planned))
    assert open_regions() == []


@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", ["each layer", "two and a half", "nested", "nothing"])
def test_a_model_that_is_compiled_afterwards_keeps_its_plan(name, in_place):
    torch.compiler.reset()
    model, x = Model(), torch.randn(8, 4)
    plain = gradients(model, x)
    applied = apply_plan(model, Plan(PLANS[name]), verify="always")
    with Watching() as seen:
        gradients(model, x)
    if in_place:
        model.compile(backend="eager")
    compiled = model if in_place else torch.compile(model, backend="eager")
    for _ in range(2):
        with Watching() as compiled_seen:
            found = gradients(compiled, x)
        assert compiled_seen.names == seen.names
        assert all(map(torch.equal, plain, found))
    applied.remove()
    with Watching() as none:
        assert all(map(torch.equal, plain, gradients(compiled, x)))
    assert none.names == []
    assert open_regions() == []


def test_regions_are_those_of_the_plan():
    model = Model()
    applied = apply_plan(model, Plan(PLANS["nested"]))
    with Watching() as seen:
        model(torch.ones(2, 4))
    applied.remove()
    assert seen.names == [
        "the start of the model to the end of layers.1",
        "layers.0",
        "the end of layers.0 to the end of layers.1",
        "the end of layers.1 to the end of the model",
    ]


def test_a_module_that_is_called_again_is_told_by_its_call():
    model = nn.Sequential()
    layer = Layer()
    model.append(layer)
    twice = nn.Sequential(model, model)
    applied = apply_plan(twice, Plan((Span(enter("0.0", 1), leave("0.0", 1)),)))
    with Watching() as seen:
        twice(torch.ones(2, 4))
    applied.remove()
    assert seen.names == ["0.0 (call 2)"]


def test_without_gradients_nothing_runs_in_regions():
    model = Model()
    applied = apply_plan(model, Plan(PLANS["each layer"]))
    with Watching() as seen, torch.no_grad():
        model(torch.ones(2, 4))
    applied.remove()
    assert seen.names == []


def test_taking_it_off_leaves_nothing():
    model = Model()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    keys = list(model.state_dict())
    applied = apply_plan(model, Plan(PLANS["nested"]))
    assert list(model.state_dict()) == keys
    applied.remove()
    for name, module in model.named_modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert set(module.__dict__) == set(before[name])


def test_an_exception_leaves_no_region_open():
    model = Model()
    applied = apply_plan(model, Plan(PLANS["nested"]))
    handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4))
    assert open_regions() == []
    handle.remove()
    x = torch.randn(8, 4)
    planned = gradients(model, x)
    applied.remove()
    assert all(map(torch.equal, gradients(model, x), planned))


def test_a_scope_that_crosses_a_boundary_wins():
    class Crossing(Model):
        def forward(self, x):
            with CheckpointScope("mine"):
                x = self.layers[1](self.layers[0](x))
            return self.head(self.layers[2](x)).sum()

    model = Crossing()
    x = torch.randn(8, 4)
    plain = gradients(model, x)
    places = [enter(""), enter("layers.1"), enter("layers.2"), leave("")]
    spans = tuple(Span(a, b) for a, b in itertools.pairwise(places))
    applied = apply_plan(model, Plan(spans))
    assert all(map(torch.equal, gradients(model, x), plain))
    applied.remove()
    assert open_regions() == []


def test_a_scope_ends_the_regions_that_a_plan_began_in_it():
    class Inside(Model):
        def forward(self, x):
            for layer in self.layers:
                with CheckpointScope("mine"):
                    x = layer(x)
            return self.head(x).sum()

    model = Inside()
    x = torch.randn(8, 4)
    plain = gradients(model, x)
    across = Span(enter("layers.0.narrow"), enter("layers.1.narrow"))
    for plan in (Plan((across,)), Cuts(("layers.0.narrow", "layers.2"))):
        applied = Applied(model, plan)
        assert all(map(torch.equal, gradients(model, x), plain))
        applied.remove()
        assert open_regions() == []


def test_cuts_run_everything_in_regions():
    model = Model()
    x = torch.randn(8, 4)
    plain = gradients(model, x)
    applied = Applied(model, Cuts(("layers.0", "layers.1", "layers.2")))
    with Watching() as seen:
        cut = gradients(model, x)
    applied.remove()
    assert all(map(torch.equal, plain, cut))
    assert len(seen.names) == 7


def followed(model):
    """Return the paths of the parts that have hooks."""
    parts = {name: part for name, part in model.named_modules() if name}
    return {
        name
        for name, part in parts.items()
        if part._forward_hooks or part._forward_pre_hooks
    }


def test_only_modules_that_a_plan_names_are_followed():
    model = Model()
    x = torch.randn(8, 4)
    plain = gradients(model, x)
    plans = [
        Plan((Span(enter(f"layers.{n}.wide"), leave(f"layers.{n}.narrow")),))
        for n in range(2)
    ]
    chosen = iter([0, 0, 1, 0])
    applied = Applied(model, lambda *_: (plans[next(chosen)], None))
    assert followed(model) == set()
    first, second = ({f"layers.{n}.wide", f"layers.{n}.narrow"} for n in range(2))
    for names in (first, first, first | second, first | second):
        with Watching() as seen:
            found = gradients(model, x)
        assert all(map(torch.equal, found, plain))
        assert len(seen.names) == 1
        assert followed(model) == names
    applied.remove()
    assert followed(model) == set()
    applied.put_on(model)
    assert followed(model) == first | second
    applied.remove()


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_model_with_a_plan_can_be_copied(twin):
    model = Model()
    applied = apply_plan(model, Plan(PLANS["each layer"]))
    other = twin(model)
    x = torch.randn(8, 4)
    with Watching() as seen:
        copied = gradients(other, x)
    applied.remove()
    assert len(seen.names) == 3
    assert all(map(torch.equal, copied, gradients(model, x)))


def hooks_of(model: nn.Module) -> list[int]:
    return [
        len(module._forward_pre_hooks) + len(module._forward_hooks)
        for module in model.modules()
    ]


@pytest.mark.parametrize(
    "twin",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["itself", "copy", "pickle"],
)
def test_a_plan_comes_off_a_model_and_off_its_copies(twin):
    model = Model()
    before = hooks_of(model)
    applied = apply_plan(model, Plan(PLANS["each layer"]))
    other = twin(model)
    assert uncheckpoint_module(other) is other
    assert hooks_of(other) == before
    x = torch.randn(8, 4)
    with Watching() as seen:
        found = gradients(other, x)
    assert not seen.names
    if other is not model:
        assert hooks_of(model) != before
    applied.remove()
    assert hooks_of(model) == before
    assert all(map(torch.equal, found, gradients(model, x)))
    apply_plan(other, Plan(PLANS["each layer"])).remove()


def test_regions_of_a_module_come_off_before_a_plan_below_them():
    model = Model()
    before = hooks_of(model)
    applied = apply_plan(model, Plan(PLANS["each layer"]))
    planned = hooks_of(model)
    uncheckpoint_module(checkpoint_module(model))
    assert hooks_of(model) == planned
    applied.remove()
    assert hooks_of(model) == before


def test_a_plan_for_other_modules_is_refused():
    with pytest.raises(PlanError, match=r"'layers\.9'"):
        apply_plan(Model(), Plan((Span(enter("layers.9"), leave("layers.9")),)))


def test_a_plan_for_another_model_is_refused():
    plan = Plan(PLANS["each layer"], model=digest_of(Model(4)))
    with pytest.raises(PlanError, match="got one for a model with other modules"):
        apply_plan(Model(3), plan)
    apply_plan(Model(4), plan).remove()
