"""Lifetimes: a storage has one number for as long as it exists, and dies once."""

import torch

from recoup.measurement.tracing.trace import Lifetimes, Trace, TracedSave


def storage_of(tensor):
    return tensor.untyped_storage()


def test_views_of_a_tensor_name_its_value_and_a_write_gives_it_another():
    trace = Trace()
    lives = Lifetimes(trace)
    tensor = torch.zeros(4)
    before = lives.admit(storage_of(tensor), nbytes=16, born=0)
    assert lives.value_of(tensor[1:]) == before
    after = lives.overwrite(storage_of(tensor), 1)
    assert lives.value_of(tensor) == after != before
    assert trace.values[before].overwritten
    assert not trace.values[after].overwritten
    assert trace.values[before].storage == trace.values[after].storage


def test_what_was_not_seen_before_is_from_outside():
    trace = Trace()
    lives = Lifetimes(trace)
    tensor = torch.zeros(4)
    assert not lives.knows(storage_of(tensor))
    value = trace.values[lives.value_of(tensor)]
    assert value.producer == -1
    assert trace.storages[value.storage].bytes == 0
    assert lives.knows(storage_of(tensor))


def test_a_storage_dies_at_the_last_moment_before_it_is_missed():
    trace = Trace()
    lives = Lifetimes(trace)
    tensor = torch.zeros(4)
    value = lives.admit(storage_of(tensor), nbytes=16, born=-1)
    record = trace.storages[trace.values[value].storage]
    trace.backward_bytes += [0, 0]  # two moments
    lives.bury()
    assert record.dies is None
    del tensor
    lives.bury()
    assert record.dies == 1


def test_one_at_the_same_address_is_another():
    trace = Trace()
    lives = Lifetimes(trace)
    numbers = set()
    for _ in range(20):
        tensor = torch.zeros(4)
        numbers.add(lives.value_of(tensor))
        del tensor
    assert len(numbers) == 20


def test_a_replayed_copy_is_followed_and_what_was_there_before_is_not():
    trace = Trace()
    lives = Lifetimes(trace)
    known, copy = torch.zeros(4), torch.zeros(4)
    lives.admit(storage_of(known), nbytes=16, born=0)
    saves = [TracedSave(1), TracedSave(1)]
    lives.follow_copy(saves[0], known)
    lives.follow_copy(saves[1], copy)
    trace.backward_bytes += [0, 0, 0]
    del known, copy
    assert saves[0].finished is None
    assert saves[1].finished == 2
