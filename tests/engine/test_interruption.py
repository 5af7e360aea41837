"""An interrupted call of a checkpointed module leaves no region open for long."""

import contextlib
import copy
import gc
import itertools
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

from recoup import (
    CheckpointGroup,
    CheckpointScope,
    checkpoint,
    checkpoint_module,
    rerun,
    uncheckpoint_module,
)
from recoup.backend.autograd.saved_tensors import ambient_hooks
from recoup.engine.recording.active import open_regions
from tests.support.interrupts import Interrupter
from tests.support.twin import leftovers


class Fatal(nn.Module):
    """Is interrupted as often as it is told, and calls itself as deep as it is told."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner
        self.interrupts = 0

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        y = self.linear(x).tanh()
        if self.inner is not None:
            y = self.inner(y)
        if depth:
            y = self(y, depth - 1)
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return y.sin()


def gradients(model: nn.Module, *args: object) -> list[Tensor]:
    found = torch.autograd.grad(model(*args).sum(), list(model.parameters()))
    return list(found)


def interrupt(model: Fatal, *args: object) -> None:
    model.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        model(*args)


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_the_next_call_closes_what_an_interrupt_left_open():
    model = checkpoint_module(Fatal())
    expected = gradients(uncheckpoint_module(copy.deepcopy(model)), X)
    for _ in range(3):
        interrupt(model, X)
        assert len(open_regions()) == 1
    found = gradients(model, X)
    assert not open_regions()
    assert all(map(torch.equal, found, expected))


def test_a_call_of_another_module_closes_it_too():
    model, other = checkpoint_module(Fatal()), checkpoint_module(nn.Linear(4, 4))
    interrupt(model, X)
    other(X)
    assert not open_regions()


def test_taking_the_regions_off_closes_it_too():
    model = checkpoint_module(Fatal())
    interrupt(model, X)
    uncheckpoint_module(model)
    assert not open_regions()


def test_modules_inside_modules_are_closed_from_within():
    inner = checkpoint_module(Fatal())
    outer = checkpoint_module(Fatal(inner))
    inner.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        outer(X)
    assert len(open_regions()) == 2
    expected = gradients(copy.deepcopy(outer), X)
    assert not open_regions()
    assert all(map(torch.equal, gradients(outer, X), expected))


def test_a_module_that_calls_itself_is_not_taken_for_an_interrupted_one():
    model = checkpoint_module(Fatal())
    plain = uncheckpoint_module(copy.deepcopy(model))
    depths: list[int] = []
    model.linear.register_forward_pre_hook(
        lambda *_: depths.append(len(open_regions()))
    )
    found = gradients(model, X, 2)
    assert depths == [1, 2, 3]
    assert all(map(torch.equal, found, gradients(plain, X, 2)))
    assert not open_regions()


def test_an_ordinary_error_closes_at_once():
    model = checkpoint_module(Fatal())
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    assert not open_regions()
    model(X)
    assert not open_regions()


def test_training_of_a_plain_model_closes_it_after_its_first_backward():
    model, other = checkpoint_module(Fatal()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    interrupt(model, X)
    (region,) = open_regions()
    expected = gradients(copy.deepcopy(other), X)
    for _ in range(4):
        assert all(map(torch.equal, gradients(other, X), expected))
    assert not open_regions()
    assert len(region.tape.operations) < 20


def test_a_plain_model_that_saves_much_closes_it_before_any_backward():
    model = checkpoint_module(Fatal())
    interrupt(model, X)
    y = X.clone().requires_grad_()
    for _ in range(300):
        y = y.tanh()
    assert not open_regions()


def test_a_scope_that_was_opened_since_stays_open():
    model, other = checkpoint_module(Fatal()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    interrupt(model, X)
    expected = gradients(copy.deepcopy(other), X)
    with CheckpointScope("mine"):
        for _ in range(2):
            assert all(map(torch.equal, gradients(other, X), expected))
        assert open_regions()[-1].name == "mine"
        y = other(X)
    assert all(
        map(
            torch.equal,
            torch.autograd.grad(y.sum(), list(other.parameters())),
            expected,
        )
    )
    assert all(map(torch.equal, gradients(other, X), expected))
    assert all(map(torch.equal, gradients(other, X), expected))
    assert not open_regions()


class Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_and_modes_of_others_are_theirs_after_an_interrupt(inside):
    model = checkpoint_module(Fatal(), verify="off")
    was_in_mode = is_in_torch_dispatch_mode()

    def watched(run) -> tuple[int, int]:
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), Counting() as mode:
            run()
        return len(packed), mode.count

    expected = watched(lambda: model(X))
    if inside:
        watched(lambda: interrupt(model, X))
    else:
        interrupt(model, X)
    packs, operators = watched(lambda: model(X))
    assert packs == expected[0]
    assert operators >= expected[1]  # what was left open is closed among them
    assert watched(lambda: model(X)) == expected
    assert not open_regions()
    assert ambient_hooks() is None
    assert is_in_torch_dispatch_mode() == was_in_mode
    assert not _get_current_dispatch_mode_stack()


def test_gradients_taken_inside_a_region_are_recorded_once():
    energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    weights = list(energy.parameters())

    def descend(x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(energy(inner).sum(), inner)
            x = x - 0.1 * slope
        return energy(x)

    def recorded(steps: int) -> int:
        with CheckpointScope("descent"):
            y = descend(X.double(), steps)
            (region,) = open_regions()
            operations = len(region.tape.operations)
        found = torch.autograd.grad(y.sum(), weights)
        plain = torch.autograd.grad(descend(X.double(), steps).sum(), weights)
        assert all(map(torch.equal, found, plain))
        return operations

    counts = [recorded(steps) for steps in (1, 2, 3, 4)]
    growth = [after - before for before, after in itertools.pairwise(counts)]
    assert growth == growth[:1] * 3  # each step adds its own operators, once


def call_in_a_group(call: Callable[[], object]) -> object:
    return CheckpointGroup("outer").checkpoint_fn(None, lambda _: call())


@pytest.mark.parametrize("outer", [checkpoint, call_in_a_group, rerun])
def test_an_interrupt_passes_through_a_call_around_a_module(outer):
    model = checkpoint_module(Fatal())
    model.interrupts = 1
    with pytest.raises(KeyboardInterrupt) as caught:
        outer(lambda: model(X))
    assert caught.value.__context__ is None
    assert open_regions() == []
    assert ambient_hooks() is None


@pytest.mark.parametrize("outer", [False, True])
def test_what_an_interrupted_module_computed_is_freed_once_its_region_is_closed(outer):
    model = checkpoint_module(Fatal())
    x = X.clone()
    given = weakref.ref(x)
    with CheckpointScope("outer", enabled=outer):
        try:
            with CheckpointScope("middle", enabled=outer):
                interrupt(model, x)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    del x
    y = torch.ones(1, requires_grad=True)
    for _ in range(600):  # now and then a region asks whether its call was left
        y = y * y.detach()
    assert open_regions() == []
    del y
    gc.collect()  # pytest keeps the frames of an exception in a cycle
    assert given() is None


ENDING = ("region", "begin", "end", "_pop", "_end_entry", "_leave", "call_in_region")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("outer", [checkpoint, call_in_a_group])
def test_an_interrupt_at_the_beginning_or_end_of_a_call_leaves_no_region(outer):
    net = nn.Linear(4, 4)
    outer(lambda: net(X))
    for opcodes in (False, True):
        at = 0
        for at in itertools.count():
            interrupter = Interrupter(at, opcodes=opcodes, only=ENDING)
            if not interrupter.run(lambda: outer(lambda: net(X))):
                break
            assert open_regions() == [], interrupter.where
            assert ambient_hooks() is None, interrupter.where
        assert at > 15


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_region_whose_end_is_interrupted_dies_although_a_buffer_joined_its_graph():
    # A cycle through autograd's nodes is one that not even the collector finds.
    made: list[weakref.ref[object]] = []
    places: list[str] = []
    x = X.clone().requires_grad_()

    def step() -> None:
        buffer = torch.ones_like(X)
        with CheckpointScope("block", verify="off"):
            made.extend(map(weakref.ref, open_regions()))
            _ = (buffer * x).sin()
            buffer.mul_(x.exp())

    ending = ("_leave", "_close", "close", "_settle", "settle_writes", "part")
    for at in itertools.count():
        interrupter = Interrupter(at, only=ending)
        is_interrupted = interrupter.run(step)
        places += [interrupter.where] * (len(made) - len(places))
        if not is_interrupted:
            break
    gc.collect()  # Python keeps the frames of an exception in a cycle
    left = [
        place for place, each in zip(places, made, strict=True) if each() is not None
    ]
    assert left == []
    assert len(places) > 30


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_before_the_region_of_a_module_is_open_keeps_no_argument():
    model = checkpoint_module(nn.Linear(4, 4))
    given: list[weakref.ref[Tensor]] = []

    def step() -> None:
        x = X.clone()
        given.append(weakref.ref(x))
        model(x)

    step()
    at = 0
    opening = ("before", "call_of_hook", "begin_call", "begin", "open")
    while (interrupter := Interrupter(at, only=opening)).run(step):
        assert given[-1]() is None, interrupter.where
        at += 1
    assert at > 20


class Keeping(nn.Module):
    """Keeps what it computes, and is interrupted then, if it is."""

    def __init__(self, *, is_fatal: bool) -> None:
        super().__init__()
        self.is_fatal = is_fatal
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(150):
            y = y.sin() * 1.1
        self.kept = y
        if self.is_fatal:
            raise KeyboardInterrupt
        return y


def test_a_backward_through_an_interrupted_module_is_right_and_closes_nothing():
    found: list[Tensor] = []
    for is_fatal in (False, True):
        x = X.clone().requires_grad_()
        model = checkpoint_module(Keeping(is_fatal=is_fatal))
        with contextlib.suppress(KeyboardInterrupt):
            model(x)
        # Its graph saves hundreds of tensors: by then the region asks who is there.
        (first,) = torch.autograd.grad(model.kept.sum(), x, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), x)
        x.sin()  # the first saved tensor after a backward
        assert open_regions() == []
    assert torch.equal(*found)


def call_in_a_scope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with CheckpointScope("outer"):
        return function(x)


def call_by_a_group(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return CheckpointGroup("outer").checkpoint_fn(x, function)


OUTER = (call_in_a_scope, checkpoint, call_by_a_group, None)


# A function that ends with an interrupt would do so when it is called again, too.
@pytest.mark.parametrize(
    ("outer", "is_caught_inside"),
    [*((outer, caught) for outer in OUTER for caught in (True, False)), (rerun, True)],
)
def test_what_an_interrupted_module_computed_can_be_used(outer, is_caught_inside):
    def gradient(*, is_fatal: bool) -> Tensor:
        x = X.clone().requires_grad_()
        model = checkpoint_module(Keeping(is_fatal=is_fatal))

        def function(given: Tensor) -> Tensor:
            with contextlib.suppress(*([KeyboardInterrupt] * is_caught_inside)):
                model(given)
            return model.kept.exp() * given.cos()

        y = model.kept
        with contextlib.suppress(KeyboardInterrupt):
            y = function(x) if outer is None else outer(function, x)
            if outer is not None:
                assert open_regions() == []
                assert ambient_hooks() is None
        y = model.kept * y if is_caught_inside else model.kept.tanh()
        (y * x.tanh()).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(is_fatal=True), gradient(is_fatal=False))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_rerun_leaves_no_hooks():
    def step() -> None:
        x = X.clone().requires_grad_()
        rerun(torch.sin, x).sum().backward()

    step()
    at = 0
    own = ("rerun", "_hooks", "__init__", "__enter__", "__exit__", "_call")
    while Interrupter(at, only=own).run(step):
        assert ambient_hooks() is None, at
        at += 1
    assert at > 100


def test_a_module_called_again_in_backward_does_not_close_an_interrupted_one():
    """Torch restores the stack of hooks that the backward began with at its end."""
    inner = checkpoint_module(nn.Linear(4, 4))
    model = checkpoint_module(Fatal())
    x = torch.ones(2, 4, requires_grad=True)
    y = rerun(lambda x: inner(x).sin().exp(), x)
    interrupt(model, x)
    assert len(open_regions()) == 1
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert len(open_regions()) == 1
    (second,) = torch.autograd.grad(first.sum(), x)
    inner(x)
    assert open_regions() == []
    assert ambient_hooks() is None
    assert _get_current_dispatch_mode_stack() == []
    plain = inner(x).sin().exp()
    (wanted,) = torch.autograd.grad(plain.sum(), x, create_graph=True)
    assert torch.equal(first, wanted)
    assert torch.equal(second, torch.autograd.grad(wanted.sum(), x)[0])


def nested(x: Tensor, factor: Tensor, depth: int) -> Tensor:
    with contextlib.ExitStack() as scopes:
        for number in range(depth):
            scopes.enter_context(CheckpointScope(f"{number}"))
        return (x * factor).sin().exp()


def test_more_nested_scopes_than_python_can_call_leave_nothing_behind():
    x, factor = X.clone().requires_grad_(), torch.full_like(X, 2.0)
    (expected,) = torch.autograd.grad((x * factor).sin().exp().sum(), x)
    with pytest.raises(RecursionError):
        nested(x, factor, sys.getrecursionlimit())
    assert open_regions() == []
    assert list(leftovers()) == []
    (found,) = torch.autograd.grad(nested(x, factor, 3).sum(), x)
    assert torch.equal(found, expected)
