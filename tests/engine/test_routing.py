"""Routing: choices, counts and permutations are made again, as checkpoints make them.

A mixture of experts chooses experts by `topk`, finds their tokens by `nonzero` or a
sort, counts them and adds up what comes back. Nothing of that may stay in memory
beside what the region was given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recoup import CheckpointScope, checkpoint_module
from tests.support.counting import Alive, Peak
from tests.support.twin import Region, compare

ROWS = 64


def keys(x: Tensor) -> Tensor:
    """Return whole numbers from 0 to 7, with many equals."""
    return (x.detach().abs() * 8).long().clamp(max=7)


def inverted(x: Tensor, write: Callable[[Tensor, Tensor, Tensor], Any]) -> Tensor:
    order = keys(x).argsort(stable=True)
    back = torch.empty_like(order)
    write(back, order, torch.arange(len(order)))
    return x[order].sin()[back]


FAMILIES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda x: x[x.topk(9).indices] * x.topk(9).values.exp(),
    "sort": lambda x: x.sort().values.exp(),
    "kthvalue": lambda x: x.reshape(8, 8).kthvalue(3).values.exp(),
    "median": lambda x: x.reshape(8, 8).median(1).values.exp(),
    "nanmedian": lambda x: x.reshape(8, 8).nanmedian(1).values.exp(),
    "mode": lambda x: x.reshape(8, 8).mode(1).values.exp(),
    "nonzero": lambda x: x[(x > 0).nonzero().squeeze(1)].sin(),
    "where": lambda x: x[torch.where(x > 0)[0]].sin(),
    "argwhere": lambda x: x[torch.argwhere(x > 0).squeeze(1)].sin(),
    "unique": lambda x: x * keys(x).unique(return_inverse=True)[1],
    "unique_consecutive": lambda x: x * keys(x).unique_consecutive(True)[1],
    "unique_dim": lambda x: x * keys(x).unique(return_inverse=True, dim=0)[1],
    "histc": lambda x: x[:8] * keys(x).float().histc(8, 0, 7),
    "bincount": lambda x: x[:8] * keys(x).bincount(minlength=8),
    "one_hot": lambda x: x[:, None] * nn.functional.one_hot(keys(x), 8),
    "repeat_interleave": lambda x: x[:8].repeat_interleave(keys(x)[:8]).sin(),
    "cumsum": lambda x: x * keys(x).cumsum(0),
    "scatter_add": lambda x: torch.zeros(8).scatter_add(0, keys(x), x).sin(),
    "index_add_": lambda x: torch.zeros(8).index_add_(0, keys(x), x).sin(),
    "index_put_": lambda x: inverted(x, lambda t, i, v: t.index_put_((i,), v)),
    "index_copy_": lambda x: inverted(x, lambda t, i, v: t.index_copy_(0, i, v)),
    "scatter_": lambda x: inverted(x, lambda t, i, v: t.scatter_(0, i, v)),
    "randperm": lambda x: x[torch.randperm(ROWS)].sin(),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_input_is_held_and_all_bits_are_the_plain_ones(name: str):
    body = FAMILIES[name]

    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(ROWS, requires_grad=True)
        with region("routed"):
            y = body(x * 2)
        y.sum().backward()
        return {"x": x.grad, "y": y}

    assert compare(step, partial(CheckpointScope, verify="always")) == []
    x = torch.randn(ROWS, requires_grad=True)
    with Alive() as alive:
        scope = CheckpointScope("routed", verify="off")
        with scope:
            y = body(x * 2)
        assert alive.total_bytes == y.nbytes
        assert scope.memory_bytes == x.nbytes
    # What Python reads is a number, not a tensor.
    assert set(scope.kept_operators) <= {"aten._local_scalar_dense.default"}


PARTLY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "half of a permutation": lambda t, x: t.index_put_(
        (x.argsort()[: ROWS // 2],), x[: ROWS // 2]
    ),
    "indices from outside": lambda t, x: t.index_put_((torch.arange(ROWS),), x),
    "a permutation, added": lambda t, x: t.index_put_((x.argsort(),), x, True),
    "values of a sort": lambda t, x: t.index_put_((keys(x).sort().values,), x),
    "a written permutation": lambda t, x: t.index_put_((x.argsort().add_(0),), x),
    "one row of sorted rows": lambda t, x: t.index_put_(
        (x.reshape(2, -1).argsort(1)[1],), x[: ROWS // 2]
    ),
    "reduced": lambda t, x: t.scatter_(0, x.argsort(), x, reduce="add"),
}


@pytest.mark.parametrize("name", PARTLY)
def test_a_buffer_filled_out_of_sight_is_kept_unless_every_place_is_written(name: str):
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(ROWS, requires_grad=True)
        with region("routed"):
            buffer = torch.empty(ROWS)
            buffer.numpy()[:] = 3.0
            PARTLY[name](buffer, (x * 2).detach())
            y = (x * buffer).sin()
        y.sum().backward()
        return {"x": x.grad, "y": y}

    assert compare(step, partial(CheckpointScope, verify="off")) == []


@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize("name", ["index_put", "index_add", "index_copy"])
def test_only_a_permutation_has_no_race_on_an_accelerator(name: str, *, permuted: bool):
    """No device is needed to record: the tensors have no contents."""
    x = torch.zeros(ROWS, device="meta", requires_grad=True)
    scope = CheckpointScope("routed", verify="off")
    with scope:
        order = x.detach().argsort()
        index = order if permuted else order // 2
        zeros = torch.zeros(ROWS, device="meta")
        if name == "index_put":
            zeros.index_put((index,), x * 2)
        else:
            getattr(zeros, name)(0, index, x * 2)
    assert (f"aten.{name}.default" in scope.kept_operators) != permuted


class Experts(nn.Module):
    """A mixture of experts: router, top-k, a loop over experts, sums by index."""

    def __init__(self, width: int = 16, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(experts)
        )
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).reshape(-1, x.shape[-1])
        weights, picks = self.router(rows).softmax(-1).topk(self.chosen, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        return x + self.mixed(rows, weights, picks).reshape(x.shape)

    def mixed(self, rows: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
        """Run one expert after the other on the tokens that chose it."""
        out = torch.zeros_like(rows)
        hits = nn.functional.one_hot(picks, len(self.experts)).permute(2, 1, 0)
        for number in (hits.sum((-1, -2)) > 0).nonzero().flatten().tolist():
            slot, token = torch.where(hits[number])
            found = self.experts[number](rows[token]) * weights[token, slot, None]
            out.index_add_(0, token, found)
        return out


class SortedExperts(Experts):
    """The same in groups: tokens sorted by expert, and back through the inverse."""

    def mixed(self, rows: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
        found, order = picks.reshape(-1).sort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        sizes = found.float().histc(len(self.experts), 0, len(self.experts) - 1)
        groups = rows[order // self.chosen].split(sizes.long().tolist())
        pairs = zip(self.experts, groups, strict=True)
        out = torch.cat([expert(group) for expert, group in pairs])
        out = (out * weights.reshape(-1)[order][:, None])[back]
        return out.reshape(-1, self.chosen, rows.shape[-1]).sum(1)


class Checkpointed(nn.Module):
    """PyTorch's own checkpointing of a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def trained(
    kind: type[Experts], wrap: Callable[[nn.Module], nn.Module]
) -> tuple[int, int, list[Tensor]]:
    """Return held bytes after forward, the peak and the gradients of a step."""
    torch.manual_seed(0)
    layers = [kind() for _ in range(4)]
    model = nn.Sequential(*map(wrap, layers))
    x = torch.randn(4, 32, 16)
    peak, held_bytes = Peak(), 0
    for _ in range(2):  # the first call of an operator may allocate more
        model.zero_grad(set_to_none=True)
        peak = Peak()
        with peak:
            loss = model(x).square().mean()
            held_bytes = peak.total_bytes
            loss.backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return held_bytes, peak.peak_bytes, gradients


@pytest.mark.parametrize("kind", [Experts, SortedExperts])
def test_experts_hold_no_more_than_checkpoints_of_pytorch(kind: type[Experts]):
    plain_bytes, _, expected = trained(kind, lambda layer: layer)
    torch_bytes, torch_peak, _ = trained(kind, Checkpointed)
    wrap = partial(checkpoint_module, verify="off")
    held_bytes, peak_bytes, gradients = trained(kind, wrap)
    assert held_bytes <= torch_bytes < plain_bytes
    assert peak_bytes <= torch_peak
    assert all(map(torch.equal, gradients, expected))
