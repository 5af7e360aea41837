"""Copies beside the computation, in every order that the device may run them."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recoup.backend.memory.pinned import BufferPool
from recoup.engine.tiers.traffic import Parcel, Traffic
from recoup.errors import ChangedTensorError
from tests.support.queues import SlowStreams, raw

WINDOW_BYTES = 4096


class Driver:
    """Sends and brings parcels as a step does, and checks each when it is used."""

    def __init__(self, streams: SlowStreams) -> None:
        self.streams = streams
        self.pool = BufferPool(pinned=False)
        self.traffic = Traffic(streams, self.pool)
        self.parcels: list[tuple[int, Parcel]] = []
        self.wrong: list[int] = []
        self.most_under_way_bytes = 0
        self._number = 0

    def send(self, nbytes: int) -> None:
        self._number = (self._number + 1) % 251
        source = self.streams.allocate(nbytes)
        memory, number = raw(source), self._number
        self.streams.compute.append(lambda: void(memory.fill_(number)))
        parcel = self.traffic.send(source, source, window_bytes=WINDOW_BYTES)
        self.parcels.append((number, parcel))
        self._note()

    def bring(self, index: int) -> None:
        number, parcel = self.parcels[index]
        memory = raw(self.traffic.bring(parcel))

        def use() -> None:
            if not bool((memory == number).all()):
                self.wrong.append(number)

        self.streams.compute.append(use)
        self._note()

    def drop(self, index: int) -> None:
        self.traffic.drop(self.parcels.pop(index)[1])

    def run(self, choices: Sequence[int]) -> None:
        for which in choices:
            self.streams.run(which)

    def _note(self) -> None:
        under_way_bytes = self.traffic.under_way_bytes
        self.most_under_way_bytes = max(self.most_under_way_bytes, under_way_bytes)


def void(_: object) -> None:
    return None


def train(driver: Driver, seed: int, *, steps: int = 4) -> None:
    """Run some steps: forward sends, backward brings in nearly the opposite order."""
    choose = random.Random(seed)
    for _ in range(steps):
        for _ in range(choose.randrange(1, 16)):
            driver.send(choose.choice([512, 1024, 2048]))
            driver.run([choose.randrange(3) for _ in range(choose.randrange(6))])
        driver.traffic._task = 1  # as in a backward
        while driver.parcels:
            last = len(driver.parcels) - 1
            index = max(0, last - choose.choice([0, 0, 0, 1, 2]))
            if choose.random() < 0.9:
                driver.bring(index)
            if choose.random() < 0.8:
                driver.drop(index)
            driver.run([choose.randrange(3) for _ in range(choose.randrange(6))])
        driver.traffic.end(1)
    driver.streams.drain()


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_order_what_comes_back_is_what_was_sent(seed):
    driver = Driver(SlowStreams())
    train(driver, seed)
    assert driver.wrong == []


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_no_more_than_the_window_is_under_way(seed):
    driver = Driver(SlowStreams())
    train(driver, seed)
    # One that is asked for is brought, room or not.
    assert driver.most_under_way_bytes <= WINDOW_BYTES


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_left_when_all_was_dropped(seed):
    driver = Driver(SlowStreams())
    train(driver, seed)
    assert driver.traffic.under_way_bytes == 0
    assert driver.traffic._last is None
    assert driver.pool.in_use_bytes == 0


class Careless(SlowStreams):
    """Does not let the computation wait."""

    def hold_back(self, mark: object) -> None:
        pass


class Hasty(SlowStreams):
    """Does not let copies wait."""

    def _copy(self, queue, destination, source, after):
        return super()._copy(queue, destination, source, ())


@pytest.mark.parametrize("streams", [Careless, Hasty])
def test_a_device_that_does_not_keep_the_order_is_found(streams):
    def is_wrong(seed: int) -> bool:
        driver = Driver(streams())
        train(driver, seed)
        return bool(driver.wrong)

    assert any(is_wrong(seed) for seed in range(50))


def sources(count: int) -> list[Tensor]:
    return [torch.full((1024,), n, dtype=torch.uint8) for n in range(count)]


def test_a_source_is_released_when_its_copy_is_done():
    streams = SlowStreams()
    traffic = Traffic(streams, BufferPool(pinned=False))
    first, second = sources(2)
    parcel = traffic.send(first, first, window_bytes=WINDOW_BYTES)
    assert parcel.source is not None
    streams.drain()
    traffic.send(second, second, window_bytes=WINDOW_BYTES)
    assert parcel.source is None


def test_a_source_is_released_when_the_window_is_full_and_the_device_waits():
    streams = SlowStreams()
    traffic = Traffic(streams, BufferPool(pinned=False))
    parcels = [
        traffic.send(source, source, window_bytes=WINDOW_BYTES) for source in sources(5)
    ]
    # Nothing has run yet, by anybody's clock but the device's.
    assert [parcel.source is None for parcel in parcels] == [True] + [False] * 4
    assert parcels[0].copied in streams.compute


def test_what_is_still_there_is_used_where_it_is():
    streams = SlowStreams()
    traffic = Traffic(streams, BufferPool(pinned=False))
    (source,) = sources(1)
    parcel = traffic.send(source, source, window_bytes=WINDOW_BYTES)
    assert traffic.bring(parcel) is source
    assert not streams.back


def test_those_sent_before_are_started_as_far_as_the_window_allows():
    streams = SlowStreams()
    traffic = Traffic(streams, BufferPool(pinned=False))
    given = sources(9)
    parcels = [
        traffic.send(source, source, window_bytes=WINDOW_BYTES) for source in given
    ]
    streams.drain()
    used = [traffic.bring(parcels[8])]
    started = [parcel.arriving is not None for parcel in parcels]
    assert started == [False] * 4 + [True] + [False] * 4
    used += [traffic.bring(parcels[number]) for number in (7, 6, 5)]
    started = [parcel.arriving is not None for parcel in parcels]
    assert started == [False] + [True] * 4 + [False] * 4
    traffic.bring(parcels[4])
    assert parcels[0].arriving is not None
    # The window had these: copied or not, they are used where they are.
    assert [int(storage[0]) for storage in used] == [8, 7, 6, 5]
    assert [storage.data_ptr() for storage in used] == [
        source.data_ptr() for source in reversed(given[5:])
    ]


def test_what_was_asked_for_holds_up_nothing_if_it_is_not_dropped():
    streams = SlowStreams()
    traffic = Traffic(streams, BufferPool(pinned=False))
    parcels = [
        traffic.send(source, source, window_bytes=WINDOW_BYTES) for source in sources(9)
    ]
    streams.drain()
    traffic._task = 1  # as in a backward that retains its graph
    for number in reversed(range(9)):
        traffic.bring(parcels[number])
        if number:
            earlier = parcels[number - 1]
            assert earlier.source is not None or earlier.arriving is not None
    traffic.end(1)
    assert traffic.under_way_bytes == 0


def test_a_change_while_it_is_copied_is_an_error():
    streams = SlowStreams()
    traffic = Traffic(streams, BufferPool(pinned=False))
    (source,) = sources(1)
    parcel = traffic.send(source, source, window_bytes=WINDOW_BYTES)
    source.add_(1)
    with pytest.raises(ChangedTensorError, match="changed in place"):
        traffic.bring(parcel)
    streams.drain()
    with pytest.raises(ChangedTensorError, match="changed in place"):
        traffic.bring(parcel)


def test_a_change_that_was_announced_waits_for_the_copy():
    streams = SlowStreams()
    traffic = Traffic(streams, BufferPool(pinned=False))
    (source,) = sources(1)
    parcel = traffic.send(source, source, window_bytes=WINDOW_BYTES)
    traffic.settle(parcel)
    streams.compute.append(lambda: void(source.add_(1)))
    streams.drain()
    brought = traffic.bring(parcel)
    streams.drain()
    assert bool((brought == 0).all())


def test_what_nobody_wants_any_more_is_let_go_of_when_backward_ends():
    streams = SlowStreams()
    traffic = Traffic(streams, BufferPool(pinned=False))
    first, second = (
        traffic.send(source, source, window_bytes=WINDOW_BYTES) for source in sources(2)
    )
    traffic._task = 1  # as in a backward
    traffic.drop(second)
    assert second.source is not None
    traffic.end(1)
    assert second.source is None
    traffic.drop(first)  # outside of one, at once
    assert first.source is None
    assert traffic.under_way_bytes == 0


def test_buffers_are_used_again_in_the_next_step():
    streams = SlowStreams()
    pool = BufferPool(pinned=False)
    traffic = Traffic(streams, pool)
    totals = []
    for _ in range(5):
        parcels = [
            traffic.send(source, source, window_bytes=WINDOW_BYTES)
            for source in sources(8)
        ]
        for parcel in reversed(parcels):
            traffic.bring(parcel)
            traffic.drop(parcel)
        streams.drain()
        totals.append(pool.total_bytes)
    assert totals == [totals[0]] * 5
