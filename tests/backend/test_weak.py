"""Sets of tensors by identity that keep nothing alive."""

import weakref
from typing import Any

import torch

from recoup.backend.memory.storages import TensorSet
from tests.support.watching import Memory


def test_membership_is_by_identity():
    members, tensor = TensorSet(), torch.ones(2)
    members.add(tensor)
    assert tensor in members
    assert torch.ones(2) not in members
    assert tensor.view(2) not in members
    assert len(members) == 1


def test_a_member_leaves_when_it_dies():
    members, tensor = TensorSet(), torch.ones(2)
    memory = Memory(tensor)
    members.add(tensor)
    del tensor
    assert memory.is_freed
    assert len(members) == 0


def test_a_tensor_whose_graph_keeps_it_stays_a_member():
    # The Python object of a tensor dies and is made again while C++ holds it.
    members = TensorSet()
    x = torch.ones(2, requires_grad=True)
    middle = x.exp()
    members.add(middle)
    reference = weakref.ref(middle)
    y: Any = middle.sin()
    del middle
    saved = y.grad_fn._saved_self
    assert (saved in members) is (reference() is saved)
    del saved, y
    assert len(members) == 0


def test_adding_twice_is_adding_once():
    members, tensor = TensorSet(), torch.ones(2)
    members.add(tensor)
    members.add(tensor)
    members.discard(tensor)
    members.discard(tensor)
    assert tensor not in members


def test_clearing_takes_all_out():
    members = TensorSet()
    tensors = [torch.ones(2) for _ in range(3)]
    for tensor in tensors:
        members.add(tensor)
    members.clear()
    assert [tensor in members for tensor in tensors] == [False] * 3


def test_tensors_of_any_kind_are_members():
    members = TensorSet()
    kinds = [torch.eye(2).to_sparse(), torch.nn.Parameter(torch.ones(1)), torch.ones(0)]
    for tensor in kinds:
        members.add(tensor)
    assert all(tensor in members for tensor in kinds)
