"""Operators below autograd, as a mode sees them."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from recoup.backend.operators.dispatch import OperatorMode, all_plain, run_complex


class Seen(OperatorMode):
    """Writes down what it sees."""

    def __init__(self):
        super().__init__()
        self.names, self.types, self.graphs = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        self.types.extend(types)
        self.graphs.extend(
            t.grad_fn is not None for t in args if isinstance(t, torch.Tensor)
        )
        return func(*args, **(kwargs or {}))


def test_composite_operators_arrive_in_their_parts():
    x = torch.ones(2, 3, requires_grad=True)
    with Seen() as seen:
        torch.nn.functional.linear(x, torch.ones(4, 3), torch.ones(4))
    assert "aten.addmm.default" in seen.names
    assert "aten.linear.default" not in seen.names


def test_casts_of_autocast_are_operators():
    x = torch.ones(2, 2, requires_grad=True)
    with Seen() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        torch.mm(x, x)
    assert seen.names.count("aten._to_copy.default") >= 1
    assert seen.names[-1] == "aten.mm.default"


def test_in_place_writes_and_views_arrive_under_their_own_names():
    x = torch.ones(4)
    with Seen() as seen:
        x.view(2, 2)
        x.add_(1)
        torch.exp(x, out=torch.empty(4))
    assert {"aten.view.default", "aten.add_.Tensor", "aten.exp.out"} <= set(seen.names)


def test_the_mode_is_not_wrapped_for_dynamo():
    # The wrapper would cost more than the recorder; the recorder is marked instead.
    assert not OperatorMode._should_skip_dynamo()
    assert Seen.__torch_dispatch__.__qualname__ == "Seen.__torch_dispatch__"


def test_higher_order_operators_arrive():
    from torch._higher_order_ops.wrap import wrap

    with Seen() as seen:
        wrap(lambda x: x.sin(), torch.ones(3))
    assert (
        any("wrap" in name for name in seen.names) or "aten.sin.default" in seen.names
    )
    assert OperatorMode.supports_higher_order_operators


def test_plain_tensors_are_told_from_wrappers():
    assert all_plain((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
    assert all_plain(())
    with FakeTensorMode():
        assert all_plain((type(torch.ones(1)),))
    assert not all_plain((torch.Tensor, TwoTensor))


def test_an_alias_made_inside_a_mode_has_a_version_of_its_own():
    # Why the tape holds outside tensors otherwise than by a detached alias.
    versions = []

    class Aliasing(OperatorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.exp.default:
                versions.append(args[0].detach())
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True) * 2
    with Aliasing():
        x.exp()
    x.add_(1)
    assert (x._version, versions[0]._version) == (1, 0)


def test_lazy_conjugation_works_inside_a_mode_only_as_outside():
    found = []
    x = torch.tensor([1 + 2j, 3 - 1j])

    class Conjugating(OperatorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.exp.default:
                found.append(run_complex(torch.ops.aten.conj.default, args, {}))
                found[0] = run_complex(torch.ops.aten.mul.Tensor, [found[0], 1], {})
            return func(*args, **(kwargs or {}))

    with Conjugating():
        x.exp()
    assert torch.equal(found[0], x.conj() * 1)
