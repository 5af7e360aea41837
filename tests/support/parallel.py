"""Training in several processes with regions inside: each runs in all of them."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional as collectives
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from recoup import CheckpointScope

WIDTH = 8
STEPS = 5
Forward = Callable[[nn.Module, Tensor, Any], Tensor]


class Reduce(torch.autograd.Function):
    """Adds up over all processes in place, as Megatron's row-parallel layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class Gather(torch.autograd.Function):
    """Collects rows of all processes, as contrastive losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        out = [torch.zeros_like(x) for _ in range(distributed.get_world_size())]
        distributed.all_gather(out, x)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = torch.stack(grads)
        distributed.all_reduce(total)
        return total[distributed.get_rank()]


class Block(nn.Module):
    """A normalised two-layer network around a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.second(functional.gelu(self.first(self.norm(x)))))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)])


class Regions(nn.Module):
    """Blocks, each in a region, and some of these in another.

    Args:
        parts: The blocks.
        region: Returns a region by name.
        together: How many blocks the regions around take.
    """

    def __init__(self, parts: nn.Module, region: Any, together: int = 2) -> None:
        super().__init__()
        self.parts = parts
        self.region = region
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        parts: Any = list(self.parts.children())
        for begin in range(0, len(parts), self.together):
            with self.region("outer"):
                for block in parts[begin : begin + self.together]:
                    with self.region("block"):
                        x = block(x)
        return x


def replicated(region: Any) -> nn.Module:
    return DistributedDataParallel(Regions(blocks(), region))


def sharded(region: Any, together: int = 1) -> nn.Module:
    net = blocks()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in net:
        fully_shard(block, mesh=mesh)
    model = Regions(net, region, together)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(region: Any) -> nn.Module:
    net = blocks()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in net:
        parallelize_module(
            block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
    return Regions(net, region)


def sequence_parallel(region: Any) -> nn.Module:
    """Rows are split where tensors are not."""
    net = blocks()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in net:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "first": ColwiseParallel(input_layouts=Shard(0)),
            "second": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            "dropout": SequenceParallel(sequence_dim=0),
        }
        parallelize_module(block, mesh, plan)
    return Split(net, region, mesh)


class Split(Regions):
    """Regions around blocks that each see a part of the rows."""

    def __init__(self, parts: nn.Module, region: Any, mesh: Any) -> None:
        super().__init__(parts, region)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        out: Any = super().forward(distribute_tensor(x, self.mesh, [Shard(0)]))
        return out.full_tensor()


def by_hand(region: Any) -> nn.Module:
    """Row-parallel layers whose parts are added up by a collective in place."""
    return ByHand(region)


class ByHand(nn.Module):
    def __init__(self, region: Any) -> None:
        super().__init__()
        torch.manual_seed(distributed.get_rank())
        self.region = region
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(3)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for place, weight in enumerate(self.weights):
            with self.region("outer"), self.region("row parallel"):
                h = x @ weight
                # Now and then only, long after the region was verified.
                if place != 1 or self.calls % 4 == 0:
                    h = Reduce.apply(h)
                x = torch.tanh(h) * h.sin()
            with self.region("official"):
                x = collectives.all_reduce(x / 2).tanh()
        return x


class Contrastive(nn.Module):
    """A loss that compares the rows of all processes."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.region = region
        self.encoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with self.region("contrast"):
            mine = functional.normalize(self.encoder(x).tanh(), dim=1)
            every: Any = torch.cat(list(Gather.apply(mine)))
            noise = torch.full((len(x), 1), distributed.get_rank() + 1.0)
            distributed.broadcast(noise, 0)
            return (mine @ every.T / 0.1).logsumexp(1, keepdim=True) * noise


def contrastive(region: Any) -> nn.Module:
    return DistributedDataParallel(Contrastive(region))


def sharded_in_pairs(region: Any) -> nn.Module:
    """Regions that take more than one sharded unit."""
    return sharded(region, together=2)


KINDS = {
    "replicated": replicated,
    "sharded": sharded,
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
    "collectives in place": by_hand,
    "contrastive": contrastive,
}


def local(tensor: Tensor) -> list[float]:
    """Return a process's own part of a tensor, exactly."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().double().flatten().tolist()


def train(rank: int, kind: str, verify: str | None) -> dict[str, Any]:
    """Train a few steps; regions do nothing without a word for verification.

    Returns:
        Gradients of all steps, and how many activations were recomputed.
    """
    replays = 0
    scopes: list[CheckpointScope] = []

    def region(name: str) -> Any:
        if verify is None:
            return contextlib.nullcontext()
        scope = CheckpointScope(name, verify=verify)  # pyright: ignore[reportArgumentType]
        scopes.append(scope)
        return scope

    net = {**KINDS, "sharded in pairs": sharded_in_pairs}[kind](region)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    found = []
    shared = kind in ("tensor parallel", "sequence parallel")
    for step in range(STEPS):
        torch.manual_seed(100 + step + (0 if shared else 10 * rank))
        x = torch.randn(4 * distributed.get_world_size(), WIDTH)
        optimizer.zero_grad()
        loss = net(x).square().mean()
        regions = [node.region for scope in scopes for node in scope.nodes]
        loss.backward(retain_graph=bool(regions))
        replays += sum(each.replays for each in regions if each is not None)
        del regions, loss
        scopes.clear()
        found.append([local(p.grad) for p in net.parameters() if p.grad is not None])
        optimizer.step()
    return {"gradients": found, "replays": replays}
