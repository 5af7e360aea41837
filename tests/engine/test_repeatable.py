"""Results of kernels that do not repeat themselves are kept, where they do not."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from recoup import CheckpointScope
from tests.support.counting import Operators

ROWS = 100_000


@pytest.fixture
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def indices(kind: str = "rows") -> Tensor:
    if kind == "mask":
        return torch.rand(ROWS) > 0.5
    return torch.randint(0, 50, (ROWS,))


def accumulated(x: Tensor) -> Tensor:
    return torch.zeros(50, 2).index_put((indices(),), x * 1.5, accumulate=True)


def accumulated_in_place(x: Tensor) -> Tensor:
    return torch.zeros(50, 2).index_put_((indices(),), x * 1.5, accumulate=True)


def assigned_twice(x: Tensor) -> Tensor:
    bins = torch.zeros(50, 2)
    bins[indices()] = x * 1.5
    return bins


def put(x: Tensor) -> Tensor:
    return torch.zeros(50).put(indices(), x[:, 0] * 1.5, accumulate=True)


def copied(x: Tensor) -> Tensor:
    return torch.zeros(50, 2).index_copy(0, indices(), x * 1.5)


def gradient_of_rows(x: Tensor) -> Tensor:
    table = torch.randn(50, 2, requires_grad=True)
    loss = (table[indices()] * x).sin().sum()
    return torch.autograd.grad(loss, table, create_graph=True)[0]


RACING = [
    accumulated,
    accumulated_in_place,
    assigned_twice,
    put,
    copied,
    gradient_of_rows,
]


def writers(scope: CheckpointScope) -> set[str]:
    """Return the operators that write by index and whose results were kept."""
    return {n for n in scope.kept_operators if "put" in n or "index_copy" in n}


def run(body: Callable[[Tensor], Tensor]) -> tuple[CheckpointScope, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 2, requires_grad=True)
    scope = CheckpointScope("histogram", verify="always")
    with scope:
        bins = body(x)
        y = (bins * bins).tanh() * bins.sin()
    return scope, y


@pytest.mark.parametrize("body", RACING)
@pytest.mark.usefixtures("several_threads")
def test_a_race_between_threads_of_a_cpu_is_kept(body):
    for _ in range(3):
        scope, y = run(body)
        assert writers(scope) != set()
        y.sum().backward()


@pytest.mark.parametrize("body", RACING)
def test_one_thread_repeats_itself_so_that_nothing_is_kept(body):
    assert torch.get_num_threads() == 1
    scope, y = run(body)
    assert writers(scope) == set()
    y.sum().backward()


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_names_each_place_once_or_is_small_is_recomputed(accumulate):
    x = torch.randn(ROWS, requires_grad=True)
    mask, few = indices("mask"), torch.randint(0, 50, (100,))
    scope = CheckpointScope("masked", verify="always")
    with scope:
        masked = (x * 2).index_put((mask,), x[mask] * 3, accumulate=accumulate)
        small = torch.zeros(50).index_put((few,), x[:100] * 3, accumulate=accumulate)
        one = torch.zeros(50).index_put((indices(),), torch.ones(()), accumulate=True)
        y = masked.sin().sum() + (small * one).sin().sum()
    assert writers(scope) == set()
    with Operators() as operators:
        y.sum().backward()
    assert operators.counts["index_put"] >= 2
