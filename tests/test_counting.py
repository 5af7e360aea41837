"""The counters count right, and count what they should."""

import torch

from tests.support.counting import Alive, Operators, SavedByAutograd, flops_of


def test_a_storage_is_alive_from_the_operator_that_made_it_to_its_last_owner():
    before = torch.ones(7)
    with Alive() as alive:
        made = before + 1
        view = made[2:]
        assert alive.sizes == [28]
        other = torch.zeros(3)
        assert alive.sizes == [12, 28]
        del made
        assert alive.total_bytes == 40
        del view, other
        assert alive.sizes == []


def test_what_only_autograd_holds_is_alive():
    x = torch.ones(7, requires_grad=True)
    with Alive() as alive:
        y = x.exp().sin()
        assert alive.sizes == [28, 28]
        del y
        assert alive.sizes == []


def test_operators_are_written_down_in_order_and_counted():
    with Operators() as operators:
        x = torch.ones(2)
        (x + x + 1).sin()
    assert operators.names[-3:] == ["add.Tensor", "add.Tensor", "sin.default"]
    assert operators.counts == {"ones": 1, "add": 2, "sin": 1}


def test_saved_storages_are_counted_once_and_known_ones_not():
    x = torch.ones(7, requires_grad=True)
    with SavedByAutograd() as saved:
        y = x.exp()
        z = y.sin() * y.view(7)
    assert saved.bytes_without() == 28 + 28
    assert saved.bytes_without(y) == 28
    del z


def test_operations_of_a_matrix_product_are_two_for_each_pair():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    assert flops_of(lambda: a @ b) == 2 * 3 * 4 * 5
