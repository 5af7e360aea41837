"""Regions under a tracer: each takes off its own hooks and no others."""

import gc
import weakref

import torch

from recoup import CheckpointScope
from recoup.backend.autograd.saved_tensors import ambient_hooks, pop_hooks, push_hooks
from recoup.backend.memory.meters import StorageMeter
from recoup.backend.operators.timers import OperatorTimer
from recoup.measurement.tracing.tracer import StepTracer
from tests.support.twin import leftovers


def mine(tensor):
    return tensor


def test_a_traced_region_leaves_hooks_alone_that_were_pushed_inside_it():
    x = torch.ones(4, requires_grad=True)
    tracer = StepTracer(StorageMeter(), OperatorTimer("cpu"))
    tracer.attach()
    try:
        with CheckpointScope("block"):
            y = x.exp().sin()
            push_hooks(mine, mine)
        hooks = ambient_hooks()
        assert hooks is not None
        assert hooks[0] is mine
        pop_hooks()
        y.sum().backward()
    finally:
        tracer.stop()
        tracer.detach()
    assert list(leftovers()) == []
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


def test_a_traced_region_dies_with_its_graph():
    x = torch.ones(4, requires_grad=True)
    tracer = StepTracer(StorageMeter(), OperatorTimer("cpu"))
    tracer.attach()
    gc.disable()
    try:
        scope = CheckpointScope("block")
        with scope:
            y = x.exp().sin()
        [node] = scope.nodes
        region = weakref.ref(node.region)
        y.sum().backward()
        del y, node
        assert region() is None
    finally:
        gc.enable()
        tracer.stop()
        tracer.detach()
