"""Mixed precision inside and around regions: bitwise the twin's, nothing left."""

from contextlib import ExitStack, contextmanager
from threading import Event, Thread

import pytest
import torch
from torch import nn

from recoup import CheckpointScope, MixedPrecisionScope, checkpoint, rerun
from recoup.errors import UsageError
from tests.support.models import PROBLEMS
from tests.support.steps import Block
from tests.support.twin import compare


def test_products_are_in_sixteen_bits_and_losses_are_not():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with MixedPrecisionScope(precision, device="cpu"):
            y = layer(x)
            loss = nn.functional.cross_entropy(y, torch.tensor([0, 1]))
        assert (y.dtype, loss.dtype) == (dtype, torch.float32)
    assert layer.weight.dtype is torch.float32


def test_threads_can_share_one_scope():
    scope, inside, left = MixedPrecisionScope("fp16", device="cpu"), Event(), Event()
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    found = []

    def other():
        with scope:
            inside.set()
            left.wait()
        found.append(layer(x).dtype)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        with scope:
            thread = Thread(target=other)
            thread.start()
            inside.wait()
        found.append(layer(x).dtype)
    left.set()
    thread.join()
    assert found == [torch.bfloat16, torch.float32]


def test_a_disabled_scope_does_nothing():
    scope = MixedPrecisionScope("bf16", device="cpu", enabled=False)
    with torch.autocast("cpu", torch.float16), scope:
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
    assert not scope.needs_scaler


def test_full_precision_inside_switches_autocast_off():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with MixedPrecisionScope("bf16", device="cpu"):
        with MixedPrecisionScope("fp32", device="cpu"):
            assert layer(x).dtype is torch.float32
        assert layer(x).dtype is torch.bfloat16


def test_one_scope_can_be_reentered_and_nested():
    scope = MixedPrecisionScope("bf16", device="cpu")
    for _ in range(2):
        with scope, scope:
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")


def test_an_exception_leaves_nothing_behind():
    scope = MixedPrecisionScope("bf16", device="cpu")
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


def test_only_float16_needs_a_scaler():
    needs = {
        precision: MixedPrecisionScope(precision, device="cpu").needs_scaler
        for precision in ("fp32", "bf16", "fp16")
    }
    assert needs == {"fp32": False, "bf16": False, "fp16": True}


def test_an_unknown_precision_is_refused():
    with pytest.raises(UsageError):
        MixedPrecisionScope("half")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["perceptron", "residual network", "transformer"])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_regions_replay_in_the_precision_of_forward(precision, name, inside):
    problem = PROBLEMS[name]

    @contextmanager
    def mixed(region, label):
        with ExitStack() as stack:
            stack.enter_context(region(label))
            if inside:
                stack.enter_context(MixedPrecisionScope(precision, device="cpu"))
            yield

    def step(region):
        model, inputs = problem.model(), problem.inputs()
        # Inside a region the other format takes over from the one around all.
        outer = {"bf16": "fp16", "fp16": "bf16"}[precision] if inside else precision
        with MixedPrecisionScope(outer, device="cpu"):
            out = model(inputs, lambda label: mixed(region, label))
            loss = out.float().square().mean()
        loss.backward()
        return {
            "loss": loss.detach(),
            "gradients": [parameter.grad for parameter in model.parameters()],
            "buffers": list(model.buffers()),
        }

    assert compare(step, CheckpointScope) == []


@pytest.mark.parametrize("call", [checkpoint, rerun])
def test_functions_replay_in_the_precision_of_forward(call):
    # Backward runs outside of the scope: a second run has to put autocast back.
    def forward(model, x):
        with MixedPrecisionScope("bf16", device="cpu"):
            return model(x)

    def region(model, x):
        with MixedPrecisionScope("bf16", device="cpu"):
            return call(model, x)

    model, x = Block(dropout=0.1), torch.randn(2, 8, 16)
    outs, grads = [], []
    for way in (forward, region):
        model.zero_grad()
        torch.manual_seed(0)
        out = way(model, x)
        out.float().square().sum().backward()
        outs.append(out.detach())
        grads.append([parameter.grad for parameter in model.parameters()])
    assert torch.equal(outs[0], outs[1])
    assert all(map(torch.equal, grads[0], grads[1]))
