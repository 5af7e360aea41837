"""What torch's scaler keeps to itself is where we look for it."""

import math

import torch

from recoup.backend.training.scaling import OpenScaler


class Noting(OpenScaler):
    """Write down what was decided."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=4.0)
        self.seen: list[bool] = []

    def decided(self, optimizer, *, skipped):
        self.seen.append(skipped)


def backward(scaler, *factors):
    weight = torch.nn.Parameter(torch.ones(len(factors)))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * torch.tensor(factors)).sum()).backward()
    return weight, optimizer


def test_the_scale_is_a_tensor_from_the_first_loss_on():
    scaler = OpenScaler("cpu", init_scale=4.0)
    assert scaler.scale_tensor is None
    scaler.scale(torch.ones(()))
    assert scaler.scale_tensor is not None
    assert scaler.scale_tensor.item() == 4.0


def test_every_decision_is_noted():
    scaler = Noting()
    for factor in (1.0, math.inf, math.nan, 2.0):
        _, optimizer = backward(scaler, factor)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.seen == [False, True, True, False]


def test_the_flags_are_those_of_the_iteration_and_the_optimizer():
    scaler = Noting()
    _, good = backward(scaler, 1.0)
    _, bad = backward(scaler, math.inf)
    assert scaler.overflow_flags() == []
    assert scaler.overflow_flags(good) == []
    scaler.unscale_(good)
    scaler.unscale_(bad)
    assert [flag.item() for flag in scaler.overflow_flags(good)] == [0.0]
    assert [flag.item() for flag in scaler.overflow_flags(bad)] == [1.0]
    assert len(scaler.overflow_flags()) == 2
    scaler.forget_checks()
    assert scaler.overflow_flags() == []


def test_asking_for_flags_records_nothing():
    scaler = Noting()
    _, optimizer = backward(scaler, 1.0)
    scaler.overflow_flags(optimizer)
    assert scaler._per_optimizer_states == {}


def test_a_scale_is_set_before_and_after_its_tensor_is_made():
    scaler = OpenScaler("cpu")
    scaler.set_scale(8.0)
    assert scaler.get_scale() == 8.0
    scaler.scale(torch.ones(()))
    scaler.set_scale(2.0)
    assert scaler.get_scale() == 2.0
