"""The average of parameters follows its formula and can be removed."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from recoup.errors import UsageError
from recoup.train import ParameterAverage
from recoup.train.saving.snapshot import read_snapshot
from tests.support.bits import tree_differences
from tests.support.training import batches, make_trainer, remains


def test_it_is_the_exponential_average():
    layer = nn.Linear(3, 2)
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    model = nn.Sequential(layer, frozen)
    average = ParameterAverage(model, decay=0.9)
    expected = [parameter.detach().clone() for parameter in layer.parameters()]
    for _ in range(5):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update()
        for mean, parameter in zip(expected, layer.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
    assert list(average.parameters) == ["0.weight", "0.bias"]
    assert all(map(torch.equal, average.parameters.values(), expected))


def test_it_is_applied_only_inside_the_block_even_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    average = ParameterAverage(model, decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    moved = [parameter.detach().clone() for parameter in model.parameters()]

    def fail():
        with average.applied():
            assert all(
                map(torch.equal, model.parameters(), average.parameters.values())
            )
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(map(torch.equal, model.parameters(), moved))


def test_an_average_of_other_parameters_is_refused():
    average = ParameterAverage(nn.Linear(2, 2), decay=0.5)
    other = ParameterAverage(nn.Linear(2, 2, bias=False), decay=0.5)
    with pytest.raises(UsageError, match="bias"):
        average.load_state_dict(other.state_dict())


def test_nested_blocks_are_removed_one_by_one():
    layer = nn.Linear(2, 2)
    average = ParameterAverage(layer, decay=0.5)
    with torch.no_grad():
        layer.weight.add_(1)
    moved, mean = layer.weight.detach().clone(), average.parameters["weight"]
    with average.applied():
        with average.applied(), average.lifted():
            assert torch.equal(layer.weight, moved)
        assert torch.equal(layer.weight, mean)
        assert average.is_applied
        with pytest.raises(UsageError, match="update was called"):
            average.update()
    assert torch.equal(layer.weight, moved)
    assert not average.is_applied
    average.update()


def test_a_snapshot_with_averages_applied_equals_the_one_without(tmp_path):
    trainer = make_trainer(average_decay=0.5)
    for batch in batches(3):
        trainer.step(batch)
    assert trainer.average is not None
    trainer.save(tmp_path / "outside")
    with trainer.average.applied():
        applied = remains(trainer)
        trainer.save(tmp_path / "inside")
        assert list(tree_differences(applied, remains(trainer), where="")) == []
    outside, inside = (read_snapshot(tmp_path / name) for name in ("outside", "inside"))
    assert list(tree_differences(outside, inside, where="")) == []


@pytest.mark.parametrize("what", ["step", "fit", "load"])
def test_changes_that_would_be_lost_are_refused_while_averages_are_applied(
    tmp_path, what
):
    trainer = make_trainer(average_decay=0.5)
    data = batches(2)
    trainer.save(tmp_path / "run")
    trainer.step(data[0])
    given = {"step": data[1], "fit": data, "load": tmp_path / "run"}[what]
    assert trainer.average is not None
    before = remains(trainer)
    with (
        trainer.average.applied(),
        pytest.raises(UsageError, match=f"{what} was called while"),
    ):
        getattr(trainer, what)(given)
    assert trainer.steps == 1
    assert list(tree_differences(before, remains(trainer), where="")) == []


def test_averages_left_applied_during_fit_are_detected():
    trainer = make_trainer(average_decay=0.5)
    average = trainer.average
    assert average is not None
    with ExitStack() as left_open:

        def leave_them_on(_):
            left_open.enter_context(average.applied())

        with pytest.raises(UsageError, match="step was called while"):
            trainer.fit(batches(3), on_step=leave_them_on)
        assert trainer.steps == 1
