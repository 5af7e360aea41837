"""Small programs with sparse tensors, of which the operator database has few."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.twin import Region, Step
from tests.support.variants import first_order

Program = Callable[[Tensor, Tensor], Tensor]


def pattern() -> Tensor:
    """Return the pattern of the sparse matrix: 4 x 5, eight entries."""
    generator = torch.Generator().manual_seed(5)
    flat = torch.randperm(20, generator=generator)[:8].sort().values
    return torch.stack([flat // 5, flat % 5])


def matrix(values: Tensor) -> Tensor:
    """Make the sparse matrix of eight values."""
    return torch.sparse_coo_tensor(pattern(), values, (4, 5), check_invariants=True)


def mm(values: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.mm(matrix(values).coalesce(), dense)


def mm_of_products(values: Tensor, dense: Tensor) -> Tensor:
    # Both factors are made inside the region, and both are saved.
    return torch.sparse.mm(matrix(values * values).coalesce(), dense.sin())


def mm_uncoalesced(values: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.mm(matrix(values) + matrix(values.exp()), dense)


def addmm(values: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.addmm(dense[:4] * 2, matrix(values).coalesce(), dense)


def softmax(values: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.softmax(matrix(values.tanh()), dim=1).to_dense() @ dense


def log_softmax(values: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.log_softmax(matrix(values.tanh()), dim=1).to_dense() @ dense


def sums(values: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.sum(matrix(values.square()), dim=0).to_dense() * dense[:, 0]


def sparse_times_sparse(values: Tensor, dense: Tensor) -> Tensor:
    product = matrix(values.sin()) * matrix(values.exp())
    return product.to_dense() @ dense


def round_trip(values: Tensor, dense: Tensor) -> Tensor:
    product = matrix(values.sin()).to_dense() @ dense
    return product.to_sparse().to_dense().exp()


def masked(values: Tensor, dense: Tensor) -> Tensor:
    product = dense[:4].sin() @ dense
    return product.sparse_mask(matrix(values).coalesce()).to_dense().square()


def compressed(values: Tensor, dense: Tensor) -> Tensor:
    return matrix(values.sin()).to_dense().to_sparse_csr() @ dense.cos()


def embedding(values: Tensor, dense: Tensor) -> Tensor:
    # The gradient of the table is sparse.
    rows = functional.embedding(pattern()[1], dense, sparse=True)
    return rows.tanh() * values[:, None]


PROGRAMS: list[Program] = [
    addmm,
    compressed,
    embedding,
    log_softmax,
    masked,
    mm,
    mm_of_products,
    mm_uncoalesced,
    round_trip,
    softmax,
    sparse_times_sparse,
    sums,
]


def sparse_step(program: Program) -> Step:
    """Run a program in a region, and differentiate it."""

    def step(region: Region) -> dict[str, Any]:
        values = torch.linspace(-1, 2, 8, dtype=torch.float64).requires_grad_()
        dense = torch.randn(5, 5, dtype=torch.float64).requires_grad_()
        with region("program"):
            result = program(values, dense)
        return first_order(result, (values, dense))

    return step
