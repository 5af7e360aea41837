"""Policies: outputs that a region keeps although it could recompute them."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from recoup import CheckpointScope, KeepCostly, KeepSmall, checkpoint_module, keep
from tests.support.steps import Block, problems, step_differences
from tests.support.watching import Memory, Replayed, saved_bytes

PROBLEMS = problems()


@dataclass
class Everything:
    """Keeps all, and writes down what it was asked about."""

    asked: list[tuple[str, int]] = field(default_factory=list)

    def keeps(self, operator: str, nbytes: int) -> bool:
        self.asked.append((operator, nbytes))
        return True


class Nothing:
    def keeps(self, operator: str, nbytes: int) -> bool:
        return False


def call_with(policy):
    def call(model, x):
        with CheckpointScope("model", policy=policy):
            return model(x)

    return call


class TestAnyPolicy:
    @pytest.mark.parametrize("name", PROBLEMS)
    @pytest.mark.parametrize(
        "policy",
        [KeepCostly(), KeepSmall(512), Everything(), Nothing()],
        ids=lambda policy: type(policy).__name__,
    )
    def test_no_policy_changes_a_bit(self, name, policy):
        model, x = PROBLEMS[name]
        assert step_differences(model, call_with(policy), x) == []

    def test_it_is_asked_with_the_operator_and_its_bytes(self):
        policy = Everything()
        x = torch.ones(10, 10, requires_grad=True)
        with CheckpointScope("block", policy=policy):
            (x @ x).exp()
        assert policy.asked == [("aten.mm.default", 400), ("aten.exp.default", 400)]

    def test_the_outcome_of_a_write_can_be_kept(self):
        policy = Everything()
        x = torch.ones(10, requires_grad=True)
        with CheckpointScope("block", policy=policy) as scope:
            y = (x * 2).relu_()
        region = scope.nodes[0].region
        y.sum().backward()
        assert policy.asked == [("aten.mul.Tensor", 40), ("aten.relu_.default", 40)]
        assert region is not None
        assert region.replays == 0
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((10,), 2.0))

    def test_keeping_nothing_is_keeping_what_comes_from_outside(self):
        model, x = PROBLEMS["mlp"]

        def plain_scope():
            with CheckpointScope("model"):
                return model(x)

        assert saved_bytes(lambda: call_with(Nothing())(model, x)) == saved_bytes(
            plain_scope
        )

    def test_keeping_everything_replays_nothing(self):
        x = torch.ones(10, requires_grad=True)
        with CheckpointScope("block", policy=Everything()):
            y = x.exp().sin().tanh()
        with Replayed() as replayed:
            y.sum().backward()
        assert replayed.total == 0

    def test_what_nobody_needs_is_not_kept(self):
        x = torch.ones(1000, requires_grad=True)
        with CheckpointScope("block", policy=Everything()):
            useless = x + 1
            memory = Memory(useless)
            y = useless.sum() + x.exp().sum()
            del useless
        assert memory.is_freed
        y.backward()


class TestKeepCostly:
    @pytest.mark.parametrize(
        "operator",
        [
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
            torch.ops.aten.convolution.default,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
            torch.ops.aten.mkldnn_rnn_layer.default,
        ],
        ids=str,
    )
    def test_products_convolutions_and_attention_are_kept(self, operator):
        assert KeepCostly().keeps(str(operator), 1)

    @pytest.mark.parametrize(
        "operator",
        [
            torch.ops.aten.gelu.default,
            torch.ops.aten.native_layer_norm.default,
            torch.ops.aten.native_dropout.default,
            torch.ops.aten.add.Tensor,
            torch.ops.aten._softmax.default,
            torch.ops.aten.native_batch_norm.default,
        ],
        ids=str,
    )
    def test_norms_activations_and_sums_are_not(self, operator):
        assert not KeepCostly().keeps(str(operator), 1 << 40)

    def test_a_block_replays_no_product_and_every_cheap_operator(self):
        block, x = Block(dropout=0.1), torch.randn(2, 8, 16)
        with CheckpointScope("block", policy=KeepCostly()):
            out = block(x)
        with Replayed() as replayed:
            out.sum().backward()
        dear = {"mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu"}
        assert not dear & set(replayed.operators)
        assert replayed.operators["gelu"] == 1
        assert replayed.operators["native_layer_norm"] == 2

    def test_a_convolution_is_kept(self):
        layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 3, 3))
        x = torch.randn(1, 3, 8, 8)
        with CheckpointScope("layer", policy=KeepCostly()):
            out = layer(x)
        with Replayed() as replayed:
            out.sum().backward()
        assert dict(replayed.operators) == {"gelu": 1}

    def test_it_keeps_more_than_nothing_and_less_than_the_plain_run(self):
        block, x = Block(), torch.randn(2, 64, 16)
        ours = saved_bytes(lambda: call_with(KeepCostly())(block, x))
        assert saved_bytes(lambda: call_with(None)(block, x)) < ours
        assert ours < saved_bytes(lambda: block(x))


class TestKeepSmall:
    def test_the_threshold_itself_is_small(self):
        assert KeepSmall(100).keeps("aten.exp.default", 100)
        assert not KeepSmall(100).keeps("aten.exp.default", 101)

    def test_small_outputs_are_kept_and_large_ones_are_not(self):
        small = torch.ones(10, requires_grad=True)
        large = torch.ones(1000, requires_grad=True)
        with CheckpointScope("block", policy=KeepSmall(400)):
            y = small.exp().sin().sum() + large.exp().cos().sum()
        with Replayed() as replayed:
            y.backward()
        # The small exp is kept; the large one is computed again.
        assert dict(replayed.operators) == {"exp": 1}

    def test_a_module_takes_a_policy(self):
        model = checkpoint_module(nn.Tanh(), policy=KeepSmall(400))
        y = model(torch.ones(10, requires_grad=True))
        with Replayed() as replayed:
            y.sum().backward()
        assert replayed.total == 0


def test_a_mark_and_a_policy_together_keep_both():
    x = torch.randn(8, 8, requires_grad=True)
    scope = CheckpointScope("block", policy=KeepCostly())
    with scope:
        y = keep((x @ x).exp()).sin().tanh()
    # Held: x for the product's derivative, exp's result; the product itself is not
    # needed, because exp's derivative is its result.
    assert scope.memory_bytes == 2 * x.nbytes
    y.sum().backward()
