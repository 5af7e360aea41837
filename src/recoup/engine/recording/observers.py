"""Observers of regions: profilers and managers, notified of every region that runs."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol, TypeVar

from torch import Tensor

from recoup.backend.autograd.saved_tensors import Pack, Unpack
from recoup.engine.lifetime.values import Hold
from recoup.engine.scopes.statistics import Account

Traced = TypeVar("Traced", contravariant=True)

Listener = Callable[[Tensor], None]
"""Called with a tensor that autograd saves in a region."""


class Watched(Protocol):
    """The view of a region, or of a rerun function, for observers and nodes."""

    name: str
    replays: int
    listeners: tuple[Listener, ...]
    accounts: tuple[Account, ...]

    def holds(self) -> list[Hold]:
        """Return everything it holds."""
        ...

    def random_bytes(self) -> int:
        """Return the bytes of generator states that it keeps."""
        ...

    def count_bytes(self) -> None:
        """Add to the accounts what it keeps and frees, if that was not done yet."""
        ...

    def recompute(self) -> tuple[Tensor, ...]:
        """Return what it does not hold, recomputed now."""
        ...

    def clear(self) -> None:
        """Drop everything it holds."""
        ...


class Observer(Protocol):
    """Is notified when a region begins and when its forward has ended."""

    def began(self, region: Watched) -> None:
        """Handle a region that is about to run."""
        ...

    def ended(self, region: Watched) -> None:
        """Handle a region whose forward has ended."""
        ...


class Tracer(Protocol[Traced]):
    """Follows what is saved in a region through its backward."""

    def hooks(self, region: Traced) -> tuple[Pack, Unpack]:
        """Return hooks that do what the region's own do, and record it."""
        ...


_OBSERVERS: list[Observer] = []
"""Without a lock, which an interrupt could leave taken: a list grows and shrinks in
one step."""


def observers() -> tuple[Observer, ...]:
    """Return everyone who watches now."""
    return tuple(_OBSERVERS) if _OBSERVERS else ()


def subscribe(observer: Observer) -> None:
    """Notify the observer of every region from now on, on all threads."""
    _OBSERVERS.append(observer)


def unsubscribe(observer: Observer) -> None:
    """Stop notifying the observer; do nothing if it is not subscribed."""
    with suppress(ValueError):
        _OBSERVERS.remove(observer)


def is_transparent(pack: Callable[..., object]) -> bool:
    """Return whether saved-tensor hooks only watch and change nothing.

    A region does not pass its holds on to such hooks.
    """
    return getattr(pack, "is_transparent", False)


def tell(listeners: Iterable[Listener], tensor: Tensor) -> None:
    """Call everyone who listens with a tensor that autograd saves."""
    for listener in listeners:
        listener(tensor)
