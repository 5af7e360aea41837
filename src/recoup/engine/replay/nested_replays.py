"""Nested replays: what one needs of regions around its own, at any depth."""

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from torch import Tensor

from recoup.engine.replay.replay_cache import Saved

Brought = TypeVar("Brought")


class Unpacking(Protocol):
    """A region that gives back what autograd, or a region inside, saved in it."""

    def unpacking(self, saved: Saved) -> "Generator[Request, Tensor, Tensor]":
        """Return the tensor; yield what is needed of regions around."""
        ...


Request = tuple[Unpacking, Saved]
"""The values that a replay needs of a region around its own."""


def run_nested(bringing: Generator[Request, Tensor, Brought]) -> Brought:
    """Return what a generator brings back from any depth of regions.

    A replay starts from what regions around its own recompute. These are run from here
    one by one, so that Python's stack does not limit the depth of nesting.
    """
    stack: list[Generator[Request, Tensor, Any]] = [bringing]
    given: Any = None
    error: BaseException | None = None
    try:
        while stack:
            try:
                if error is None:
                    region, saved = stack[-1].send(given)
                else:
                    region, saved = stack[-1].throw(error)
                given = error = None
                stack.append(region.unpacking(saved))
            except StopIteration as result:
                stack.pop()
                given, error = result.value, None
            except BaseException as raised:  # noqa: BLE001 (raised in the thread that asked)
                stack.pop()
                given, error = None, raised
        if error is not None:
            raise error
        return given
    finally:
        error = None  # it refers to this frame
