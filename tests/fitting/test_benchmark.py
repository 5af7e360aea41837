"""The contest: everybody on the same step from the same state, failures included."""

# What is measured may be missing, and the tests are about those where it is not.
# pyright: reportOptionalOperand=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import operator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from benchmarks.zoo.cases import CASES
from recoup.fitting import benchmark as contests
from recoup.fitting.benchmark import PEERS, run_benchmark
from recoup.measurement.steps.floor import run_step
from recoup.measurement.steps.training_step import training_step


def small():
    def layer():
        return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))

    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(4))), torch.ones(64, 16)


@pytest.mark.parametrize("name", ["gpt dropout", "resnet-50"])
def test_every_peak_is_that_of_a_step_and_every_gradient_has_the_plain_bits(name):
    case = CASES[name]
    model, batch = case.build("tiny"), case.batch("tiny")
    plain, *others = run_benchmark(model, batch, loss=case.loss, budgets=[0.9])
    step = training_step(model, batch, loss=case.loss)
    assert plain.peak_bytes == run_step(step).peak_bytes
    with PEERS["torch checkpoint, every block"](model):
        assert others[0].peak_bytes == run_step(step).peak_bytes
    assert others[-1].peak_bytes <= 0.9 * plain.peak_bytes
    assert [entry.difference for entry in (plain, *others)] == [0.0] * 5
    assert all(entry.seconds > 0 for entry in others)


def test_the_model_is_left_as_it_was():
    model, x = small()
    model(x).sum().backward()
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    state = torch.get_rng_state()
    run_benchmark(model, x, loss=torch.sum, budgets=[0.9])
    assert torch.equal(state, torch.get_rng_state())
    before = [gradient for gradient, _ in gradients]
    assert all(map(operator.is_, (p.grad for p in model.parameters()), before))
    assert all(torch.equal(now, then) for now, then in gradients)
    assert not any("forward" in m.__dict__ or m._forward_hooks for m in model.modules())


@contextmanager
def scarce(_):
    raise torch.OutOfMemoryError("CUDA out of memory")
    yield


@contextmanager
def scarce_in_the_step(model):
    def refuse(*_):
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    handle = model.register_forward_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def broken(_):
    raise KeyError("a strange model")
    yield


@contextmanager
def doubling(model):
    hooks = [p.register_hook(lambda g: 2 * g) for p in model.parameters()]
    yield
    for hook in hooks:
        hook.remove()


def test_who_fails_is_a_row_and_who_is_wrong_is_found(monkeypatch):
    model, x = small()
    strange = {"scarce": scarce, "step": scarce_in_the_step, "broken": broken}
    monkeypatch.setattr(contests, "PEERS", {**strange, "wrong": doubling})
    told = []

    def tell(*news):
        told.append(news)

    entries = run_benchmark(model, x, loss=torch.sum, budgets=[0.9], progress=tell)
    plain, first, second, third, wrong, fitted = entries
    assert first.failure == second.failure == "out of memory"
    assert third.failure == "KeyError: 'a strange model'"
    assert first.peak_bytes is None
    assert wrong.difference > 0.0
    assert plain.difference == fitted.difference == 0.0
    assert [done for _, done, _ in told] == list(range(6))
    assert {total for _, _, total in told} == {6}


def test_if_the_plain_step_does_not_fit_the_next_is_compared_with(
    monkeypatch,
):
    monkeypatch.setattr(contests, "nullcontext", scarce)
    model, x = small()
    plain, first, *others = run_benchmark(model, x, loss=torch.sum, budgets=["2MiB"])
    assert plain.failure == "out of memory"
    assert first.name == next(iter(PEERS))
    assert {entry.difference for entry in (first, *others)} == {0.0}
