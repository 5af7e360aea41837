"""Calls for many tensors do what calls for each would."""

import torch

from recoup.backend.operators.foreach import copy_all, lerp_all


def test_many_tensors_are_copied_and_moved_as_one_by_one(device):
    targets = [torch.randn(n, device=device) for n in (1, 3, 5)]
    ends = [torch.randn(n, device=device) for n in (1, 3, 5)]
    expected = [t.lerp(e, 0.3) for t, e in zip(targets, ends, strict=True)]
    lerp_all(targets, ends, 0.3)
    assert all(map(torch.equal, targets, expected))
    copy_all(targets, ends)
    assert all(map(torch.equal, targets, ends))
