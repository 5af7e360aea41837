"""Stores: states held in another tier are fetched, and dropped there."""

import time

import pytest
import torch

from recoup import Disk, Half, Host, checkpointed_loop
from recoup.backend.memory.meters import StorageMeter
from recoup.engine.tiers.protocol import ExactTier, Stored
from recoup.errors import UsageError
from recoup.schedules import Chunked, Multistage, Revolve

WIDTH = 20_000  # 160 kB: worth moving


def on_disk(directory):
    return Disk(directory, smallest_bytes=1000)


def gradients(steps, **options):
    weight = torch.tensor(0.99, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(2, WIDTH // 2, generator=generator, dtype=torch.float64)
    state = state.T.requires_grad_()  # not contiguous
    final, checkpoints = checkpointed_loop(
        lambda h: torch.sin(h * weight), state, steps, **options
    )
    held = {position: checkpoints[position] for position in checkpoints}
    found = torch.autograd.grad(final.square().sum(), [state, weight])
    return found, held


@pytest.mark.parametrize("make", [lambda _: Host(), on_disk], ids=["host", "disk"])
def test_gradients_are_bitwise_the_same_from_a_tier(make, tmp_path):
    expected, states = gradients(20)
    schedules = [None, Revolve(20, slots=4), Chunked(20, slots=3, chunk=3)]
    for schedule in schedules:
        found, held = gradients(20, schedule=schedule, store=make(tmp_path))
        assert all(map(torch.equal, found, expected))
        for position in set(held) & set(states):
            assert torch.equal(held[position], states[position])
    # Files are removed by a thread that writing and reading come before.
    deadline = time.monotonic() + 20
    while (left := files_in(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set(), "every state was dropped"


def files_in(folder):
    found = {file.name for file in folder.rglob("*") if file.is_file()}
    return found - {"owner.lock"}


def test_each_tier_of_a_multistage_schedule_has_its_store(tmp_path):
    expected, _ = gradients(30)
    schedule = Multistage(30, (2, 3))
    found, _ = gradients(30, schedule=schedule, store=[Host(), on_disk(tmp_path)])
    assert all(map(torch.equal, found, expected))


def test_a_tier_moves_the_states_off_their_device(tmp_path):
    def held_bytes(store):
        state = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
        with StorageMeter() as meter:
            final, checkpoints = checkpointed_loop(torch.sin, state, 64, store=store)
            live = meter.live_bytes
            final.sum().backward()
        assert len(checkpoints) == 0
        return live

    held_bytes(Host())  # from here on the pool of host buffers, on the CPU too, is full
    moved_bytes = 7 * WIDTH * 8  # the eighth state is still in use
    assert held_bytes(on_disk(tmp_path)) == held_bytes(None) - moved_bytes


def test_pull_keeps_the_states_in_the_tier(tmp_path):
    state = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    final, checkpoints = checkpointed_loop(
        torch.sin, state, 20, store=on_disk(tmp_path)
    )
    ones = torch.ones_like(final)
    first, second = checkpoints.pull(ones), checkpoints.pull(ones)
    (third,) = torch.autograd.grad(final, state, ones)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


class Shelf(ExactTier):
    """A tier that records its calls."""

    def __init__(self, events):
        self.events = events

    def takes(self, nbytes):
        return True

    def put(self, storage, guard=None):
        return OnShelf(storage.clone(), self.events)


class OnShelf(Stored):
    def __init__(self, storage, events):
        self._storage = storage
        self._events = events

    @property
    def nbytes(self):
        return self._storage.nbytes

    def get(self):
        self._events.append(("get", id(self)))
        return self._storage

    def drop(self):
        pass

    def prefetch(self):
        self._events.append(("prefetch", id(self)))


@pytest.mark.parametrize("how", ["backward", "pull"])
def test_a_state_is_prefetched_while_later_steps_are_reversed(how):
    events = []

    def step(state):
        if torch.is_grad_enabled():
            events.append(("taped", None))
        return state.sin()

    state = torch.ones(3, dtype=torch.float64, requires_grad=True)
    final, checkpoints = checkpointed_loop(
        step, state, 20, schedule=Chunked(20, slots=4, chunk=2), store=Shelf(events)
    )
    events.clear()
    if how == "backward":
        final.sum().backward()
    else:
        checkpoints.pull(torch.ones_like(final))
    fetched = [place for place, (what, _) in enumerate(events) if what == "get"]
    assert len(fetched) >= 3
    for place in fetched[1:]:  # before the first one, forward has made the tape
        asked = [p for p in range(place) if events[p] == ("prefetch", events[place][1])]
        assert ("taped", None) in events[max(asked) : place]


def test_a_lossy_tier_gives_approximate_gradients():
    expected, _ = gradients(20)
    found, _ = gradients(20, store=Half())
    assert not torch.equal(found[0], expected[0])
    # A state in bfloat16 is within 2**-8 of itself; the steps from there to the next
    # one multiply what that does to their derivatives. Measured: 4.5e-4 of gradients
    # up to 0.19, and 6e-3 of any.
    torch.testing.assert_close(found[0], expected[0], rtol=0.02, atol=0.001)


def test_a_store_requires_torch():
    np = pytest.importorskip("numpy")
    with pytest.raises(UsageError, match="with torch tensors only"):
        checkpointed_loop(lambda x: x, np.ones(3), 4, store=Host())
