"""Buffers of a call that is repeated: as it found them, and afterwards as they were."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import copy

import pytest
import torch
from torch import nn

from recoup import rerun
from recoup.backend.memory.meters import StorageMeter
from recoup.checkpointing import is_recomputing
from recoup.engine.recording.region import STATE_BYTES
from recoup.errors import ChangedTensorError, MismatchError

SMALL = 100
LARGE = STATE_BYTES // 32 + 1  # rows of eight numbers of four bytes


class Codebook(nn.Module):
    """Moves a buffer along in every forward, if it is told to."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.moves = True
        self.register_buffer("code", torch.randn(rows, 8))

    def forward(self, x):
        h = self.linear(x)
        if self.moves:
            with torch.no_grad():
                self.code.mul_(0.9).add_(h.mean(0) * 0.1)
        return (h * self.code[: len(h)]).tanh().exp()


class Adding(Codebook):
    """Reads its buffer where plain autograd need not save it."""

    def forward(self, x):
        h = self.linear(x)
        return (h + self.code[: len(h)]).tanh().exp()


class Replacing(Codebook):
    """Puts another tensor in the place of its buffer."""

    def forward(self, x):
        h = self.linear(x)
        self.code = self.code * 0.9 + h.detach().mean(0) * 0.1
        return (h * self.code[: len(h)]).tanh().exp()


def batch():
    return torch.linspace(-1, 1, 128).view(16, 8)


def state(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*gradients, *model.buffers()]


def plain(model, x):
    return model(x)


def trained(call, model, steps=3):
    """What steps leave behind."""
    model = copy.deepcopy(model)
    for step in range(steps):
        call(model, batch() + step).sum().backward()
    return state(model)


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", [Codebook, Replacing])
def test_a_buffer_that_moves_in_each_forward_moves_once(kind, rows):
    model = kind(rows)
    pairs = zip(trained(rerun, model), trained(plain, model), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_each_of_several_forwards_is_repeated_with_the_buffer_that_it_found(rows):
    # Plain autograd refuses this: the first forward saved what the second wrote to.
    model, x = Codebook(rows), batch()
    twin = copy.deepcopy(model)
    first, second = rerun(model, x), rerun(model, x + 1)
    second.sum().backward()
    first.sum().backward()
    for given in (x + 1, x):
        other = copy.deepcopy(twin)
        other.zero_grad()
        if given is not x:
            other(x)
        other(given).sum().backward()
        for parameter, found in zip(twin.parameters(), other.parameters(), strict=True):
            before = parameter.grad
            parameter.grad = found.grad if before is None else before + found.grad
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_a_repetition_leaves_contents_and_version_as_they_were(rows):
    model = Codebook(rows)
    y = rerun(model, batch())
    model.code.add_(1)
    before, version = model.code.clone(), model.code._version
    y.sum().backward()
    assert torch.equal(model.code, before)
    assert model.code._version == version


def test_a_large_buffer_that_stays_as_it_is_is_copied_at_first_use_only():
    model, x = Codebook(LARGE), batch()
    model.moves = False
    held = []
    for _ in range(3):
        with StorageMeter() as meter:
            y = rerun(model, x)
            held.append(meter.live_bytes)
            y.sum().backward()
        del y
    assert held[0] >= model.code.nbytes
    assert max(held[1:]) < model.code.nbytes


def test_calls_that_find_the_same_large_buffer_share_one_copy():
    model, x = Codebook(LARGE), batch()
    model.moves = False
    with StorageMeter() as meter:
        results = [rerun(model, x) for _ in range(4)]
        assert meter.live_bytes < 2 * model.code.nbytes
    del results


def test_a_large_buffer_that_is_written_to_after_all_is_named_once_then_copied():
    model, x = Codebook(LARGE), batch()
    model.moves = False
    rerun(model, x).sum().backward()
    model.moves = True
    y = rerun(model, x)
    with pytest.raises(ChangedTensorError, match=r"Codebook.*'code'.*run this step ag"):
        y.sum().backward()
    model.zero_grad()
    pairs = zip(trained(rerun, model), trained(plain, model), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)
    rerun(model, x).sum().backward()


def test_a_large_buffer_that_is_written_to_between_forward_and_backward_is_copied():
    # As a queue of keys is, which the step goes on writing to before its backward.
    def step(call, model):
        model = copy.deepcopy(model)
        for _ in range(3):
            y = call(model, batch())
            model.code.mul_(0.5)
            y.sum().backward()
        return state(model)

    model = Adding(LARGE)
    pairs = zip(step(rerun, model), step(plain, model), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_what_is_steady_in_evaluation_may_move_in_training():
    class Trained(Codebook):
        def forward(self, x):
            self.moves = self.training
            return super().forward(x)

    model = Trained(LARGE)
    rerun(model.eval(), batch()).sum().backward()
    model.train().zero_grad()
    pairs = zip(trained(rerun, model), trained(plain, model), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_a_write_that_only_the_repetition_does_is_named():
    class Fickle(Codebook):
        def forward(self, x):
            self.moves = False
            if is_recomputing() and self.late:
                self.code.add_(1)
            return super().forward(x)

    model = Fickle(LARGE)
    model.late = False
    rerun(model, batch()).sum().backward()
    model.late = True
    y = rerun(model, batch())
    with pytest.raises(MismatchError, match=r"wrote to the buffer 'code'.*not in forw"):
        y.sum().backward()
