"""The border to torch's data loaders: whether they go on with their last iterator."""

from typing import Any

import torch


def draw_as_if_new(loader: Any) -> None:
    """Draw what a loader's new iterator would, if it goes on with that of last time.

    A new iterator draws a seed for its workers before the sampler draws an order. A
    loader with persistent workers has such an iterator in its first epoch only, so
    that its orders would depend on when its process was started.

    Examples:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> before = torch.get_rng_state()
        >>> draw_as_if_new(torch.utils.data.DataLoader([1, 2], shuffle=True))
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    persists = getattr(loader, "persistent_workers", False)
    # torchdata's loader has an iterator in any case, and replaces it.
    if persists and getattr(loader, "_iterator", None) is not None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
