"""Host buffers: used again, and never many more than were needed at once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from recoup.backend.memory.pinned import Buffer, BufferPool, memory_of, rounded


@given(st.integers(0, 1 << 40))
def test_a_buffer_is_large_enough_and_little_larger(nbytes):
    size = rounded(nbytes)
    assert size >= max(nbytes, 1)
    assert size <= max(512, nbytes + nbytes // 8 + 512)
    assert rounded(size) == size


@given(
    st.lists(
        st.lists(st.integers(1, 100_000), min_size=1, max_size=6),
        min_size=1,
        max_size=12,
    )
)
def test_steps_of_changing_shapes_hold_at_most_twice_the_busiest(steps):
    pool = BufferPool(pinned=False)
    busiest = 0
    for sizes in steps:
        taken = [pool.take(nbytes) for nbytes in sizes]
        busiest = max(busiest, sum(buffer.memory.nbytes for buffer in taken))
        for buffer in taken:
            pool.give(buffer)
        assert pool.total_bytes <= 2 * busiest


def test_the_same_step_again_asks_for_no_memory():
    pool = BufferPool(pinned=False)
    seen = set()
    for _ in range(3):
        taken = [pool.take(nbytes) for nbytes in (1000, 1000, 5000)]
        seen |= {buffer.memory.data_ptr() for buffer in taken}
        for buffer in taken:
            pool.give(buffer)
    assert len(seen) == 3


def test_no_buffer_is_given_to_two():
    pool = BufferPool(pinned=False)
    taken = [pool.take(1000) for _ in range(5)]
    assert len({buffer.memory.data_ptr() for buffer in taken}) == 5


def test_whoever_takes_a_buffer_is_told_when_it_is_ready():
    class Later:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            raise AssertionError

    pool, mark = BufferPool(pinned=False), Later()
    pool.give(Buffer(pool.take(1000).memory, mark))
    assert pool.take(1000).ready is mark


def test_clearing_lets_go_of_what_is_free():
    pool = BufferPool(pinned=False)
    kept = pool.take(1000)
    pool.give(pool.take(5000))
    pool.clear()
    assert pool.total_bytes == kept.memory.nbytes


def test_memory_is_the_tensors_own():
    tensor = torch.arange(8, dtype=torch.uint8)
    memory_of(tensor)[:2] = b"\7\7"
    assert tensor.tolist() == [7, 7, 2, 3, 4, 5, 6, 7]
    assert bytes(memory_of(tensor[4:])) == bytes([4, 5, 6, 7])
