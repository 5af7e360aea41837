"""What is recorded, and what is kept because a second run might differ or stall."""

import torch
from torch import nn

from recoup import CheckpointScope
from recoup.engine.region import Region


def kept_operators(run) -> set[str]:
    scope = CheckpointScope("recorded")
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    with scope:
        run(x)
    return set(scope.kept_operators)


def test_a_copy_to_another_device_is_kept():
    assert kept_operators(lambda x: (x * 2).to("meta")) == {"aten._to_copy.default"}


def test_a_conversion_on_the_same_device_is_recorded():
    assert kept_operators(lambda x: (x * 2).to(torch.bfloat16)) == set()
    assert kept_operators(lambda x: (x * 2).to("cpu", torch.bfloat16)) == set()


def test_choices_among_equals_are_kept():
    assert kept_operators(lambda x: x.exp().topk(2)) == {"aten.topk.default"}


def test_shapes_that_depend_on_data_are_kept():
    assert "aten.index.Tensor" in kept_operators(lambda x: x[x > 0])


def test_random_operators_are_recorded():
    assert kept_operators(lambda x: nn.functional.dropout(x.exp(), 0.5).sin()) == set()


def test_a_tensor_that_only_lends_its_shape_is_not_computed_again():
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    scope = CheckpointScope("shape", verify="off")
    with scope:
        y = x.cos()
        z = (torch.zeros_like(y) + x).exp()
    (node,) = scope.nodes
    del y
    assert isinstance(node.region, Region)
    z.sum().backward(retain_graph=True)
    names = {str(operation.operator) for operation in node.region.tape.operations}
    assert names == {"aten.zeros_like.default", "aten.add.Tensor", "aten.exp.default"}


def test_a_complex_operator_that_is_kept_gives_the_plain_result():
    a = torch.randn(4, 3, dtype=torch.complex128)
    b = torch.randn(4, 2, dtype=torch.complex128)
    plain = torch.linalg.lstsq(a, b, driver="gels").residuals
    with CheckpointScope("least squares"):
        inside = torch.linalg.lstsq(a, b, driver="gels").residuals
    assert torch.equal(inside, plain)
