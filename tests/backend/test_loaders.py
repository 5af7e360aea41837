"""Loaders draw the same in every epoch, whether their workers stay or not."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from recoup.backend.state.rng import draw_as_if_new
from tests.support.processes import forker

DATA = TensorDataset(torch.arange(12))


# Not copies of this process, in which other tests have started threads.
PERSISTENT: dict[str, Any] = {
    "num_workers": 1,
    "persistent_workers": True,
    "multiprocessing_context": forker(),
}


def orders(loader, *, aligned):
    torch.manual_seed(3)
    found = []
    for _ in range(3):
        if aligned:
            draw_as_if_new(loader)
        found.append(torch.cat([batch for (batch,) in loader]).tolist())
    return found


def test_persistent_workers_draw_the_orders_of_new_ones():
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    expected = orders(DataLoader(DATA, **options), aligned=False)
    options |= PERSISTENT
    assert orders(DataLoader(DATA, **options), aligned=True) == expected
    # What is drawn for new workers, torch draws in the first epoch only.
    assert orders(DataLoader(DATA, **options), aligned=False) != expected


def test_a_generator_of_the_loaders_own_is_drawn_from():
    found = []
    for workers in (0, 1):
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            DATA,
            batch_size=4,
            shuffle=True,
            generator=generator,
            **(PERSISTENT if workers else {}),
        )
        found.append(orders(loader, aligned=True))
    assert found[0] == found[1]


def test_anything_else_draws_nothing():
    for loader in ([1, 2], DataLoader(DATA)):
        list(loader)
        before = torch.get_rng_state()
        draw_as_if_new(loader)
        assert torch.equal(torch.get_rng_state(), before)
