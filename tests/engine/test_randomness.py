"""A replay draws the numbers that forward drew, and moves no generator."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup import CheckpointScope
from recoup.errors import MismatchError
from tests.support.twin import Region, compare

always = functools.partial(CheckpointScope, verify="always")

Draw = Callable[[Tensor, torch.Generator], Tensor]

DRAWS: dict[str, Draw] = {
    "dropout": lambda x, _: functional.dropout(x, 0.3),
    "dropout in place": lambda x, _: functional.dropout(x * 1, 0.3, inplace=True),
    "alpha dropout": lambda x, _: functional.alpha_dropout(x, 0.3),
    "feature dropout": lambda x, _: functional.dropout1d(x, 0.5),
    "bernoulli": lambda x, _: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rand_like": lambda x, _: x * torch.rand_like(x),
    "randn": lambda x, _: x * torch.randn(x.shape),
    "randint": lambda x, _: x * torch.randint(5, x.shape),
    "randperm": lambda x, _: x[torch.randperm(len(x))] * 1.5,
    "normal_": lambda x, _: x * torch.empty_like(x).normal_(),
    "uniform_ on a slice": lambda x, _: x * torch.zeros_like(x)[:, :1].uniform_(),
    "exponential_": lambda x, _: x * torch.empty_like(x).exponential_(),
    "multinomial": lambda x, _: x[torch.multinomial(torch.ones(len(x)), 3)] * 2,
    "rrelu": lambda x, _: functional.rrelu(x, training=True),
    "gumbel softmax": lambda x, _: functional.gumbel_softmax(x, hard=True),
    "attention": lambda x, _: functional.scaled_dot_product_attention(
        x[None], x[None] * 2, x[None].sin(), dropout_p=0.4
    ),
    "poisson": lambda x, _: x * torch.poisson(x.detach().abs() * 4),
    "own bernoulli": lambda x, g: (
        x * torch.bernoulli(torch.full_like(x, 0.5), generator=g)
    ),
    "own randn": lambda x, g: x * torch.randn(x.shape, generator=g),
    "own normal_": lambda x, g: x * torch.empty_like(x).normal_(generator=g),
    "own randperm": lambda x, g: x[torch.randperm(len(x), generator=g)] * 1.5,
    "fractional pooling": lambda x, _: functional.fractional_max_pool2d(
        x.reshape(1, 1, 4, 8) * 2, 2, output_size=(2, 3)
    ),
}


def drawing(draw: Draw, *, backwards: int = 1) -> Any:
    """Return a step that draws before, in, between and after nested regions."""

    def step(region: Region) -> dict[str, Any]:
        own = torch.Generator().manual_seed(3)
        given = torch.randn(4, 8, requires_grad=True)
        x = draw(given, own).exp()
        with region("outer"):
            y = draw(given.sin(), own).exp()
            with region("inner"):
                z = draw(given.cos(), own).exp()
        between = torch.rand(3), torch.rand(3, generator=own)
        loss = x.sum() + y.sum() + z.sum()
        found = [
            torch.autograd.grad(loss, given, retain_graph=True)
            for _ in range(backwards)
        ]
        after = torch.rand(3), torch.rand(3, generator=own)
        return {
            "gradients": found,
            "outputs": [x, y, z],
            "draws": [between, after],
            "own": own.get_state(),
        }

    return step


@pytest.mark.parametrize("name", DRAWS)
def test_a_random_operator_is_replayed_with_the_numbers_of_forward(name):
    assert compare(drawing(DRAWS[name]), always) == []


@pytest.mark.parametrize("name", DRAWS)
def test_several_backwards_see_the_same_numbers(name):
    assert compare(drawing(DRAWS[name], backwards=3), always) == []


@pytest.mark.parametrize("name", DRAWS)
def test_a_cached_replay_sees_the_same_numbers(name):
    region = functools.partial(CheckpointScope, verify="always", cache=True)
    assert compare(drawing(DRAWS[name], backwards=2), region) == []


def test_a_seed_set_inside_a_region_holds():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(8, requires_grad=True)
        with region("block"):
            y = functional.dropout(x.exp())
            torch.manual_seed(5)
            y = functional.dropout(y.sin() + 2).exp()
        y.sum().backward()
        return {"x": x.grad, "y": y}

    assert compare(step, always) == []


def test_a_forked_generator_inside_a_region_is_put_back_as_in_the_twin():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(8, requires_grad=True)
        with region("block"):
            with torch.random.fork_rng():
                y = functional.dropout(x.exp())
            y = functional.dropout(y.sin() + 2).exp()
        y.sum().backward()
        return {"x": x.grad, "y": y}

    assert compare(step, always) == []


def test_a_generator_state_is_kept_only_where_numbers_were_drawn():
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    scope = CheckpointScope("block", verify="off")
    with scope:
        y = functional.dropout(x, 0.0).exp()
        y = functional.scaled_dot_product_attention(y, y, y, dropout_p=0.0).sin()
    region = scope.nodes[0].region
    assert region is not None
    assert region.random_bytes() == 0
    with scope:
        z = functional.dropout(x, 0.5).exp().sin()
    region = scope.nodes[-1].region
    assert region is not None
    assert region.random_bytes() == torch.get_rng_state().nbytes
    del y, z


def test_evaluation_mode_draws_nothing():
    def step(region: Region) -> dict[str, Any]:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()).eval()
        x = torch.randn(3, 4, requires_grad=True)
        with region("block"):
            y = layers(x).exp()
        y.sum().backward()
        return {"x": x.grad}

    assert compare(step, always) == []


def test_a_replay_that_raises_puts_the_generators_back():
    own = torch.Generator().manual_seed(1)
    x, scale = torch.randn(8, requires_grad=True), torch.randn(8)
    with CheckpointScope("block", verify="full"):
        y = (x * torch.bernoulli((scale * 0.1).sigmoid(), generator=own)).exp()
        y = functional.dropout(y).sin()
    scale.data.fill_(100.0)
    states = torch.get_rng_state(), own.get_state()
    with pytest.raises(MismatchError):
        y.sum().backward()
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], own.get_state())


def test_a_generator_that_the_user_dropped_still_serves_the_replay():
    own = torch.Generator().manual_seed(1)
    x = torch.randn(8, requires_grad=True)
    with CheckpointScope("block", verify="always"):
        y = (x * torch.randn(8, generator=own)).exp()
    del own
    (found,) = torch.autograd.grad(y.sum(), x)
    again = torch.Generator().manual_seed(1)
    noise = torch.randn(8, generator=again)
    assert torch.equal(found, noise * (x * noise).exp())


def test_numbers_drawn_between_forward_and_backward_are_the_twins():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(8, requires_grad=True)
        with region("block"):
            y = functional.dropout(x.exp()).sin()
        first = torch.rand(3)
        y.sum().backward()
        return {"x": x.grad, "draws": [first, torch.rand(3)]}

    assert compare(step, always) == []
