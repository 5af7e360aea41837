"""Nested arguments and results."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from recoup.backend.state.trees import leaves, map_leaves, tensors

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Opaque:
    value: torch.Tensor


TREE = (1, [2, {"a": 3, "b": (None, "text")}], Pair(4.0, [5]), OrderedDict(z=6, y=7))


def test_leaves_come_in_order():
    assert leaves(TREE) == [1, 2, 3, None, "text", 4.0, 5, 6, 7]


def test_tensors_are_picked_out_in_order():
    first, second = torch.ones(1), torch.zeros(1)
    found = tensors({"a": (first, 3), "b": [None, {"c": second}]})
    assert found[0] is first
    assert found[1] is second
    assert len(found) == 2


def test_a_tensor_alone_is_a_tree():
    tensor = torch.ones(1)
    assert tensors(tensor)[0] is tensor
    assert tensors(3) == []


def test_mapping_keeps_the_structure():
    doubled = map_leaves(lambda leaf: leaf * 2 if isinstance(leaf, int) else leaf, TREE)
    assert doubled == (
        2,
        [4, {"a": 6, "b": (None, "text")}],
        Pair(4.0, [10]),
        OrderedDict(z=12, y=14),
    )
    assert type(doubled[2]) is Pair
    assert type(doubled[3]) is OrderedDict


def test_mapping_changes_no_container_of_the_original():
    tree = [1, [2]]
    map_leaves(lambda leaf: 0, tree)
    assert tree == [1, [2]]


def test_an_object_that_torch_does_not_know_is_a_leaf():
    opaque = Opaque(torch.ones(1))
    assert leaves([opaque]) == [opaque]
    assert tensors([opaque]) == []
