"""The contexts of managers that a thread is in, and how deep it is in modules."""

import threading
from typing import Protocol


class Chooser(Protocol):
    """A manager, as far as others have to know it."""

    @property
    def auto_checkpoint(self) -> bool:
        """Whether it chooses."""
        ...


class Contexts(threading.local):
    """The contexts of managers that a thread is in.

    Attributes:
        entered: The managers, the innermost last.
        measuring: One of them runs a model, to see what it takes.
    """

    def __init__(self) -> None:
        self.entered: list[Chooser] = []
        self.measuring = False

    def leave(self, manager: Chooser) -> None:
        """Take note that the innermost context of a manager is left."""
        for number in reversed(range(len(self.entered))):
            if self.entered[number] is manager:
                del self.entered[number]
                return

    def innermost(self) -> Chooser | None:
        """Return the innermost manager that chooses."""
        choosing = (each for each in reversed(self.entered) if each.auto_checkpoint)
        return next(choosing, None)


class Depth(threading.local):
    """How many modules that a thread has called have not returned."""

    def __init__(self) -> None:
        self.calls = 0


CONTEXTS = Contexts()
