"""The dry step: the graph of the real one to the byte, without its memory."""

import dataclasses
import resource
import threading
from collections import UserDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo import decoders
from benchmarks.zoo.case import token_loss
from benchmarks.zoo.cases import CASES
from recoup.backend.state.trees import tensors_within
from recoup.cli.gpt import Shape
from recoup.core.simulation import simulate
from recoup.engine.scopes.module import checkpoint_module
from recoup.errors import (
    InfeasibleError,
    MismatchError,
    UnsupportedError,
    UsageError,
)
from recoup.fitting.fit import fit
from recoup.fitting.measuring import measure
from recoup.measurement.steps.optimizers import missing_state_bytes
from recoup.planners.planner import frontier, plan
from tests.support.graphs import timeless
from tests.support.odd_models import ODD, odd_batch

NAMES = [
    *("bert", "convnext", "densenet-121", "encoder-decoder", "gpt", "gpt dropout"),
    *("llama", "mixer", "resnet-50", "u-net", "vit"),
]


@pytest.mark.parametrize("name", NAMES)
def test_all_but_its_times_is_that_of_the_real_step(name):
    case = CASES[name]
    model, batch = case.build("tiny"), case.batch("tiny")
    real = measure(model, batch, loss=case.loss)
    dry = measure(model, batch, loss=case.loss, dry=True, device="h100")
    assert (real.estimated_for, dry.estimated_for) == ("", "h100")
    assert timeless(dry) == timeless(real)
    assert simulate(dry, ()).peak_bytes == simulate(real, ()).peak_bytes


@pytest.mark.parametrize("name", ["gpt", "resnet-50"])
def test_a_model_on_the_meta_device_is_measured_as_on_the_cpu(name):
    case = CASES[name]
    real = measure(case.build("tiny"), case.batch("tiny"), loss=case.loss)
    with torch.device("meta"):
        model = case.make("tiny")
        batch = case.feed("tiny")
    dry = measure(model, batch, loss=case.loss, dry=True, device="a100")
    assert timeless(dry) == timeless(real)
    assert all(p.is_meta and p.grad is None for p in model.parameters())


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    teacher: nn.Module = dataclasses.field(default_factory=lambda: nn.Linear(4, 4))


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


WRAPPERS = {
    "dataclass": Sample,
    "slots": Slotted,
    "mapping": lambda x: UserDict(x=x),
    "nested": lambda x: [{"batch": Slotted(Sample(x))}],
}


class Unwrapping(nn.Module):
    """Takes a tensor out of whatever it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, batch: object) -> Tensor:
        (x,) = tensors_within(batch)
        return self.layers(x).sum()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_tensors_in_any_object_have_stand_ins(wrap):
    model, x = Unwrapping(), torch.ones(16, 8)
    batch = wrap(x)
    dry = measure(model, (batch,), dry=True)
    assert timeless(dry) == timeless(measure(model, (batch,)))
    assert tensors_within(batch) == [x], "the batch is as it was"
    with torch.device("meta"):
        away = measure(Unwrapping(), (wrap(torch.empty(16, 8)),), dry=True)
    assert timeless(away) == timeless(dry)


def test_an_object_with_tensors_that_cannot_be_copied_is_refused():
    batch = Slotted((torch.ones(16, 8), threading.Lock()))
    with pytest.raises(UnsupportedError, match="got a Slotted that holds tensors"):
        measure(Unwrapping(), (batch,), dry=True)
    lock = threading.Lock()  # which is no part of an object with tensors
    measure(Unwrapping(), ([torch.ones(16, 8), lock],), dry=True)


# The one is another model each time; the other writes to a part of a tensor.
NOT_THE_SAME = {"blocks left out at random", "functions of its own"}


@pytest.mark.parametrize("name", sorted(ODD.keys() - NOT_THE_SAME))
@pytest.mark.filterwarnings(
    "ignore:expected a model that keeps its activations:recoup.errors.BudgetWarning"
)
def test_models_that_are_built_in_odd_ways_are_measured_as_they_are(name):
    odd = ODD[name]
    model, x = odd.make(), odd_batch()
    real = measure(model, x, loss=odd.loss)
    assert timeless(measure(model, x, loss=odd.loss, dry=True)) == timeless(real)


def test_a_write_to_a_part_goes_another_way_through_backward_of_the_same_peak():
    odd = ODD["functions of its own"]
    model, x = odd.make(), odd_batch()
    real = timeless(measure(model, x, loss=odd.loss))
    dry = timeless(measure(model, x, loss=odd.loss, dry=True))
    assert (dry.operations, dry.values) == (real.operations, real.values)
    assert dry.backward != real.backward
    assert simulate(dry, ()).peak_bytes == simulate(real, ()).peak_bytes


@pytest.mark.parametrize(
    "loss",
    [
        functional.binary_cross_entropy,
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.soft_margin_loss,
    ],
)
def test_a_loss_that_keeps_the_memory_it_computed_in_is_known_to(loss):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    batch = torch.ones(64, 8), torch.ones(64, 8)
    real = measure(model, batch, loss=loss)
    assert timeless(measure(model, batch, loss=loss, dry=True)) == timeless(real)


def test_a_model_that_has_regions_is_measured_dry_and_is_not_verified_by_it():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model, x = nn.Sequential(*blocks), torch.randn(4, 8)
    for block in blocks:
        checkpoint_module(block)
    dry = measure(model, x, loss=torch.sum, dry=True)
    assert dry.saved_bytes == measure(model, x, loss=torch.sum).saved_bytes
    unseen = checkpoint_module(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()))
    measure(unseen, x, loss=torch.sum, dry=True)
    y = unseen(x)
    next(unseen.parameters()).data.add_(1)
    with pytest.raises(MismatchError):
        y.sum().backward()


def test_a_step_of_ones_own_is_measured_dry():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    x = torch.ones(4, 8)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    real, dry = measure(model, step=step), measure(model, step=step, dry=True)
    assert timeless(dry) == timeless(real)
    assert all(p.grad is None for p in model.parameters())


def test_parameters_buffers_gradients_and_generators_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Tanh())
    model(torch.randn(8, 4)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    state = torch.get_rng_state()
    measure(model, torch.ones(8, 4), loss=torch.sum, dry=True)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_a_model_of_a_hundred_gibibytes_takes_none_of_them():
    shape = Shape(12, 13312, 104, 50304, 2048)
    with torch.device("meta"):
        model = decoders.Decoder(shape)
        batch = decoders.sequences(shape, 4)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    assert parameter_bytes > 95 << 30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = measure(model, batch, loss=token_loss, dry=True, device="h200")
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    # What torch compiles and caches for each kind of operator; the largest tensor of
    # the step has 1.5 GiB.
    assert grown_bytes < 200 << 20
    assert simulate(graph, ()).peak_bytes > 2 * parameter_bytes


def test_whether_it_fits_is_known_without_the_machine():
    case = CASES["gpt"]
    with torch.device("meta"):
        model, batch = case.make("tiny"), case.feed("tiny")
    graph = measure(model, batch, loss=case.loss, dry=True, device="h100")
    peak_bytes = simulate(graph, ()).peak_bytes
    found = plan(graph, int(0.7 * peak_bytes))
    assert found.simulation.peak_bytes <= 0.7 * peak_bytes
    assert len(frontier(graph, points=4)) > 1
    with pytest.raises(InfeasibleError):
        plan(graph, 1000)


def test_a_plan_is_not_applied_to_what_cannot_compute():
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8)
    for act in (fit, measure):
        with pytest.raises(UsageError, match="dry=True"):
            act(model, batch, loss=torch.sum)
    assert not model._forward_hooks


class Looks(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * self.look(y)


@pytest.mark.parametrize(
    ("look", "named"),
    [
        (lambda y: 2.0 if y.sum() > 0 else 1.0, "_local_scalar_dense"),
        (lambda y: y[y > 0].sum(), "nonzero"),
        (lambda y: y.sum().item(), "_local_scalar_dense"),
        (lambda y: y.unique().sum(), "unique"),
    ],
)
def test_what_depends_on_numbers_is_one_clear_error(look, named):
    model = Looks(look)
    weight = model.linear.weight
    with pytest.raises(UnsupportedError, match=f"(?s){named}.*leave out dry=True"):
        measure(model, torch.ones(2, 4), loss=torch.sum, dry=True)
    assert model.linear.weight is weight
    assert not model._forward_hooks


def test_the_mixture_of_experts_is_one_that_cannot_be_dry():
    case = CASES["mixture of experts"]
    with pytest.raises(UnsupportedError, match="nonzero"):
        measure(case.build("tiny"), case.batch("tiny"), loss=case.loss, dry=True)


def test_a_recurrent_layer_is_refused_before_its_bytes_are_wrong():
    case = CASES["lstm"]
    with pytest.raises(UnsupportedError, match="mkldnn_rnn_layer"):
        measure(case.build("tiny"), case.batch("tiny"), loss=case.loss, dry=True)


def test_another_error_says_that_it_was_dry():
    def raises(_: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        measure(Looks(raises), torch.ones(2, 4), loss=torch.sum, dry=True)
    assert "dry measurement" in caught.value.__notes__[0]


def test_a_device_that_is_not_here_needs_dry_and_one_that_is_unknown_is_named():
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(UsageError, match="dry=True"):
        measure(model, x, loss=torch.sum, device="h100")
    with pytest.raises(UsageError, match="known are h200"):
        measure(model, x, loss=torch.sum, dry=True, device="abacus")


def test_a_faster_device_is_estimated_faster():
    case = CASES["gpt"]
    with torch.device("meta"):
        model, batch = case.make("tiny"), case.feed("tiny")
    times = [
        measure(model, batch, loss=case.loss, dry=True, device=name).step_seconds
        for name in ("a100", "h100", "h200")
    ]
    assert times == sorted(times, reverse=True)


def test_an_optimizer_on_the_meta_device_will_have_its_state_there():
    weight = nn.Parameter(torch.empty(100, device="meta"))
    optimizer = torch.optim.Adam([weight])
    assert missing_state_bytes(optimizer, torch.device("meta")) == 800
