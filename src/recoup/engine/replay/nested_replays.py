"""Nested replays, which need values of enclosing regions, at any depth."""

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from torch import Tensor

from recoup.engine.replay.replay_cache import Saved

Brought = TypeVar("Brought")


class Unpacking(Protocol):
    """A region that unpacks what autograd, or an inner region, saved in it."""

    def unpacking(self, saved: Saved) -> "Generator[Request, Tensor, Tensor]":
        """Return the tensor; yield requests to enclosing regions."""
        ...


Request = tuple[Unpacking, Saved]
"""A saved tensor that a replay needs from an enclosing region."""


def run_nested(bringing: Generator[Request, Tensor, Brought]) -> Brought:
    """Return a generator's result, resolving its requests to enclosing regions.

    Replays of enclosing regions run from this loop, so that Python's stack does not
    limit the depth of nesting.
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
