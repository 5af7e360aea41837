"""Batches are counted, split and given to models as one would by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recoup import UsageError
from recoup.train.batches import compute_loss, sample_count, split_batch, to_device


@given(count=st.integers(1, 40), pieces=st.integers(1, 40))
def test_pieces_are_all_of_it_in_order_and_nearly_equal(count, pieces):
    batch = {"x": torch.arange(count), "y": (torch.arange(count) * 2, "same")}
    if pieces > count:
        with pytest.raises(UsageError, match=f"{count} samples"):
            split_batch(batch, pieces)
        return
    found = split_batch(batch, pieces)
    sizes = [sample_count(piece) or 0 for piece in found]
    assert len(found) == pieces
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([piece["x"] for piece in found]), batch["x"])
    assert torch.equal(torch.cat([p["y"][0] for p in found]), batch["y"][0])
    assert all(piece["y"][1] == "same" for piece in found)


def test_a_batch_of_unequal_tensors_has_no_count_and_no_pieces():
    batch = (torch.ones(3), torch.ones(4))
    assert sample_count(batch) is None
    assert sample_count(torch.ones(())) is None
    assert sample_count("nothing") is None
    with pytest.raises(UsageError, match="different lengths"):
        split_batch(batch, 2)


def test_a_batch_that_is_there_is_not_moved():
    tensor = torch.ones(2)
    batch = to_device({"a": tensor, "b": 3}, torch.device("cpu"))
    assert batch["a"] is tensor
    assert to_device(batch, torch.device("meta"))["a"].device.type == "meta"


class Sums(nn.Module):
    """Adds whatever it is given."""

    def forward(self, first, second=0.0):
        return (first + second).sum()


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(2), torch.ones(2)),
        [torch.ones(2), torch.ones(2)],
        {"first": torch.ones(2), "second": torch.ones(2)},
    ],
    ids=["tuple", "list", "mapping"],
)
def test_a_model_is_called_as_its_batch_says(batch):
    assert compute_loss(Sums(), batch).item() == 4.0


class Output:
    """What transformers return."""

    loss = torch.ones(())


@pytest.mark.parametrize("result", [Output(), {"loss": torch.ones(())}, torch.ones(1)])
def test_a_loss_is_found_where_models_put_it(result):
    class Model(nn.Module):
        def forward(self, x):
            return result

    assert compute_loss(Model(), torch.ones(2)).item() == 1.0


@pytest.mark.parametrize("result", [3.0, torch.ones(2), None, {"scores": 1}])
def test_anything_else_is_no_loss(result):
    class Model(nn.Module):
        def forward(self, x):
            return result

    with pytest.raises(UsageError, match="one number in a tensor"):
        compute_loss(Model(), torch.ones(2))
