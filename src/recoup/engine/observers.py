"""Who watches regions: profilers and managers, told of every region that runs."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from recoup.engine.region import Region


class Observer(Protocol):
    """Is told when a region begins and when its forward has ended."""

    def began(self, region: "Region") -> None:
        """Take note of a region that is about to record."""
        ...

    def ended(self, region: "Region") -> None:
        """Take note of a region whose forward has ended."""
        ...


_LOCK = threading.Lock()
_OBSERVERS: list[Observer] = []


def observers() -> tuple[Observer, ...]:
    """Return everyone who watches now."""
    return tuple(_OBSERVERS) if _OBSERVERS else ()


def subscribe(observer: Observer) -> None:
    """Tell the observer about every region from now on, on all threads."""
    with _LOCK:
        _OBSERVERS.append(observer)


def unsubscribe(observer: Observer) -> None:
    """Stop telling the observer."""
    with _LOCK:
        _OBSERVERS.remove(observer)


def is_transparent(pack: Callable[..., object]) -> bool:
    """Return whether saved-tensor hooks only watch and change nothing.

    A region does not pass its holds on to such hooks.
    """
    return getattr(pack, "is_transparent", False)
