"""What regions cost and save, to the last byte and operator."""

import functools
import gc
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from recoup import (
    CheckpointProfiler,
    CheckpointScope,
    KeepCostly,
    checkpoint,
    keep,
    recompute,
)
from recoup.backend.memory.meters import StorageMeter
from recoup.checkpointing import is_recomputing
from tests.support.counting import Alive, Operators, SavedByAutograd, flops_of
from tests.support.models import Transformer
from tests.support.twin import plain

BATCH, LENGTH, WIDTH, HEADS, BLOCKS, FLOAT = 2, 8, 32, 4, 3, 4
unverified = functools.partial(CheckpointScope, verify="off")


def transformer(dropout: float = 0.0) -> tuple[Transformer, Tensor]:
    model = Transformer(
        width=WIDTH, heads=HEADS, blocks=BLOCKS, length=LENGTH, dropout=dropout
    )
    return model, torch.randint(11, (BATCH, LENGTH))


def transformer_block_bytes() -> int:
    """What plain autograd saves inside one block, by hand, without its input."""
    tokens = BATCH * LENGTH
    wide = 1 + 3 + 1  # the first norm's output, query-key-value, attention's output
    wide += 1 + 1 + 4 + 4  # the first sum, the second norm's output, before/after GELU
    statistics = 2 + 2  # mean and deviation of both norms
    return FLOAT * (tokens * WIDTH * wide + tokens * statistics + tokens * HEADS)


def test_scopes_around_the_blocks_of_a_gpt_cost_at_most_a_third_more_operations():
    model, tokens = transformer()

    def step(region) -> None:
        model(tokens, region).square().mean().backward()

    twin = flops_of(lambda: step(plain))
    ours = flops_of(lambda: step(unverified))
    ratio = Fraction(ours, twin)
    assert 1 < ratio <= Fraction(4, 3), f"{float(ratio):.4f} of the plain operations"


def test_a_kept_matrix_product_is_not_computed_again():
    model, tokens = transformer()

    def step(region) -> None:
        model(tokens, region).square().mean().backward()

    keeping = functools.partial(unverified, policy=KeepCostly())
    twin, ours = flops_of(lambda: step(plain)), flops_of(lambda: step(keeping))
    assert ours == twin


def test_saved_bytes_of_a_gpt_fall_by_the_number_computed_by_hand():
    model, tokens = transformer()
    with StorageMeter() as meter:
        twin = model(tokens, plain)
        twin_bytes = meter.live_bytes
        del twin
        nothing = meter.live_bytes
        ours = model(tokens, unverified)
        saved = twin_bytes - meter.live_bytes
        del ours
    assert nothing == 0
    assert saved == BLOCKS * transformer_block_bytes()


def test_the_bytes_computed_by_hand_are_those_that_autograd_saves():
    model, _ = transformer()
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with SavedByAutograd() as saved:
        y = model.blocks[0](x)
    assert saved.bytes_without(x, *model.parameters()) == transformer_block_bytes()
    del y


def test_a_block_between_two_scopes_leaves_alive_only_its_output():
    model, _ = transformer()
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with Alive() as alive, unverified("block"):
        y = model.blocks[0](x)
    assert alive.sizes == [y.nbytes]


def perceptron_block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.linear(functional.gelu(functional.linear(x, up)), down)


def test_the_profiler_counts_the_bytes_saved_exactly():
    x = torch.randn(6, 8, requires_grad=True)
    up, down = torch.randn(32, 8), torch.randn(8, 32)
    up.requires_grad_()
    down.requires_grad_()
    with CheckpointProfiler() as profiler, unverified("block"):
        y = perceptron_block(x, up, down)
    hidden = 6 * 32 * FLOAT
    outside = x.nbytes + up.nbytes + down.nbytes
    assert profiler.plain_bytes() == outside + 2 * hidden
    assert profiler.kept_bytes() == outside
    assert profiler.memory_saved() == 2 * hidden
    assert profiler.checkpoint_count() == 1
    del y


def test_a_bias_that_only_the_replay_needs_is_kept_and_no_loss():
    x = torch.randn(6, 8, requires_grad=True)
    layer = nn.Linear(8, 32)
    with CheckpointProfiler() as profiler, unverified("block"):
        y = functional.gelu(layer(x))
    assert profiler.memory_saved() == 6 * 32 * FLOAT
    assert profiler.parameter_bytes() == layer.weight.nbytes + layer.bias.nbytes
    del y


def test_what_is_saved_outside_of_regions_counts_on_both_sides():
    x = torch.randn(64, requires_grad=True)
    with CheckpointProfiler() as profiler:
        y = x.sin().cos()
        with unverified("block"):
            z = y.sin().cos().sin()
        z = z.exp()
    each = x.nbytes
    assert profiler.plain_bytes() == 6 * each  # x, sin, cos | sin, cos | exp
    assert profiler.memory_saved() == 2 * each
    del z


def test_generator_states_are_counted_as_kept():
    x = torch.randn(6000, requires_grad=True)
    with CheckpointProfiler() as profiler, unverified("block"):
        y = functional.dropout(x.sin()).cos()
    state_bytes = torch.get_rng_state().nbytes
    assert profiler.kept_bytes() == x.nbytes + state_bytes
    del y


def counted_backward(loss: Tensor) -> Operators:
    with Operators() as operators:
        loss.backward()
    return operators


def test_only_what_saved_tensors_need_is_replayed():
    x = torch.randn(8, requires_grad=True)
    with unverified("chain"):
        # exp saves its result, sin its input; nobody saves what sin gives.
        y = (x.exp() + 1).sin() * 2
    twin = x.detach().clone().requires_grad_()
    extra = counted_backward(y.sum()).counts
    extra -= counted_backward(((twin.exp() + 1).sin() * 2).sum()).counts
    del extra["detach"]  # autograd's own: how it takes a tensor back from a hook
    assert extra == {"exp": 1, "add": 1}


def test_code_that_no_gradient_needs_is_not_replayed():
    x = torch.randn(8, requires_grad=True)
    with unverified("dead code"):
        x.detach().tan().atan()
        y = x.exp().sin()
    replayed = counted_backward(y.sum()).counts
    assert (replayed["tan"], replayed["atan"]) == (0, 0)


def test_views_are_not_replayed():
    x = torch.randn(4, 4, requires_grad=True)
    with unverified("views"):
        y = x.exp().T.reshape(16)[2:].view(2, 7).sin()
    region = scope_region(y)
    y.sum().backward()
    assert region.replayed_operators == 2  # exp, and the copy that reshape makes


def scope_region(y: Tensor):
    """Return the region behind a tensor's saved tensors, through its graph."""
    node = y.grad_fn
    while node is not None:
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                data = getattr(node, name).data
                if hasattr(data, "region"):
                    return data.region
        node = node.next_functions[0][0]
    raise AssertionError("no region in this graph")


def test_a_value_that_several_gradients_need_is_replayed_once():
    x = torch.randn(8, requires_grad=True)
    with unverified("fan"):
        y = x.exp()
        z = y.sin() + y.cos() + y.tanh() + y * y
    assert counted_backward(z.sum()).counts["exp"] == 1


class Rereading(torch.autograd.Function):
    """Reads its saved tensor several times, as the property invites one to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * (2 + 0 * sum(ctx.saved_tensors[0] for _ in range(3)))


def test_a_function_that_reads_a_shared_value_again_causes_no_second_replay():
    x = torch.randn(8, requires_grad=True)
    with unverified("shared"):
        y = x.exp()
        z = y.sin().cos()
        first: Any = Rereading.apply(y)
    # The function comes first in backward, the sine of the same value last.
    region = scope_region(z)
    (z + first.tanh()).sum().backward()
    assert region.replays == 1


def test_what_is_kept_is_not_replayed_nor_what_only_it_needed():
    x = torch.randn(8, requires_grad=True)
    with unverified("kept"):
        y = keep(torch.tanh(x * 2) + 1).sin()
    replayed = counted_backward(y.sum()).counts
    # tanh saves its own result, so that much is replayed; the sum is not.
    assert replayed["add"] == 0
    with unverified("kept"):
        y = keep(keep(torch.tanh(x * 2)) + 1).sin()
    region = scope_region(y)
    y.sum().backward()
    assert region.replays == 0


def test_a_kept_value_that_nobody_needs_is_not_held():
    x = torch.randn(8, requires_grad=True)
    with Alive() as alive:
        with unverified("useless"):
            y = keep(x.detach() * 3)
            z = x.exp().sin()
        del y
        assert alive.sizes == [z.nbytes]


def test_a_policy_holds_only_what_backward_or_a_replay_needs():
    x = torch.randn(8, 8, requires_grad=True)
    with Alive() as alive:
        with unverified("policy", policy=KeepCostly()):
            y = x @ x
            z = (y + 1).sin()
            idle = x.detach() @ x.detach()
        del idle, y
        # The first product is an input of the replay, the second of nothing.
        assert alive.sizes == [z.nbytes, x.nbytes]


def test_recompute_makes_one_exception_in_a_scope_that_keeps():
    x = torch.randn(8, requires_grad=True)
    with Alive() as alive:
        with unverified("keeps", use_recomputation=False):
            y = recompute(x.exp()).sin().tanh().exp()
        assert alive.sizes == [y.nbytes] * 2  # what tanh saved, and the result
        assert counted_backward(y.sum()).counts["exp"] == 1


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_every_region_is_replayed_once_in_a_backward(depth):
    x = torch.randn(8, requires_grad=True)
    scopes = [unverified(f"level {number}") for number in range(depth)]
    y = nest(x, scopes)
    regions = [scope.nodes[0].region for scope in scopes]
    y.sum().backward()
    assert [region.replays for region in regions if region] == [1] * depth


def nest(x: Tensor, scopes: list[CheckpointScope]) -> Tensor:
    if not scopes:
        return x.sin().exp()
    with scopes[0]:
        return nest(x.sin().exp(), scopes[1:]).tanh().exp()


@pytest.mark.parametrize("backwards", [1, 2, 3])
def test_every_backward_replays_a_region_once(backwards):
    x = torch.randn(8, requires_grad=True)
    scope = unverified("block")
    with scope:
        y = x.sin().exp().tanh()
    region = scope.nodes[0].region
    for _ in range(backwards):
        y.sum().backward(retain_graph=True)
    assert region is not None
    assert region.replays == backwards


def test_a_backward_that_needs_nothing_of_a_region_does_not_replay_it():
    x = torch.randn(8, requires_grad=True)
    scope = unverified("untouched")
    with scope:
        y = x.sin().exp()
    region = scope.nodes[0].region
    (x * 2).sum().backward()
    assert region is not None
    assert region.replays == 0
    del y


def test_a_chain_of_scopes_replays_each_of_them_once_and_no_operator_twice():
    x = torch.randn(8, requires_grad=True)
    for number in range(5):
        with unverified(f"link {number}"):
            x = x.asinh().atan()
    replayed = counted_backward(x.sum()).counts
    # atan saves its input, which is all that is replayed.
    assert (replayed["asinh"], replayed["atan"]) == (5, 0)


def test_user_code_runs_once():
    calls: list[bool] = []

    def noted(x: Tensor) -> Tensor:
        calls.append(is_recomputing())
        return x.exp().sin()

    checkpoint(noted, torch.randn(3, requires_grad=True)).sum().backward()
    assert calls == [False]


def test_a_dispatch_mode_sees_that_operators_are_recomputed():
    class Recomputed(Operators):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if is_recomputing():
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, requires_grad=True)
    with Recomputed() as watching:
        with unverified("block"):
            y = x.exp().sin()
        assert watching.names == []
        y.sum().backward()
    assert watching.names == ["exp.default"]


def objects_until_backward(run) -> int:
    """Count the objects that the collector has to look at between the passes."""
    run().sum().backward()
    gc.collect()
    before = {id(found) for found in gc.get_objects()}
    result = run()
    for _ in range(3):  # plain tuples are freed from the inside out
        gc.collect()
    count = sum(id(found) not in before for found in gc.get_objects())
    result.sum().backward()
    return count


def test_no_more_objects_live_until_backward_than_with_torch():
    x = torch.randn(2, 4, 4, 4, requires_grad=True)
    layers = [
        layer
        for _ in range(3)
        for layer in (nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True))
    ]
    blocks = [nn.Sequential(*layers) for _ in range(8)]

    def ours() -> Tensor:
        hidden = x
        for block in blocks:
            with unverified("block"):
                hidden = block(hidden)
        return hidden

    def torchs() -> Tensor:
        hidden = x
        for block in blocks:
            hidden = torch_checkpoint(block, hidden, use_reentrant=False)
        return hidden

    assert objects_until_backward(ours) <= objects_until_backward(torchs)
