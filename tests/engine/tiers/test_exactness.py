"""Through every exact tier gradients are bitwise those of the twin."""

import functools
from inspect import signature

import pytest
import torch
from hypothesis import event, given, settings
from torch import Tensor, nn

from recoup import CheckpointScope, Disk, Host, KeepCostly, Packed, tiers
from recoup.engine.tiers.deposits import Deposit
from recoup.errors import ChangedTensorError
from recoup.tiers import ExactTier, Tier
from tests.support.drawn_programs import PHASES, programs
from tests.support.models import PROBLEMS, Problem, training
from tests.support.programs import Program, as_step, repaired
from tests.support.twin import Region, compare, judge

HOST, DISK = Host(smallest_bytes=0), Disk(smallest_bytes=0)


def every_exact_tier() -> dict[str, Tier]:
    """Return each exact tier that `recoup.tiers` has, for values of any size."""
    public = [getattr(tiers, name) for name in tiers.__all__]
    kinds = [k for k in public if isinstance(k, type) and issubclass(k, ExactTier)]
    found: dict[str, Tier] = {}
    for kind in kinds:
        options = {"smallest_bytes"} & signature(kind).parameters.keys()
        if kind is not ExactTier:
            found[kind.__name__.lower()] = kind(**dict.fromkeys(options, 0))
    return found


EXACT: dict[str, Tier] = {
    **every_exact_tier(),
    "host": HOST,
    "disk": DISK,
    "packed on host": Packed(HOST, smallest_bytes=0),
    "packed on disk": Packed(DISK, smallest_bytes=0),
}

OPTIONS = [{}, {"policy": KeepCostly(), "cache": True}]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("tier", EXACT)
@pytest.mark.parametrize("options", OPTIONS)
def test_training_a_model_is_bitwise_the_twin(name, tier, options):
    step = training(PROBLEMS[name], steps=2, optimizer=torch.optim.SGD)
    region = functools.partial(
        CheckpointScope, verify="always", store=EXACT[tier], **options
    )
    assert compare(step, region) == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_model_in_one_scope_around_its_own_scopes_is_bitwise_the_twin(name):
    problem = PROBLEMS[name]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = problem.model()

        def forward(self, x: Tensor, region: Region) -> Tensor:
            with CheckpointScope("all of it", store=EXACT["host"]):
                return self.inner(x, region)

    assert compare(training(Problem(Whole, problem.inputs)), CheckpointScope) == []


@pytest.mark.parametrize("tier", EXACT)
def test_tensors_without_contents_stay_where_they_are(tier):
    x = torch.randn(4, 4, device="meta", requires_grad=True)
    with CheckpointScope("meta", store=EXACT[tier]):
        y = (x @ x).tanh().sin()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.is_meta


@pytest.mark.parametrize("tier", EXACT)
def test_what_a_tier_holds_may_be_turned_round_in_place(tier):
    def step(region: Region) -> dict[str, Tensor | None]:
        given = torch.randn(4, 4, requires_grad=True)
        x = given + 1
        with region("block"):
            unused = x * x  # autograd saves it, and never asks
            y = x + x
            x.t_()  # a new version, with nothing written
            z = y * x
        z.sum().backward()
        return {"unused": unused, "gradient": given.grad}

    assert compare(step, functools.partial(CheckpointScope, store=EXACT[tier])) == []


def check(program: Program, tier: Tier) -> None:
    left_out, machine = repaired(program)
    region = functools.partial(CheckpointScope, store=tier)
    verdict = judge(as_step(program, left_out), region, refusals=(ChangedTensorError,))
    event(verdict.kind)
    assert not verdict.failed, verdict.detail
    assert verdict.kind != "refused" or machine.written_after_use, verdict.detail


@pytest.mark.parametrize("tier", EXACT)
@settings(max_examples=40, phases=PHASES)
@given(program=programs)
def test_a_random_program_is_bitwise_the_plain_program(tier, program):
    check(program, EXACT[tier])


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tier", EXACT)
@settings(max_examples=3000, phases=PHASES)
@given(program=programs)
def test_thousands_of_random_programs_are_bitwise_the_plain_programs(tier, program):
    check(program, EXACT[tier])


def test_a_tier_that_returns_something_else_is_found(monkeypatch):
    fetch = Deposit.fetch
    monkeypatch.setattr(
        Deposit, "fetch", lambda self, claim=None: fetch(self, claim) * 2
    )
    step = training(PROBLEMS["perceptron"])
    region = functools.partial(CheckpointScope, store=EXACT["host"])
    assert compare(step, region) != []


@pytest.mark.parametrize("tier", EXACT)
@pytest.mark.parametrize("first", [torch.bool, torch.uint8])
@pytest.mark.parametrize("largest", [1, 255])
def test_a_storage_that_is_saved_in_two_types_keeps_all_bits(tier, first, largest):
    """An image mask, used as a mask and as a factor, in either order."""

    def step(region: Region) -> dict[str, Tensor | None]:
        w = torch.randn(1001, requires_grad=True)
        with region("mask"):
            mask = (torch.rand(1001) > 0.5).to(torch.uint8) * largest
            filled = [lambda: (w * 2).masked_fill(mask.view(torch.bool), 0.0)]
            scaled = [lambda: (w * 3).sin() * mask]
            order = filled + scaled if first is torch.bool else scaled + filled
            y, z = (make() for make in order)
        (y.sum() + z.sum()).backward()
        return {"gradient": w.grad}

    region = functools.partial(CheckpointScope, store=EXACT[tier])
    assert compare(step, region) == []


@pytest.mark.parametrize("tier", EXACT)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_a_tier_returns_the_bytes_of_a_storage_whatever_the_type_of_the_view(
    tier, dtype
):
    """Also those behind the last whole element of the view that is saved first."""
    storage = torch.randint(0, 256, (1003,), dtype=torch.uint8)
    view = storage[:1000].view(dtype)
    back = Deposit(EXACT[tier], view).fetch()
    assert torch.equal(back.view(torch.uint8), storage)
