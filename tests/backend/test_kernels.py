"""A kernel runs exactly its operator, however it is called."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.backend.operators.kernels import _BOUND, kernel_of

aten = torch.ops.aten
x = torch.linspace(-1, 1, 6).reshape(2, 3)
square = torch.linspace(-1, 1, 9).reshape(3, 3)
batch = torch.linspace(-1, 1, 8).reshape(2, 2, 2)
heads = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)

images = torch.linspace(-1, 1, 64).reshape(2, 2, 4, 4)
filters = torch.linspace(-1, 1, 36).reshape(2, 2, 3, 3)
pair = torch.linspace(0.5, 1, 2)
once = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


# Arguments as a dispatch mode gets them, numbers for tensors included.
CALLS = {
    aten._log_softmax.default: [(x, 1, False)],
    aten._softmax.default: [(x, -1, False)],
    aten.add.Tensor: [(x, x), (x, 2), (x, 0.5), (x, True), (2 * x.int(), x)],
    aten.addmm.default: [(x[0], x, square), (x[0], x, square.t())],
    aten.add_.Tensor: [(x, x), (x, 2), (x, 0.5), (2 * x.int(), 1)],
    aten.bmm.default: [(batch, batch)],
    aten.cat.default: [([x, x],), ([x, x], 1), ([x, x], -1)],
    aten.clone.default: [(x,), (x.t(),)],
    aten.convolution.default: [
        (images, filters, None, *once),
        (images, filters, pair, [2, 1], [1, 0], [1, 1], False, [0, 0], 1),
        (images, filters, pair, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ],
    aten.detach.default: [(x,)],
    aten.div.Tensor: [(x, x), (x, 2), (x.int(), 2)],
    aten.embedding.default: [(x, torch.tensor([0, 1])), (x, torch.tensor([0]), 1)],
    aten.expand.default: [(x, [4, 2, 3]), (x, [-1, -1])],
    aten.gelu.default: [(x,)],
    aten.max_pool2d_with_indices.default: [
        (images, [2, 2]),
        (images, [3, 3], [2, 2], [1, 1], [1, 1], True),
    ],
    aten.mean.dim: [(x, [1]), (x, [0, 1], True), (x, None), (x, [])],
    aten.mm.default: [(x, square)],
    aten.mul.Tensor: [(x, x), (x, 2), (x, 1j), (x.int(), x)],
    aten.mul_.Tensor: [(x, x), (x, 2), (x, 0.5)],
    aten.native_batch_norm.default: [
        (images, pair, pair, None, None, True, 0.1, 1e-5),
        (images, None, None, pair, pair, False, 0.1, 1e-5),
    ],
    aten.native_dropout.default: [(x, 0.0, True), (x, 0.5, False), (x, 1.0, None)],
    aten.native_group_norm.default: [
        (images, pair, pair, 2, 2, 16, 2, 1e-5),
        (images, None, None, 2, 2, 16, 1, 1e-5),
    ],
    aten.native_layer_norm.default: [
        (x, [3], x[0], x[1], 1e-5),
        (x, [3], None, None, 1.0),
    ],
    aten.permute.default: [(x, [1, 0])],
    aten.pow.Tensor_Scalar: [(x, 2), (x, 3.0), (x, True), (x.int(), 2)],
    aten.relu.default: [(x,)],
    aten.relu_.default: [(x,)],
    aten.rsqrt.default: [(x,)],
    aten.sigmoid.default: [(x,), (x.int(),)],
    aten.silu.default: [(x,)],
    aten.sub.Tensor: [(x, x), (x, 2)],
    aten.sum.dim_IntList: [(x, [1]), (x, [0, 1], True), (x, None), (x, [])],
    aten.t.default: [(x,), (x[0],)],
    aten.tanh.default: [(x,)],
    aten.transpose.int: [(x, 0, 1), (x, -1, 0)],
    aten.unbind.int: [(x,), (x, 1)],
    aten.unsqueeze.default: [(x, 0)],
    aten.view.default: [(x, [3, 2]), (x, [-1])],
    aten._scaled_dot_product_flash_attention_for_cpu.default: [
        (heads, heads, heads),
        (heads, heads, heads, 0.0, True),
    ],
}
KEYWORDS = {
    aten.add.Tensor: {"alpha": 3},
    aten.add_.Tensor: {"alpha": 3},
    aten.addmm.default: {"beta": 2, "alpha": 3},
    aten.clone.default: {"memory_format": torch.contiguous_format},
    aten.gelu.default: {"approximate": "tanh"},
    aten.mean.dim: {"dtype": torch.float64},
    aten.sub.Tensor: {"alpha": 2},
    aten.sum.dim_IntList: {"dtype": torch.float64},
}
# On a GPU; called on tensors without memory.
far = torch.empty(1, 2, 4, 4, device="meta")
distant = torch.empty(2, 2, 4, 4, device="meta")
line = torch.empty(2, device="meta")
CALLS |= {
    aten._scaled_dot_product_efficient_attention.default: [
        (far, far, far, None, True),
        (far, far, far, far, False, 0.0, True),
    ],
    aten.cudnn_batch_norm.default: [
        (distant, line, line, line, line, True, 0.1, 1e-5),
        (distant, line, line, None, None, True, 0.1, 1e-5),
    ],
}
KEYWORDS[aten._scaled_dot_product_flash_attention_for_cpu.default] = {
    "attn_mask": torch.zeros(4, 4),
    "scale": 0.5,
}
KEYWORDS[aten._scaled_dot_product_efficient_attention.default] = {"scale": 0.5}


class Seen(TorchDispatchMode):
    """Writes down what is called, and with what."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, repr(args), repr(kwargs or {})))
        return func(*args, **(kwargs or {}))


def calls(run, args, kwargs):
    args = copy.deepcopy(args)  # some operators write to them
    with Seen() as seen:
        result = run(*args, **kwargs)
    several = isinstance(result, (list, tuple))
    return seen.calls, repr(list(result) if several else result)


def test_every_bound_operator_is_called_here():
    assert {operator.name() for operator in CALLS} == set(_BOUND)


@pytest.mark.parametrize("operator", CALLS, ids=str)
def test_the_fast_call_dispatches_exactly_the_operator(operator):
    kernel = kernel_of(operator)
    assert kernel.run is _BOUND[operator.name()]
    for args in CALLS[operator]:
        for kwargs in ({}, KEYWORDS.get(operator, {})):
            ours, result = calls(kernel.run, args, kwargs)
            assert (ours, result) == calls(operator, args, kwargs)
            assert [called for called, *_ in ours] == [operator]


def test_a_wrong_binding_would_be_noticed():
    ours, _ = calls(torch.sum, (x, [0]), {})
    assert [called for called, *_ in ours] != [aten.sum.default]


def test_an_operator_without_a_binding_is_called_by_itself():
    assert kernel_of(aten.sum.default).run(x).item() == x.sum().item()
    assert kernel_of(aten.sum.default) is kernel_of(aten.sum.default)


def test_a_kernel_knows_its_operator_and_its_facts():
    kernel = kernel_of(aten.t_.default)
    assert kernel.operator is aten.t_.default
    assert (kernel.passes, kernel.reshapes, kernel.simple) == (True, True, False)
    attention = kernel_of(aten._scaled_dot_product_flash_attention.default)
    assert (attention.simple, attention.quiet) == (False, True)
    assert not kernel_of(aten.bernoulli.default).quiet


def test_a_parameter_is_taken_as_a_tensor():
    ours, _ = calls(kernel_of(aten.t.default).run, (nn.Parameter(x),), {})
    assert [called for called, *_ in ours] == [aten.t.default]
