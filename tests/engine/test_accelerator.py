"""What holds on an accelerator: the same bits, no more memory, no synchronisation."""

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from recoup import CheckpointScope, KeepCostly
from recoup.checkpointing import rerun
from recoup.engine.verification.replay_check import Verify
from recoup.errors import RecoupError
from tests.support.models import PROBLEMS, training
from tests.support.twin import Region, Step, compare

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Compare bits only where PyTorch itself gives the same bits twice."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_the_accelerator(step: Step) -> Step:
    def moved(region: Region) -> Any:
        with torch.device("cuda"):
            return step(region)

    return moved


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("verify", ["first", "always", "full"])
def test_training_is_bitwise_the_twin(name: str, verify: Verify):
    step = training(PROBLEMS[name], steps=3, optimizer=torch.optim.AdamW)

    def region(name: str) -> CheckpointScope:
        return CheckpointScope(name, verify=verify)

    assert compare(on_the_accelerator(step), region) == []


@pytest.mark.parametrize("name", ["transformer", "residual network", "perceptron"])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_autocast_is_bitwise_the_twin(name: str, precision: torch.dtype):
    problem = PROBLEMS[name]

    def step(region: Region) -> dict[str, Any]:
        model, inputs = problem.model(), problem.inputs()
        with torch.autocast("cuda", precision):
            loss = model(inputs, region).float().square().mean()
        loss.backward()
        return {"gradients": [p.grad for p in model.parameters()]}

    assert compare(on_the_accelerator(step), CheckpointScope) == []


def test_dropout_draws_the_same_and_leaves_the_generator_as_the_twin_does():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(64, 64, requires_grad=True)
        with region("dropout"):
            y = nn.functional.dropout(x.sin(), 0.4)
            y = nn.functional.dropout(y.exp(), 0.4)
        y.sum().backward()
        return {"output": y.detach(), "gradient": x.grad}

    assert compare(on_the_accelerator(step), CheckpointScope) == []


class Block(nn.Module):
    """A feed-forward block with attention, large enough to show in the allocator."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        parts = [t.unflatten(-1, (8, -1)).transpose(1, 2) for t in (query, key, value)]
        mixed = nn.functional.scaled_dot_product_attention(*parts)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(x)))


def peak_bytes(blocks: nn.ModuleList, run: Any) -> int:
    x = torch.randn(8, 512, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        for parameter in blocks.parameters():
            parameter.grad = None
        torch.cuda.reset_peak_memory_stats()
        y = x
        for block in blocks:
            y = run(block, y)
        y.float().square().mean().backward()
        del y
    return torch.cuda.max_memory_allocated()


def scoped(block: nn.Module, x: Tensor) -> Tensor:
    with CheckpointScope("block"):
        return block(x)


def test_the_peak_is_at_most_that_of_torch_checkpoint_and_far_below_plain():
    blocks = nn.ModuleList(Block() for _ in range(6)).to("cuda", torch.bfloat16)
    ours = peak_bytes(blocks, scoped)
    theirs = peak_bytes(
        blocks, lambda b, x: torch_checkpoint(b, x, use_reentrant=False)
    )
    kept = peak_bytes(blocks, lambda block, x: block(x))
    assert ours <= theirs
    assert ours < 0.6 * kept  # with gradients, which all have


def refuse_synchronisation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, torch says
        torch.cuda.set_sync_debug_mode("error")


def test_nothing_synchronises_but_the_verdict_at_the_end_of_the_first_backward():
    block = Block().to("cuda", torch.bfloat16)
    x = torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16)
    scoped(block, x).sum().backward()  # the first use, verified
    refuse_synchronisation()
    try:
        scoped(block, x).sum().backward()
        with CheckpointScope("costly", policy=KeepCostly(), verify="always"):
            y = block(x)  # fingerprints are taken here, and not read
    finally:
        torch.cuda.set_sync_debug_mode("default")
    y.sum().backward()


def test_copies_between_devices_are_kept():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(8, device="cuda", requires_grad=True)
        with region("copies"):
            there = (x * 2).cpu().exp()
            back = there.cuda().sin()
        back.sum().backward()
        return {"gradient": x.grad}

    assert compare(step, CheckpointScope) == []


def test_draws_on_another_device_than_the_first_argument_are_repeated():
    def step(region: Region) -> dict[str, Any]:
        torch.manual_seed(0)
        x = torch.randn(8, device="cuda", requires_grad=True)
        like = torch.ones(8)
        with region("draws"):
            y = (x * torch.rand_like(like, device="cuda")).sin()
        y.sum().backward()
        return {"gradient": x.grad}

    assert compare(step, functools.partial(CheckpointScope, verify="off")) == []


def test_backward_on_the_accelerators_own_thread_frees_everything():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    block = Block().to("cuda")
    x = torch.randn(2, 64, 256, device="cuda")
    scoped(block, x).sum().backward()
    del block, x
    assert torch.cuda.memory_allocated() == before


CHOICES = {
    "topk": lambda x: x.topk(37, dim=-1),
    "topk of one long row": lambda x: x.reshape(-1).topk(4096),
    "nonzero": lambda x: (x > 2).nonzero(),
    "unique": lambda x: x.unique(return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: x.unique_consecutive(return_inverse=True),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.reshape(-1).long()),
    "histc of integers": lambda x: x.int().histc(8, 0, 7),
    "bincount": lambda x: x.reshape(-1).long().bincount(),
    "cumsum of integers": lambda x: x.reshape(-1).long().cumsum(0),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_are_recomputed_repeat_themselves(name: str):
    """Many equals, at other addresses each time, with other work on the device."""
    torch.use_deterministic_algorithms(mode=False)
    x = torch.randint(0, 8, (2048, 512), device="cuda").float()
    expected = tree_leaves(CHOICES[name](x))
    noise = torch.randn(1024, 1024, device="cuda")
    for number in range(50):
        with torch.cuda.stream(torch.cuda.Stream()):
            noise = noise @ noise * 1e-3
        given = torch.empty(x.numel() + number, device="cuda")[number:].view_as(x)
        found = tree_leaves(CHOICES[name](given.copy_(x)))
        assert all(map(torch.equal, found, expected))


WANTED = (
    "addmm cumsum gather index_add matmul nn_functional_batch_norm "
    "nn_functional_conv2d nn_functional_dropout nn_functional_embedding "
    "nn_functional_gelu nn_functional_layer_norm scatter_add "
    "nn_functional_scaled_dot_product_attention softmax sort topk var_mean"
)


@pytest.mark.parametrize("name", WANTED.split())
def test_operators_of_the_database_are_bitwise_the_twin(name: str):
    pytest.importorskip("expecttest")  # PyTorch's database needs it
    from tests.support.operators import failures, operator_cases, operator_database

    (op,) = [op for op in operator_database() if op.formatted_name == name]
    cases = operator_cases(
        op,
        CheckpointScope,
        variants=["alone", "nested"],
        dtypes=[torch.float32, torch.bfloat16],
        limit=4,
        device="cuda",
    )
    assert failures(cases) == []


def test_errors_are_ours_on_the_accelerator_too():
    x = torch.randn(4, device="cuda", requires_grad=True)
    h = x * 2
    with CheckpointScope("changed"):
        y = h.exp().sin()
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RecoupError, match="changed in place"):
        y.sum().backward()


def test_the_padding_of_a_recurrent_workspace_is_not_compared():
    torch.use_deterministic_algorithms(False)  # which would fill it
    x = torch.randn(8, 64, 256, device="cuda", requires_grad=True)
    lstm = nn.LSTM(256, 256, batch_first=True, device="cuda")
    for filler in (7, 99):
        with CheckpointScope("lstm", verify="always"):
            loss = lstm(x)[0].square().mean()
        # What is freed here is what the replay's workspace is made of.
        for mebibytes in (1, 2, 4, 8, 16):
            torch.full((mebibytes << 20,), filler, dtype=torch.uint8, device="cuda")
        loss.backward()


@pytest.mark.parametrize(
    "kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
def test_attention_is_called_again_whatever_was_in_memory(kernel: SDPBackend):
    """Without dropout it saves a seed and an offset that it has not written."""
    torch.use_deterministic_algorithms(False)  # that would fill new memory
    shape = 2, 4, 64, 64
    query = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    def fill_free_memory(number: int) -> None:
        del [torch.full((2,), number, device="cuda") for _ in range(256)][:]

    with sdpa_kernel(kernel):
        for number in range(4):  # the first calls are verified
            fill_free_memory(number)
            out = rerun(attend, query)
            assert torch.equal(out, attend(query))
            fill_free_memory(-1 - number)
            out.sum().backward()
