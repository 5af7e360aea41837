"""Models under regions train bitwise as without them."""

import functools

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from recoup import CheckpointScope, KeepCostly, checkpoint, checkpoint_module
from tests.support.models import (
    PROBLEMS,
    Block,
    Perceptron,
    Problem,
    ResidualNetwork,
    Shared,
    Transformer,
    training,
)
from tests.support.twin import Region, compare, plain

always = functools.partial(CheckpointScope, verify="always")


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("options", [{}, {"policy": KeepCostly()}, {"cache": True}])
def test_gradients_and_buffers_of_a_model_are_bitwise_the_twins(name, options):
    step = training(PROBLEMS[name], inputs_require_grad=name != "transformer")
    region = functools.partial(CheckpointScope, verify="always", **options)
    assert compare(step, region) == []


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_loss_curve_of_twenty_steps_is_bitwise_the_twins(name, optimizer):
    make = functools.partial(optimizer, lr=0.05)
    step = training(PROBLEMS[name], steps=20, optimizer=make)
    assert compare(step, CheckpointScope) == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_model_in_one_scope_around_its_own_scopes_is_bitwise_the_twin(name):
    problem = PROBLEMS[name]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = problem.model()

        def forward(self, x: torch.Tensor, region: Region) -> torch.Tensor:
            with region("all of it"), region("again"):
                return self.inner(x, region)

    assert compare(training(Problem(Whole, problem.inputs)), always) == []


def batch_norm_states(run) -> dict[str, torch.Tensor]:
    """Train one step with a residual network whose blocks are run by `run`."""
    torch.manual_seed(0)
    model = ResidualNetwork()
    x = model.stem(torch.randn(2, 3, 6, 6))
    for block in model.blocks:
        x = run(block, x)
    x.square().mean().backward()
    return {k: v for k, v in model.state_dict().items() if "norm" in k}


def test_batch_norm_counts_a_batch_once_where_torch_checkpoint_counts_it_twice():
    twin = batch_norm_states(lambda block, x: block(x))
    ours = batch_norm_states(lambda block, x: checkpoint(block, x))
    torchs = batch_norm_states(
        lambda block, x: torch_checkpoint(block, x, use_reentrant=False)
    )
    counter = "blocks.0.first_norm.num_batches_tracked"
    assert (int(twin[counter]), int(ours[counter]), int(torchs[counter])) == (1, 1, 2)
    assert all(torch.equal(twin[name], ours[name]) for name in twin)
    mean = "blocks.0.first_norm.running_mean"
    assert not torch.equal(twin[mean], torchs[mean])


def test_batch_norm_with_a_cumulative_average_is_bitwise_the_twin():
    def cumulative(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None

    make = functools.partial(torch.optim.SGD, lr=0.1)
    problem = PROBLEMS["residual network"]
    step = training(problem, steps=3, optimizer=make, prepare=cumulative)
    assert compare(step, always) == []


def test_batch_norm_in_evaluation_leaves_its_statistics_alone():
    step = training(PROBLEMS["residual network"], prepare=nn.Module.eval)
    assert compare(step, always) == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_frozen_parameters_get_no_gradient_and_the_others_the_twins(name):
    def freeze(model: nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 2 == 1)

    step = training(PROBLEMS[name], prepare=freeze)
    assert compare(step, always) == []


def test_a_frozen_layer_in_front_of_a_region_is_not_differentiated():
    def freeze(model: nn.Module) -> None:
        assert isinstance(model, Perceptron)
        model.layers[0].requires_grad_(False)

    step = training(PROBLEMS["perceptron"], prepare=freeze)
    assert compare(step, always) == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_model_under_autocast_is_bitwise_the_twin(name):
    step = training(PROBLEMS[name], precision=torch.bfloat16)
    assert compare(step, always) == []


def test_a_weight_cast_by_autocast_is_shared_by_two_regions_as_in_the_twin():
    # Autocast keeps the cast weight from the first use to the end of its own block,
    # so the second region gets from outside what the first one computed.
    step = training(
        Problem(Shared, lambda: torch.randn(5, 8)), precision=torch.bfloat16
    )
    assert compare(step, always) == []


def test_autocast_inside_a_region_is_bitwise_the_twin():
    def step(region: Region):
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        with region("cast"):
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            y = layer(y.float())
        y.square().sum().backward()
        return {"gradients": [x.grad, layer.weight.grad, layer.bias.grad]}

    assert compare(step, always) == []


def test_autocast_that_is_on_only_in_backward_does_not_touch_the_replay():
    def step(region: Region):
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        x = torch.randn(4, 8, requires_grad=True)
        with region("block"):
            y = layers(x).square()
        with torch.autocast("cpu", torch.bfloat16):
            y.sum().backward()
        return {"gradients": [x.grad, *(p.grad for p in layers.parameters())]}

    assert compare(step, functools.partial(CheckpointScope, verify="off")) == []


def test_scopes_on_two_of_four_layers_replay_once_each():
    x = torch.randn(3, 8)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    scopes = {0: CheckpointScope("layer1"), 3: CheckpointScope("layer4")}
    for number, layer in enumerate(layers):
        with scopes.get(number, plain()):
            x = torch.relu(layer(x).sin())
    nodes = [scope.nodes[0] for scope in scopes.values()]
    regions = [node.region for node in nodes]  # Kept alive, to look at them afterwards.
    x.sum().backward()
    assert [region.replays for region in regions if region] == [1, 1]


def test_mixed_plain_and_scoped_layers_are_bitwise_the_twin():
    def step(region: Region):
        layers = [nn.Linear(8, 8) for _ in range(4)]
        x = given = torch.randn(3, 8, requires_grad=True)
        for number, layer in enumerate(layers):
            with region(f"layer{number + 1}") if number in (0, 3) else plain():
                x = torch.relu(layer(x).sin())
        x.sum().backward()
        return {
            "gradients": [p.grad for m in layers for p in m.parameters()],
            "x": given,
        }

    assert compare(step, always) == []


def test_no_input_requires_grad_and_parameters_get_their_gradients():
    step = training(PROBLEMS["perceptron"], inputs_require_grad=False)
    assert compare(step, always) == []


def test_a_region_in_which_nothing_requires_grad_does_nothing():
    scope = CheckpointScope("idle")
    with scope:
        y = torch.randn(3).exp().sin()
    assert not y.requires_grad
    assert scope.nodes == []


# Spectral normalisation moves on when torch.utils.checkpoint runs it again.
@pytest.mark.parametrize("name", [n for n in PROBLEMS if n != "spectral norm"])
def test_a_region_inside_torch_checkpoint_is_bitwise_the_twin(name):
    problem = PROBLEMS[name]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = problem.model()

        def forward(self, x: torch.Tensor, region: Region) -> torch.Tensor:
            return torch_checkpoint(self.inner, x, region, use_reentrant=False)

    step = training(Problem(Outer, problem.inputs))
    off = functools.partial(CheckpointScope, verify="off")
    assert compare(step, off) == []
    assert compare(step, always) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_inside_a_region_is_bitwise_the_twin(reentrant):
    def step(region: Region):
        layers = [nn.Linear(8, 8) for _ in range(3)]
        given = torch.randn(3, 8, requires_grad=True)
        with region("around"):
            x = torch.tanh(layers[0](given))
            x = torch_checkpoint(layers[1], x, use_reentrant=reentrant)
            x = torch.tanh(layers[2](torch.tanh(x)))
        x.sum().backward()
        return {
            "gradients": [p.grad for m in layers for p in m.parameters()],
            "x": given.grad,
        }

    assert compare(step, always) == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_save_on_cpu_around_regions_is_bitwise_the_twin(name):
    problem = PROBLEMS[name]

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = problem.model()

        def forward(self, x: torch.Tensor, region: Region) -> torch.Tensor:
            with save_on_cpu():
                return self.inner(x, region)

    assert compare(training(Problem(Moved, problem.inputs)), always) == []


def test_hooks_around_a_region_keep_what_the_region_holds():
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    x = torch.randn(4, requires_grad=True)
    h = x * 2
    hooks = saved_tensors_hooks(pack, lambda number: packed[number])
    with hooks, CheckpointScope("inside", verify="always"):
        y = h.exp().sin()
    assert [t.shape for t in packed] == [(4,)]
    h.detach().fill_(100.0)  # The hooks have a copy: this changes nothing.
    (ours,) = torch.autograd.grad(y.sum(), x)
    (twins,) = torch.autograd.grad((x * 2).exp().sin().sum(), x)
    assert torch.equal(ours, twins)


def test_the_module_form_is_bitwise_the_twin_and_can_be_nested():
    def step(region: Region):
        model = Transformer()
        tokens = torch.randint(11, (2, 8))
        if region is not plain:
            for module in list(model.blocks.modules()):
                if isinstance(module, Block | nn.LayerNorm):
                    checkpoint_module(module, verify="always")
        loss = model(tokens, plain).square().mean()
        loss.backward()
        return {"gradients": [p.grad for p in model.parameters()]}

    assert compare(step, CheckpointScope) == []
