"""Observers, such as profilers and managers, that are notified of every region."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol, TypeVar

from torch import Tensor

from recoup.backend.autograd.saved_tensors import Pack, Unpack
from recoup.engine.lifetime.values import Hold
from recoup.engine.scopes.statistics import Account

Traced = TypeVar("Traced", contravariant=True)

Listener = Callable[[Tensor], None]
"""Callback for each tensor that autograd saves in a region."""


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
        """Add the kept and freed bytes to the accounts, once."""
        ...

    def recompute(self) -> tuple[Tensor, ...]:
        """Recompute now what it does not hold, and return it."""
        ...

    def clear(self) -> None:
        """Drop everything it holds."""
        ...


class Observer(Protocol):
    """An object that is notified when a region begins and when its forward ends."""

    def began(self, region: Watched) -> None:
        """Handle a region that is about to run."""
        ...

    def ended(self, region: Watched) -> None:
        """Handle a region whose forward has ended."""
        ...


class Tracer(Protocol[Traced]):
    """Traces what is saved in a region through its backward."""

    def hooks(self, region: Traced) -> tuple[Pack, Unpack]:
        """Return the region's hooks, extended to record saved tensors."""
        ...


_OBSERVERS: list[Observer] = []
"""Without a lock, which an interrupt could leave locked: list changes are atomic."""


def observers() -> tuple[Observer, ...]:
    """Return the current observers."""
    return tuple(_OBSERVERS) if _OBSERVERS else ()


def subscribe(observer: Observer) -> None:
    """Notify the observer of every region from now on, on all threads."""
    _OBSERVERS.append(observer)


def unsubscribe(observer: Observer) -> None:
    """Stop notifying the observer; do nothing if it is not subscribed."""
    with suppress(ValueError):
        _OBSERVERS.remove(observer)


def is_transparent(pack: Callable[..., object]) -> bool:
    """Return whether saved-tensor hooks only observe.

    A region does not pass its holds on to such hooks.
    """
    return getattr(pack, "is_transparent", False)


def tell(listeners: Iterable[Listener], tensor: Tensor) -> None:
    """Call all listeners with a tensor that autograd saves."""
    for listener in listeners:
        listener(tensor)
