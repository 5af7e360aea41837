"""The stash: memory is free while it is away, and everything is as it was after."""

import pytest
import torch

from recoup.backend.stash import Stash


def test_what_is_on_the_processor_stays():
    x = torch.arange(4.0)
    stash = Stash([x])
    assert torch.equal(x, torch.arange(4.0))
    stash.restore()
    assert torch.equal(x, torch.arange(4.0))


@pytest.mark.cuda
def test_views_of_one_storage_come_back_in_place():
    x = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    half, address = x[: 1 << 19].view(torch.int32), x.untyped_storage()._cdata
    before = torch.cuda.memory_allocated()
    stash = Stash([x, half])
    assert torch.cuda.memory_allocated() == before - x.nbytes
    stash.restore()
    assert torch.cuda.memory_allocated() == before
    assert x.untyped_storage()._cdata == address
    assert torch.equal(x.cpu(), torch.arange(1 << 20, dtype=torch.float32))
    assert torch.equal(half, x[: 1 << 19].view(torch.int32))
