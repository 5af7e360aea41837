"""Sets of saved values against those that torch's own memory budget chooses."""

import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup.backend.compiler.joint_graphs import (
    JointGraph,
    KernelCall,
    TensorSpec,
    is_view,
    read_joint_graph,
)
from recoup.backend.compiler.partitioning import Probed, compiled_by, compiler_error
from recoup.core.compiled_plan import SavedSet
from recoup.measurement.timing.block_bench import costed
from recoup.planners.block_choice import saved_sets
from recoup.planners.min_cut import Demand, evaluate

pytestmark = pytest.mark.slow

BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
"""Values of torch's activation_memory_budget."""


class Attention(nn.Module):
    """A transformer layer."""

    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixing = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden):
        query, key, value = self.mixing(self.norm(hidden)).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.out(mixed)
        return hidden + self.narrow(functional.gelu(self.wide(hidden)))


class Bottleneck(nn.Module):
    """A residual block with a projection."""

    def __init__(self, before=32, inner=16, after=64):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, 2, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.project = nn.Sequential(
            nn.Conv2d(before, after, 1, 2, bias=False), nn.BatchNorm2d(after)
        )

    def forward(self, image):
        return functional.relu(self.inner(image) + self.project(image))


class Machine:
    """Kernels take the time of their traffic, products eight times as much."""

    bytes_per_second = 1e12

    def seconds(self, call: KernelCall, traffic_bytes: int) -> float:
        shapes = [len(a.shape) for a in call.args if isinstance(a, TensorSpec)]
        is_product = len(shapes) > 1 and "add.T" not in str(call.target)
        return (8 if is_product else 1) * traffic_bytes / self.bytes_per_second


def torchs_choices(block, given) -> tuple[JointGraph, dict[float, list[str]]]:
    """Return the joint graph, and what torch saves of it for each of its budgets."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import partitioners

    found: list[tuple[JointGraph, dict[float, list[str]]]] = []
    default = partitioners.choose_saved_values_set

    def base(node):
        return base(node.args[0]) if is_view(node) else node

    def chosen(graph, node_info, memory_budget=1.0):
        del memory_budget
        names = {
            budget: [base(n).name for n in default(graph, node_info, budget)]
            for budget in BUDGETS
        }
        found.append((read_joint_graph(graph, node_info, fuses=True), names))
        raise Probed

    def partition(module, inputs, **kwargs):
        with mock.patch.object(partitioners, "choose_saved_values_set", chosen):
            return partitioners.min_cut_rematerialization_partition(
                module, inputs, **kwargs
            )

    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition)
    try:
        compiled_by(block, {"backend": backend})(given)
    except Exception as error:
        if not isinstance(compiler_error(error), Probed):
            raise
    return found[0]


def mixed_seconds(sets: tuple[SavedSet, ...], held_bytes: int) -> float:
    """Return the time of many blocks that hold so much on average."""
    if held_bytes >= sets[0].held_bytes:
        return sets[0].seconds
    pairs = itertools.pairwise(sets)
    fast, small = next(p for p in pairs if p[1].held_bytes <= held_bytes)
    share = (fast.held_bytes - held_bytes) / (fast.held_bytes - small.held_bytes)
    return fast.seconds + share * (small.seconds - fast.seconds)


@pytest.mark.parametrize(
    ("block", "shape"), [(Attention(), (4, 64, 64)), (Bottleneck(), (4, 32, 16, 16))]
)
def test_no_choice_of_torch_is_faster_at_its_own_bytes(block, shape):
    joint, choices = torchs_choices(block, torch.randn(shape, requires_grad=True))
    costs = costed(joint, Machine())  # pyright: ignore[reportArgumentType]
    sets = saved_sets(costs)
    operations = costs.graph.operations
    forward_seconds = sum(operation.seconds for operation in operations)
    demand = Demand(
        costs.graph,
        range(len(operations)),
        costs.demanded,
        dict.fromkeys(costs.resident, 0),
    )
    numbers = {name: value for value, name in enumerate(costs.names)}
    slower = []
    for names in choices.values():
        held = [numbers[name] for name in names if name in numbers]
        choice = evaluate(demand, held)
        saving = sum(costs.save_seconds[value] for value in choice.starts)
        theirs = choice.seconds + saving
        slower.append(mixed_seconds(sets, choice.held_bytes) - theirs)
    assert max(slower) <= 1e-3 * forward_seconds
    # Where torch goes by counts of operations, ours are faster.
    assert min(slower) < -1e-2 * forward_seconds


def test_what_is_dropped_of_many_sets_can_be_replaced_by_mixtures():
    joint, _ = torchs_choices(
        Bottleneck(), torch.randn(4, 32, 16, 16, requires_grad=True)
    )
    costs = costed(joint, Machine())  # pyright: ignore[reportArgumentType]
    forward_seconds = sum(operation.seconds for operation in costs.graph.operations)
    every, few = saved_sets(costs, limit=64), saved_sets(costs, limit=6)
    assert len(every) > len(few)
    lost = [mixed_seconds(few, s.held_bytes) - s.seconds for s in every]
    assert max(lost) < 0.02 * forward_seconds
