"""fit on models whose tensors are not plain: sharded, compressed sparse."""

# A gradient is maybe None to pyright, and torch's distributed package has few types.
# pyright: reportOptionalMemberAccess=false, reportPrivateImportUsage=false
# pyright: reportArgumentType=false

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.backend.memory.meters import interval_meter
from recoup.core.compiled_plan import CompiledPlan
from recoup.errors import UnsupportedError
from recoup.measurement.timing.block_bench import BlockBench
from tests.support.odd_models import mean_square
from tests.support.processes import together


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """One process that is a group of its own."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)
            )
            for _ in range(5)
        )
    )


def batch() -> Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def sharded(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[return-value]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_gradients_of_a_sharded_model_are_those_of_its_twin(mesh):
    model, twin = sharded(blocks(), mesh), sharded(blocks(), mesh)
    recoup.fit(model, batch(), 0.7, loss=mean_square, accumulate=True)
    for _ in range(3):  # sums: what is left behind in the first step shows later
        for each in (model, twin):
            mean_square(each(batch())).backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(local(one.grad), local(other.grad))


def exchange_gradients(model: Any, *, is_on: bool) -> None:
    model.set_requires_gradient_sync(is_on)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_not_exchanged_yet_are_those_of_the_twin(
    mesh, dtype, earlier
):
    model, twin = blocks(), blocks()
    policy = MixedPrecisionPolicy(dtype, torch.float32)

    def run(each: Any) -> None:
        mean_square(each(batch()).float()).backward()

    for each in (model, twin):
        for block in each:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(each, mesh=mesh, mp_policy=policy)
        exchange_gradients(each, is_on=False)
        if earlier:
            run(each)
    step = partial(run, model)
    _, report = recoup.fit(model, step=step, budget=0.9, accumulate=True)
    # Gradients of whole parameters in the dtype of their exchange.
    held_bytes = sum(4 * p.numel() for p in model.parameters())
    assert report.floor_bytes > 2 * held_bytes
    for each in (model, twin):
        run(each)
        exchange_gradients(each, is_on=True)
        run(each)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(local(one.grad), local(other.grad))


@pytest.mark.parametrize("only", ["blocks", "all"])
def test_a_model_that_is_sharded_after_fit_is_refused_in_one_sentence(mesh, only):
    model = blocks()
    _, report = recoup.fit(model, batch(), 0.7, loss=mean_square)
    if only == "all":
        sharded(model, mesh)
    else:
        fully_shard(model[3], mesh=mesh)
    with pytest.raises(
        recoup.errors.UsageError, match=r"fully_shard first, then recoup\.fit"
    ):
        model(batch())
    report.remove()
    mean_square(model(batch())).backward()


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in model:
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def train_tensor_parallel(rank: int, share: float) -> tuple[int, int, int, bool]:
    """Fit and train in a process; return predicted, measured and budgeted bytes."""
    del rank
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, twin = (tensor_parallel(blocks(), mesh) for _ in range(2))
    _, report = recoup.fit(model, batch(), share, loss=mean_square)
    for each in (model, twin):
        mean_square(each(batch())).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return (
        report.predicted_peak_bytes,
        report.measured_peak_bytes,
        report.budget_bytes,
        all(torch.equal(local(one.grad), local(other.grad)) for one, other in pairs),
    )


@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tensor_parallel_model_works(tmp_path, share, count):
    for answer in together(train_tensor_parallel, tmp_path, share, count=count):
        predicted, measured, budget, is_bitwise = answer
        assert predicted == measured <= budget
        assert is_bitwise


def plan_apart(rank: int, shares: list[float]) -> tuple[str, int, int, int]:
    """Fit with budgets that differ by process; return plan, budget, peak and rounds."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = tensor_parallel(blocks(), mesh)
    _, report = recoup.fit(model, batch(), shares[rank], loss=mean_square)
    return (
        report.plan.to_json(),
        report.budget_bytes,
        report.measured_peak_bytes,
        report.rounds,
    )


@pytest.mark.slow
def test_processes_that_share_parameters_get_one_plan(tmp_path):
    first, second = together(plan_apart, tmp_path, [1.0, 0.6])
    assert first == second
    _, budget, peak, _ = first
    assert peak <= budget


def train_replicated(rank: int, *, wrapped: bool) -> tuple[int, list[bool], list[int]]:
    """Fit a replicated model in as many attempts as a process needs; train it.

    Returns the attempts, whether each gradient is that of the twin, and peaks.
    """
    model, twin = (DistributedDataParallel(normalised()) for _ in range(2))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(256, 32, generator=generator)

    def fit(budget: float) -> recoup.results.Fit:
        if wrapped:
            return recoup.fit(model, x, budget, loss=mean_square)[1]
        return recoup.fit(
            model.module, step=lambda: mean_square(model(x)).backward(), budget=budget
        )[1]

    attempts = 1
    try:
        report = fit(0.8 if rank == 0 else 1)
    except recoup.errors.InfeasibleError as error:
        attempts += 1
        report = fit(error.floor_bytes)
    equal = []
    for number in range(3):
        x = torch.randn(256, 32, generator=generator.manual_seed(2 * number + rank))
        for each in (model, twin):
            each.zero_grad()
            mean_square(each(x)).backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        equal += [torch.equal(one.grad, other.grad) for one, other in pairs]
        states = zip(model.buffers(), twin.buffers(), strict=True)
        equal += [torch.equal(one, other) for one, other in states]
    return attempts, equal, [report.measured_peak_bytes, report.budget_bytes]


def normalised() -> nn.Sequential:
    return nn.Sequential(*blocks(), nn.BatchNorm1d(32))


@pytest.mark.parametrize("wrapped", [True, False])
def test_replicas_that_fit_in_different_numbers_of_steps_train_as_their_twins(
    tmp_path, wrapped
):
    work = partial(train_replicated, wrapped=wrapped)
    found = together(work, tmp_path)
    assert [each[0] for each in found] == [1, 2], found
    for _, equal, (peak, budget) in found:
        assert all(equal)
        assert peak <= budget


class Graph(nn.Module):
    """A graph network, with its adjacency as a compressed sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = blocks()
        self.register_buffer("adjacency", torch.eye(256).to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(self.adjacency @ layer(x))
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_matrices_work():
    model, twin = Graph(), Graph()
    x = batch()
    _, report = recoup.fit(model, x, 0.7, loss=mean_square)
    assert report.measured_peak_bytes <= report.budget_bytes
    for each in (model, twin):
        mean_square(each(x)).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


BYTES_OF_A_BLOCK = 33664
"""Of its parameters: gloo frees what it exchanges in a thread of its own, so that a
step may hold those of up to two blocks more than another."""


def disturb_times(rank: int) -> None:
    """Let this process measure other times than the others."""
    times = random.Random(rank)
    seconds = BlockBench.seconds

    def disturbed(*args: Any, **options: Any) -> list[float]:
        return [times.random() * each for each in seconds(*args, **options)]

    BlockBench.seconds = disturbed


def fit_sharded(rank: int, share: float, dtype: torch.dtype) -> Any:
    """Fit compiled blocks of a sharded model in a process, and train it.

    Returns the plan, whether losses, gradients and parameters are bitwise those of a
    sharded twin without recoup, the difference that was reported, and bytes: predicted,
    measured, and of the budget.
    """
    disturb_times(rank)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    models = [sharded(blocks(), mesh, mp_policy=policy) for _ in range(2)]
    generator = torch.Generator().manual_seed(rank)
    report: Any
    _, report = recoup.fit(models[0], batch(), share, loss=mean_square, compile="exact")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    equal: list[bool] = []
    for _ in range(3):
        x = torch.randn(256, 32, generator=generator)
        losses: list[Tensor] = []
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(mean_square(each(x)))
            losses[-1].backward()
            optimizer.step()
        equal.append(torch.equal(*losses))
        for one, other in zip(*(each.parameters() for each in models), strict=True):
            equal.append(torch.equal(local(one.grad), local(other.grad)))
            equal.append(torch.equal(local(one), local(other)))
    report.remove()
    return (
        report.plan,
        all(equal),
        report.difference,
        report.predicted_peak_bytes,
        report.measured_peak_bytes,
        report.budget_bytes,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("share", "count"), [(0.9, 2), (0.7, 2), (0.7, 1)])
def test_compiled_blocks_of_a_sharded_model_are_bitwise_and_within_the_budget(
    tmp_path, share, count, dtype
):
    answers = together(fit_sharded, tmp_path, share, dtype, count=count)
    for answer in answers:
        assert not isinstance(answer, str), answer
        plan, is_bitwise, difference, predicted, measured, budget = answer
        assert plan == answers[0][0], "one plan, whatever the processes measure"
        assert len(plan.blocks) == 5
        assert all(block.digest for block in plan.blocks)
        assert is_bitwise
        assert difference == 0
        assert measured <= budget
        assert abs(measured - predicted) <= 2 * BYTES_OF_A_BLOCK


def measure_sharded(rank: int, rows: list[int], activations: list[Any]) -> Any:
    """Measure compiled blocks of a sharded model in a process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = blocks()
    for block in model:
        block.register_module("2", activations[rank]())
    step = recoup.measure(
        sharded(model, mesh), batch()[: rows[rank]], loss=mean_square, compile="exact"
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    return step.peak_bytes, step.floor_bytes, step.kinds


def fit_at_the_floor(rank: int, *, how: Any) -> Any:
    """Ask for too little, then for what was named; return both, and what is bitwise."""
    del rank
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, twin = (sharded(blocks(), mesh) for _ in range(2))
    with pytest.raises(recoup.errors.InfeasibleError) as refused:
        recoup.fit(model, batch(), 1000, loss=mean_square, compile=how)
    floor: int = refused.value.floor_bytes
    asked = floor + 2 * BYTES_OF_A_BLOCK
    _, report = recoup.fit(model, batch(), asked, loss=mean_square, compile=how)
    for each in (model, twin):
        mean_square(each(batch())).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    equal = [torch.equal(local(one.grad), local(other.grad)) for one, other in pairs]
    return floor, report.measured_peak_bytes <= asked, equal


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exact", False])
def test_a_budget_that_sharded_blocks_cannot_meet_is_refused_and_leaves_them(
    tmp_path, how
):
    first, second = together(partial(fit_at_the_floor, how=how), tmp_path)
    assert not isinstance(first, str), first
    assert first == second
    assert first[1]
    assert all(first[2])


def fit_compiled_by_user(rank: int, *, is_sharded_first: bool) -> tuple[bool, ...]:
    """Fit a model whose blocks the user compiled; return what is bitwise its twin's."""
    del rank
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, twin = blocks(), sharded(blocks(), mesh)
    for block in model:
        if is_sharded_first:
            fully_shard(block, mesh=mesh)
        block.compile(backend="aot_eager")
        if not is_sharded_first:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _, report = recoup.fit(model, batch(), 0.7, loss=mean_square, compile="exact")
    equal = [report.measured_peak_bytes <= report.budget_bytes]
    for _ in range(2):  # with the plan, and with the user's own compilation again
        for each in (model, twin):
            each.zero_grad()
            mean_square(each(batch())).backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        equal += [
            torch.equal(local(one.grad), local(other.grad)) for one, other in pairs
        ]
        report.remove()
    return tuple(equal)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded_first", [False, True])
def test_sharded_blocks_that_the_user_compiled_are_accepted(tmp_path, is_sharded_first):
    work = partial(fit_compiled_by_user, is_sharded_first=is_sharded_first)
    for answer in together(work, tmp_path):
        assert not isinstance(answer, str), answer
        assert all(answer)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[256, 256], [128, 256]])
def test_processes_measure_compiled_blocks_alike(tmp_path, rows):
    gelu = [nn.GELU, nn.GELU]
    first, second = together(measure_sharded, tmp_path, rows, gelu)
    assert not isinstance(first, str), first
    assert first == second
    peak, floor, kinds = first
    assert floor - 2 * BYTES_OF_A_BLOCK <= peak
    assert [name for kind in kinds for name in kind.blocks] == list("01234")


@pytest.mark.slow
def test_blocks_that_differ_among_processes_are_refused_by_all_of_them(tmp_path):
    unlike = [nn.GELU, nn.SiLU]
    for answer in together(measure_sharded, tmp_path, [256, 256], unlike):
        assert "processes capture different graphs" in answer


def test_a_block_with_a_unit_inside_is_not_compiled(mesh):
    model, twin = blocks(), blocks()
    for each in (model, twin):
        inner = each.get_submodule("0.1")
        fully_shard(inner, mesh=mesh, reshard_after_forward=False)
        sharded(each, mesh)
    step = recoup.measure(model, batch(), loss=mean_square, compile="exact")
    assert set(step.eager) == {"0"}
    assert "gathers parts of it by themselves" in step.eager["0"]
    _, report = recoup.fit(model, batch(), 0.9, loss=mean_square, compile="exact")
    assert report.measured_peak_bytes <= report.budget_bytes
    for each in (model, twin):
        mean_square(each(batch())).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(local(one.grad), local(other.grad))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # tensor parallel blocks
@pytest.mark.usefixtures("mesh")
def test_blocks_that_are_also_tensor_parallel_are_refused_in_one_sentence():
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = sharded(tensor_parallel(blocks(), both["tensor"]), both["data"])
    with pytest.raises(UnsupportedError, match="distributed in another way"):
        recoup.measure(model, batch(), loss=mean_square, compile="exact")
    assert all(parameter.grad is None for parameter in model.parameters())


def train_planned_then_sharded(rank: int, text: str) -> tuple[bool, int, int]:
    """Train in one of several processes with a plan that was made before sharding.

    Returns whether the losses and parameters are bitwise those of a sharded twin
    without a plan, and the bytes that blocks save in forward, without and with it.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, twin = (sharded(blocks(), mesh) for _ in range(2))
    applied = recoup.apply_plan(model, CompiledPlan.from_json(text))
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))
    outcomes: list[list[Tensor]] = []
    held: list[int] = []
    for each in (twin, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        outcome: list[Tensor] = []
        for _ in range(3):
            with interval_meter(torch.device("cpu")) as meter:
                loss = mean_square(each(x))
                meter.mark("backward")
                loss.backward()
            held.append(meter.intervals[-1].live_bytes)
            optimizer.step()
            optimizer.zero_grad()
            outcome.append(loss.detach())
        outcome += [local(parameter.detach()) for parameter in each.parameters()]
        outcomes.append(outcome)
    applied.remove()
    is_bitwise = all(map(torch.equal, *outcomes))
    return is_bitwise, held[2], held[-1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_compiled_plan_made_before_sharding_trains_bitwise_after_it(tmp_path, count):
    x = torch.randn(64, 32)
    report: Any
    _, report = recoup.fit(blocks(), x, 0.8, loss=mean_square, compile="exact")
    assert any(block.digest for block in report.plan.blocks)
    text = report.plan.to_json()
    for answer in together(train_planned_then_sharded, tmp_path, text, count=count):
        assert not isinstance(answer, str), answer
        is_bitwise, plain_bytes, planned_bytes = answer
        assert is_bitwise
        assert planned_bytes < plain_bytes


@pytest.mark.sweep
@pytest.mark.usefixtures("mesh")
def test_compiled_blocks_in_data_parallel_give_the_gradients_of_the_plain_run():
    twin, model = DistributedDataParallel(blocks()), DistributedDataParallel(blocks())
    _, report = recoup.fit(model, batch(), 0.95, loss=mean_square, compile="exact")
    for each in (twin, model):
        mean_square(each(batch())).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert report.measured_peak_bytes <= report.budget_bytes
