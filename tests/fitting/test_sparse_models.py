"""Fitted models with sparse inputs, buffers and gradients train as without recoup."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup

WIDTH, NODES, WORDS = 16, 64, 32

pytestmark = pytest.mark.filterwarnings("ignore:Sparse [A-Z]* tensor support")

LAYOUTS = {
    "coo": torch.sparse_coo,
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
}


def layers() -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
            for _ in range(4)
        )
    )


def adjacency(nodes: int, layout: str) -> Tensor:
    generator = torch.Generator().manual_seed(nodes)
    dense = (torch.rand(nodes, nodes, generator=generator) < 0.1).float() / nodes
    return dense.to_sparse(layout=LAYOUTS[layout])


class GraphNetwork(nn.Module):
    """Its adjacency is an argument, or a buffer."""

    adjacency: Tensor | None

    def __init__(self, buffer: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = layers()
        self.register_buffer("adjacency", buffer)

    def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
        matrix = self.adjacency if adjacency is None else adjacency
        assert matrix is not None
        for layer in self.layers:
            x = x + torch.tanh(matrix @ layer(x))
        return x.square().mean()


class Words(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.layers = layers()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.layers(self.words(numbers)).square().mean()


def trained(model: nn.Module, batches: list[tuple[Any, ...]]) -> list[Tensor]:
    """Train in a loop that keeps gradients every other step; return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for number, batch in enumerate(batches * 2):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss = model(*batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return [*losses, *(p.detach() for p in model.parameters())]


def batch_of(nodes: int, layout: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(nodes, WIDTH, generator=generator), adjacency(nodes, layout)


@pytest.mark.filterwarnings("ignore::recoup.errors.BudgetWarning")
@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
class TestGraphNetworks:
    def test_sparse_inputs_of_several_sizes(self, layout, rerun):
        batches = [batch_of(nodes, layout) for nodes in (NODES, NODES // 2, NODES)]
        expected = trained(GraphNetwork(), batches)
        model = GraphNetwork()
        _, report = recoup.fit(model, batches[0], 0.8, rerun=rerun)
        assert report.measured_peak_bytes <= report.budget_bytes
        assert all(map(torch.equal, expected, trained(model, batches)))

    def test_a_sparse_buffer(self, layout, rerun):
        x, matrix = batch_of(NODES, layout)
        expected = trained(GraphNetwork(matrix), [(x,)])
        model = GraphNetwork(matrix)
        _, report = recoup.fit(model, x, 0.8, rerun=rerun)
        assert report.measured_peak_bytes <= report.budget_bytes
        assert all(map(torch.equal, expected, trained(model, [(x,)])))


@pytest.mark.filterwarnings("ignore::recoup.errors.BudgetWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that Dynamo looks for
@pytest.mark.parametrize("executor", [{}, {"rerun": True}, {"compile": "exact"}])
def test_sparse_gradients(executor):
    batches = [(torch.arange(count) % WORDS,) for count in (96, 48)]
    expected = trained(Words(), batches)
    model = Words()
    _, report = recoup.fit(model, batches[0], 0.9, **executor)
    assert report.measured_peak_bytes <= report.budget_bytes
    assert all(map(torch.equal, expected, trained(model, batches)))
