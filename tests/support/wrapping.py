"""What random programs do with wrapper subclasses and with collectives."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.parallel import Gather, Reduce


def begin_fake_group() -> None:
    """Make this process the first of two; collectives return what it gives them."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


def end_fake_group() -> None:
    """Take the process group back."""
    mesh_of_two.cache_clear()
    distributed.destroy_process_group()


@cache
def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


class Pair(torch.autograd.Function):
    """Wraps two tensors in one."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return TwoTensor(a.clone(), b.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Parts.apply(gradients[0])


class Parts(torch.autograd.Function):
    """Returns the two tensors of a wrapper."""

    @staticmethod
    def forward(ctx: Any, both: Any) -> Any:
        return both.a.clone(), both.b.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Pair.apply(*gradients)


def parts_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return the tensors that hold the contents of others."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            yield tensor._local_tensor
        elif isinstance(tensor, TwoTensor):
            yield tensor.a
            yield tensor.b
        else:
            yield tensor


@dataclass
class Wrapped:
    """The wrapped tensors of a program, which do not mix with the others."""

    tensors: list[Tensor] = field(default_factory=list)
    _unwrapped: list[torch.UntypedStorage] = field(default_factory=list)

    def clear(self) -> None:
        """Forget them all."""
        self.tensors.clear()
        self._unwrapped.clear()

    def locals(self) -> list[Tensor]:
        """Return what they are made of."""
        return [part.detach() for part in parts_of(self.tensors)]

    def operands(self, first: int, second: int) -> list[Tensor]:
        """Return the tensors that two numbers name, if there are any."""
        return [self._at(first), self._at(second)] if self.tensors else []

    def wrap(self, tensor: Tensor, kind: int) -> None:
        """Add a tensor in a wrapper of some kind."""
        if kind % 3 == 0:
            self.tensors.append(Pair.apply(tensor, tensor * 2))
        elif distributed.is_initialized():
            sharded = kind % 3 == 1 and tensor.dim() > 0
            placement = Shard(0) if sharded else Replicate()
            mesh = mesh_of_two()
            # A copy: a write to a wrapper gives what it wraps no new version, so that
            # PyTorch would not see that a tensor saved elsewhere has changed.
            own = tensor * 2
            made = DTensor.from_local(own, mesh, [placement], run_check=False)
            self.tensors.append(made)

    def compute(self, first: int, second: int) -> None:
        """Add the result of an operator."""
        if not self.tensors:
            return
        a, b = self._at(first), self._at(second)
        if isinstance(a, DTensor) and second % 4 == 0:
            self.tensors.append(a.redistribute(placements=[Replicate()]) * 2)
        elif type(a) is type(b) and a.shape == b.shape and second % 4 == 1:
            self.tensors.append(a * b)
        elif second % 4 == 2:
            self.tensors.append(a.tanh() * a)
        else:
            self.tensors.append((a + 1).sin())

    def write(self, first: int, second: int) -> list[Tensor]:
        """Change a tensor in place; return it."""
        if not self.tensors:
            return []
        target = self._at(first)
        # PyTorch counts no version of what a wrapper is made of. Operators that have
        # read that itself could not be recomputed, and nobody could notice, but for
        # DTensor, whose own methods give it out.
        own = {part.untyped_storage()._cdata for part in parts_of([target])}
        if any(storage._cdata in own for storage in self._unwrapped):
            return []
        if second % 2:
            target.mul_(0.5)
        else:
            target.tanh_()
        return [target]

    def unwrap(self, first: int) -> list[Tensor]:
        """Return a tensor without its wrapper."""
        if not self.tensors:
            return []
        wrapped = self._at(first)
        if isinstance(wrapped, DTensor):
            return [wrapped.to_local() * 2]
        self._unwrapped += [part.untyped_storage() for part in parts_of([wrapped])]
        a, b = Parts.apply(wrapped)
        return [a + b]

    def _at(self, number: int) -> Tensor:
        return self.tensors[-1 - number % len(self.tensors)]


def gathered(a: Tensor, _: Tensor) -> Tensor:
    """Multiply by rows of all processes, into memory that was made for them."""
    out = torch.zeros(2 * a.numel(), dtype=a.dtype)
    rows = [out[: a.numel()], out[a.numel() :]]
    distributed.all_gather(rows, a.detach().reshape(-1).contiguous())
    return a.reshape(-1) * rows[1]


def waited(a: Tensor, b: Tensor) -> Tensor:
    """Add up a copy in place, without waiting before the next operator."""
    total = b.detach().clone()
    work = distributed.all_reduce(total, async_op=True)
    y = a.sin()
    assert work is not None
    work.wait()
    return y * total.sum()


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reduce": lambda a, _: Reduce.apply(a * 2),
    "gather": lambda a, _: torch.stack(Gather.apply(a.contiguous())).tanh().sum(0),
    "gathered": gathered,
    "waited": waited,
}
