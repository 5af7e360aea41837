"""What random programs are made of: operators, views, writes and random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Doubling(torch.autograd.Function):
    """A custom function that saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = (x * 2).sin()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        return gradients[0] * 2 * (x * 2).cos() + 0 * y


def fitting(other: Tensor, target: Tensor) -> Tensor:
    """Return the operand if it broadcasts to the target's shape, else its sum."""
    try:
        return other.expand_as(target)
    except RuntimeError:
        return other.sum()


def first_four(tensor: Tensor) -> Tensor:
    """Return four elements of any tensor."""
    flat = tensor.reshape(-1)
    return flat[:4] if flat.numel() >= 4 else flat[:1].expand(4)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a matrix product of any two tensors."""
    if a.dim() == 2 == b.dim() and a.shape[1] == b.shape[0]:
        return a @ b
    return torch.outer(first_four(a), first_four(b))


def filled(a: Tensor, b: Tensor) -> Tensor:
    """Return an empty buffer that was filled slice by slice."""
    buffer = torch.empty(2, 4, dtype=a.dtype)
    buffer[0] = first_four(a)
    buffer[1].copy_(first_four(b))
    return buffer


def half_filled(a: Tensor, b: Tensor) -> Tensor:
    """Return the filled part of a buffer whose other part stays uninitialised."""
    buffer = b.new_empty(3, 4)
    buffer[1] = first_four(a)
    buffer[1] *= 2
    return buffer[1]


def sliced(tensor: Tensor, number: int) -> Tensor:
    """Return a strided slice of the tensor's own elements."""
    flat = tensor.detach() if number % 5 == 0 else tensor
    if flat.dim() == 0 or flat.shape[-1] < 2:
        return flat
    stride = flat.stride()
    shape = (*flat.shape[:-1], flat.shape[-1] - 1)
    return flat.as_strided(shape, stride, flat.storage_offset() + stride[-1])


COMPUTE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + fitting(b, a),
    "mul": lambda a, b: a * fitting(b, a),
    "div": lambda a, b: a / (fitting(b, a).square() + 1),
    "sub": lambda a, b: fitting(b, a) - a,
    "where": lambda a, b: torch.where(a > 0, a, fitting(b, a)),
    "product": product,
    "linear": lambda a, b: (
        functional.linear(first_four(a), product(b, a)[:4, :4].reshape(4, -1))
        if product(b, a).numel() == 16
        else first_four(a)
    ),
    "sin": lambda a, _: a.sin(),
    "tanh": lambda a, _: a.tanh(),
    "sigmoid": lambda a, _: a.sigmoid(),
    "relu": lambda a, _: a.relu(),
    "square": lambda a, _: a.square() / 4,
    "softmax": lambda a, _: a.softmax(-1) if a.dim() else a.exp().tanh(),
    "cumsum": lambda a, _: a.reshape(-1).cumsum(0) / 8,
    "sort": lambda a, _: a.reshape(-1).sort().values,
    "topk": lambda a, _: a.reshape(-1).topk(1).values,
    "index": lambda a, b: first_four(a)[first_four(b).argsort()],
    "cat": lambda a, b: torch.cat([first_four(a), first_four(b)]),
    "max": lambda a, b: torch.maximum(a, fitting(b, a)),
    "layer_norm": lambda a, _: functional.layer_norm(first_four(a), (4,)),
    "batch_norm": lambda a, b: functional.batch_norm(
        product(a, b)[:, :1],
        torch.zeros(1, dtype=a.dtype),
        torch.ones(1, dtype=a.dtype),
        training=True,
    ),
    "clone": lambda a, _: a.clone(),
    "filled": filled,
    "half_filled": half_filled,
    "custom": lambda a, _: Doubling.apply(a),
    "single": lambda a, _: a.float().exp().double() if a.numel() < 64 else a,
}

VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "transpose": lambda a, _: a.transpose(0, -1) if a.dim() else a,
    "narrow": lambda a, k: a.narrow(0, k % a.shape[0], 1) if a.dim() else a,
    "expand": lambda a, _: a.expand(2, *a.shape) if a.dim() < 3 else a[0],
    "view": lambda a, _: a.view(-1) if a.is_contiguous() else a,
    "slice": sliced,
    "select": lambda a, k: a.select(-1, k % a.shape[-1]) if a.dim() else a,
    "unbind": lambda a, k: a.unbind(0)[k % a.shape[0]] if a.dim() else a,
    "split": lambda a, k: a.split(2)[0] if a.dim() else a,
    "diagonal": lambda a, _: a.diagonal() if a.dim() == 2 else a,
    "unsqueeze": lambda a, _: a.unsqueeze(0) if a.dim() < 3 else a[0],
    "detach": lambda a, _: a.detach(),
    "same": lambda a, _: a,
}


def assign_slice(target: Tensor, other: Tensor) -> None:
    part = target[:1] if target.dim() else target
    part[...] = fitting(other, part)


def scale_slice(target: Tensor, other: Tensor) -> None:
    part = target[..., 1:] if target.dim() else target
    part.mul_(fitting(other, part))


def assign_diagonal(target: Tensor, other: Tensor) -> None:
    part = target.diagonal() if target.dim() == 2 else target
    part.copy_(fitting(other, part))


def put(target: Tensor, other: Tensor) -> None:
    if target.dim():
        target[torch.tensor([0])] = fitting(other, target[:1])


def quiet_add(target: Tensor, other: Tensor) -> None:
    with torch.no_grad():
        target.add_(fitting(other, target))


@torch.library.custom_op("recoup_programs::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draw, as kernels of other libraries do: no tag of the schema tells."""
    return x * torch.rand_like(x)


@torch.library.custom_op("recoup_programs::noisy_", mutates_args={"x"})
def noisy_(x: Tensor, y: Tensor) -> None:
    x.mul_(torch.rand_like(x)).add_(y)


def foreign_write(target: Tensor, other: Tensor) -> None:
    with torch.no_grad():
        noisy_(target, fitting(other, target))


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda a, b: a.add_(fitting(b, a)),
    "mul_": lambda a, b: a.mul_(fitting(b, a)),
    "copy_": lambda a, b: a.copy_(fitting(b, a)),
    "fill_": lambda a, b: a.fill_(0.25),
    "zero_": lambda a, b: a.zero_(),
    "tanh_": lambda a, b: a.tanh_(),
    "relu_": lambda a, b: functional.relu_(a),
    "masked_fill_": lambda a, b: a.masked_fill_(a > 0.5, 0.5),
    "addcmul_": lambda a, b: a.addcmul_(fitting(b, a), fitting(b, a), value=0.5),
    "assign_slice": assign_slice,
    "scale_slice": scale_slice,
    "assign_diagonal": assign_diagonal,
    "put": put,
    "out": lambda a, b: torch.mul(a, 0.5, out=a),
    "foreach_": lambda a, b: torch.ops.aten._foreach_add_([a, b], 1.0),
    "quiet_add_": quiet_add,
    "foreign_": foreign_write,
    "t_": lambda a, b: a.t_() if a.dim() == 2 else None,
}

RANDOM: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "dropout": lambda a, _: functional.dropout(a, 0.5),
    "bernoulli": lambda a, _: a * torch.bernoulli(torch.full_like(a.detach(), 0.5)),
    "rand_like": lambda a, _: a * torch.rand_like(a),
    "own_bernoulli": lambda a, g: (
        a * torch.bernoulli(torch.full_like(a.detach(), 0.5), generator=g)
    ),
    "own_randn": lambda a, g: (
        a + torch.randn(a.shape, dtype=a.dtype, generator=g).tanh()
    ),
    "uniform_": lambda a, _: a * torch.empty_like(a.detach()).uniform_(),
    "own_normal_": lambda a, g: a * a.detach().clone().normal_(generator=g),
    "randperm": lambda a, _: first_four(a)[torch.randperm(4)],
    "foreign": lambda a, _: a + noisy(a.detach()),
}
