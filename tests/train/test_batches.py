"""Batches are counted, split and passed to models as by hand."""

from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recoup.errors import UsageError
from recoup.train.data.batches import (
    batch_size,
    compute_loss,
    sample_count,
    split_batch,
    to_device,
)


@given(count=st.integers(1, 40), pieces=st.integers(1, 40))
def test_pieces_cover_the_batch_in_order_and_are_nearly_equal(count, pieces):
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


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((torch.ones(4, 6), torch.ones(24)), 4),
        ({"temperature": torch.tensor(0.5), "x": torch.ones(3, 2)}, 3),
        (torch.tensor(1.0), 1),
        ([], 1),
        ((torch.ones(0, 2), torch.ones(0)), 0),
        ({"temperature": torch.tensor(0.5), "x": torch.ones(0, 2)}, 0),
        ((torch.ones(0), torch.ones(3, 2)), 3),
    ],
)
def test_a_batch_of_unequal_tensors_has_a_size(batch, size):
    assert batch_size(batch) == size


def test_names_and_numbers_of_samples_are_split_with_them():
    names, sizes = ["a", "b", "c", "d"], (224, 224)
    batch = torch.arange(4), {"names": names, "sizes": sizes, "few": tuple("wxyz")}
    assert [
        (rows.tolist(), rest["names"], rest["sizes"], rest["few"])
        for rows, rest in split_batch(batch, 2)
    ] == [
        ([0, 1], ["a", "b"], sizes, ("w", "x")),
        ([2, 3], ["c", "d"], sizes, ("y", "z")),
    ]


class Encoding(UserDict[str, torch.Tensor]):
    """A mapping that is not a dict, like those of transformers."""


def test_mappings_of_any_class_are_walked_and_keep_their_class():
    batch = Encoding(x=torch.arange(4), y=torch.arange(4))
    assert sample_count(batch) == 4
    first, second = split_batch(batch, 2)
    assert type(first) is type(second) is Encoding
    assert second["y"].tolist() == [2, 3]
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is Encoding
    assert moved["x"].is_meta
    assert not batch["x"].is_meta


def test_objects_with_a_method_to_are_moved():
    class Graphs:
        place = "here"

        def to(self, device):
            moved = Graphs()
            moved.place = device
            return moved

    device = torch.device("meta")
    inputs, targets = to_device((Graphs(), torch.ones(2)), device)
    assert (inputs.place, targets.device) == (device, device)
    assert to_device(Graphs(), device).place == device


def test_a_batch_on_the_device_is_not_moved():
    tensor = torch.ones(2)
    batch = to_device({"a": tensor, "b": 3}, torch.device("cpu"))
    assert batch["a"] is tensor
    assert to_device(batch, torch.device("meta"))["a"].device.type == "meta"


class Sums(nn.Module):
    """Adds its arguments."""

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
def test_a_model_is_called_by_the_structure_of_its_batch(batch):
    assert compute_loss(Sums(), batch).item() == 4.0


class Output:
    """An output like those of transformers."""

    loss = torch.ones(())


@pytest.mark.parametrize("result", [Output(), {"loss": torch.ones(())}, torch.ones(1)])
def test_a_loss_is_found_in_common_model_outputs(result):
    class Model(nn.Module):
        def forward(self, x):
            return result

    assert compute_loss(Model(), torch.ones(2)).item() == 1.0


@pytest.mark.parametrize("result", [3.0, torch.ones(2), None, {"scores": 1}])
def test_anything_else_is_refused_as_a_loss(result):
    class Model(nn.Module):
        def forward(self, x):
            return result

    with pytest.raises(UsageError, match="a loss of one element"):
        compute_loss(Model(), torch.ones(2))
