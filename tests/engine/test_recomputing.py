"""Who asks `is_recomputing` gets True while a replay runs, and only then."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import threading
import uuid

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup import (
    CheckpointGroup,
    CheckpointScope,
    checkpoint,
    checkpoint_module,
    rerun,
)
from recoup.checkpointing import is_recomputing
from recoup.engine.replay.recomputing import recomputing


class Asking(TorchDispatchMode):
    """Asks at every operator."""

    def __init__(self):
        super().__init__()
        self.answers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.answers.append((func.overloadpacket.__name__, is_recomputing()))
        return func(*args, **(kwargs or {}))


class Asker(nn.Module):
    """Asks in forward."""

    def __init__(self):
        super().__init__()
        self.answers = []

    def forward(self, x):
        self.answers.append(is_recomputing())
        return x.exp().sin()


def leaf():
    return torch.ones(3, requires_grad=True)


def scoped(function, x):
    with CheckpointScope("block"):
        return function(x)


def grouped(function, x):
    return CheckpointGroup().checkpoint_fn(x, function)


def as_module(function, x):
    return checkpoint_module(function)(x)


def test_outside_it_is_false():
    assert not is_recomputing()


@pytest.mark.parametrize("call", [scoped, checkpoint, grouped, as_module])
def test_user_code_runs_once_and_sees_false(call):
    asker = Asker()
    y = call(asker, leaf())
    assert not is_recomputing()
    y.sum().backward()
    assert asker.answers == [False]
    assert not is_recomputing()


def test_a_function_that_is_run_again_sees_true_the_second_time():
    asker = Asker()
    rerun(asker, leaf()).sum().backward()
    assert asker.answers == [False, True]
    assert not is_recomputing()


def test_operators_of_a_replay_see_true_and_those_of_backward_false():
    y = scoped(lambda x: x.exp().sin(), leaf())
    with Asking() as asking:
        y.sum().backward()
    answers = dict(asking.answers)
    assert answers["exp"]
    assert not answers["cos"]


def test_the_kernel_of_a_custom_operator_sees_both():
    answers = []
    name = f"recoup_test_{uuid.uuid4().hex}::double"

    @torch.library.custom_op(name, mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        answers.append(is_recomputing())
        return x * 2

    double.register_autograd(lambda ctx, grad: grad * 2)
    x = leaf()
    scoped(lambda t: double(t).exp().sin(), x).sum().backward()
    assert answers == [False, True]
    twin = leaf()
    (twin * 2).exp().sin().sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_it_is_true_on_the_replaying_thread_only():
    inside, looked = threading.Event(), threading.Event()
    answers = []

    def look():
        inside.wait()
        answers.append(is_recomputing())
        looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    with recomputing():
        answers.append(is_recomputing())
        inside.set()
        looked.wait()
    thread.join()
    assert answers == [True, False]


def test_it_nests():
    with recomputing():
        with recomputing():
            assert is_recomputing()
        assert is_recomputing()
    assert not is_recomputing()


def test_an_exception_ends_it():
    with pytest.raises(KeyError), recomputing():
        raise KeyError("on purpose")
    assert not is_recomputing()
