"""Data that can be iterated, and the order of iteration."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from recoup.errors import SnapshotError, UsageError
from recoup.train.data.position import Position, make_loader
from tests.support.training import make_trainer, samples

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(12))


def test_a_dataset_needs_a_batch_size_and_is_shuffled():
    with pytest.raises(UsageError, match="no batch_size"):
        make_loader(DATA, None)
    order = torch.cat([batch for (batch,) in make_loader(DATA, 5)]).tolist()
    assert sorted(order) == list(range(12))
    assert order != list(range(12))


def test_a_batch_size_that_contradicts_the_loader_is_refused():
    loader = DataLoader(DATA, batch_size=4)
    assert make_loader(loader, 4) is loader
    assert make_loader(loader, None) is loader
    with pytest.raises(UsageError, match="the loader has 4"):
        make_loader(loader, 5)


class Stream(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        yield from zip(*samples(13), strict=True)


def test_an_iterable_dataset_is_read_in_its_order():
    order = [targets for _, targets in make_loader(Stream(), 5)]
    assert torch.equal(torch.cat(order), samples(13)[1])


def test_a_loader_without_a_length_is_accepted():
    result = make_trainer().fit(DataLoader(Stream(), batch_size=5), epochs=2)
    assert (result.steps, result.epochs) == (6, 2)


def test_data_that_is_too_short_restores_the_random_states(seed):
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    position = Position(CPU)
    iterator = position.open(loader)
    position.advance([next(iterator) for _ in range(5)])
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    with pytest.raises(SnapshotError, match="the loader has 3"):
        position.open(DataLoader(DATA, batch_size=4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("data", [iter([1]), 3, (x for x in [1])])
def test_data_that_can_be_iterated_only_once_is_refused(data):
    with pytest.raises(UsageError, match="cannot be iterated again"):
        make_loader(data, None)


def test_set_epoch_of_distributed_samplers_is_called():
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=True)
    loader = DataLoader(DATA, batch_size=2, sampler=sampler)
    position, orders = Position(CPU), []
    for _ in range(3):
        seen = list(position.open(loader))
        orders.append(torch.cat([batch for (batch,) in seen]).tolist())
        position.advance(seen)
        position.close()
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize(
    ("share", "size", "batches", "lost"),
    [(2.0, 3, 4, 0), (1.0, 3, 2, 0), (0.5, 3, 1, 0), (0.5, 2, 2, 1)],
)
def test_another_number_of_processes_resumes_at_the_same_sample(
    caplog, share, size, batches, lost
):
    # Two batches of three samples in each of `share` processes for one now.
    loader = list(torch.arange(24).split(3))
    first = Position(CPU)
    iterator = first.open(loader)
    first.advance([next(iterator), next(iterator)])
    second = Position(CPU)
    second.load_state_dict(first.state_dict(), share=share)
    with caplog.at_level(logging.WARNING):
        rest = second.open(list(torch.arange(24).split(size)))
    assert second.batches == batches
    assert next(rest)[0] == 6 * share + lost
    assert ("will not be seen" in caplog.text) is bool(lost)
