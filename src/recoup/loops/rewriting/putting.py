"""Putting: the results of a loop put in the objects that its variables were."""

from typing import Any

from torch import Tensor

from recoup.loops.rewriting.state_nodes import is_mutable


class Putting:
    """Puts the results of a loop in the objects of before it.

    Args:
        real: The nodes of before the loop.
        last: The nodes that its last step returned.
        origin: Which node of before a node is, by `id`.
        written: Those of before that were written to.
    """

    def __init__(
        self,
        real: list[Any],
        last: list[Any],
        origin: dict[int, int],
        written: set[int],
    ) -> None:
        self._real = real
        self._last = last
        self._origin = origin
        self._written = written
        self._place = 0
        self._made: dict[int, Any] = {}

    def node(self, final: Any) -> Any:
        """Return what stands for one node of the final state, in order."""
        last = self._last[self._place]
        self._place += 1
        source = self._origin.get(id(last))
        real = None if source is None else self._real[source]
        if type(final) in (list, dict):
            made = self._container(final, real if source in self._written else None)
            made = real if source is not None else made
        elif isinstance(final, tuple):
            parts = [self.node(part) for part in final]
            made = type(final)(*parts) if hasattr(final, "_fields") else tuple(parts)
        elif source is None:
            made = final
        else:
            if isinstance(real, Tensor) and source in self._written:
                real.copy_(final)
            made = real
        return self._made.setdefault(id(last), made) if is_mutable(last) else made

    def _container(self, final: Any, real: Any) -> Any:
        """Return the container, or the one of before with its content."""
        if isinstance(final, list):
            parts = [self.node(part) for part in final]
            if real is None:
                return parts
            real[:] = parts
            return real
        items = {name: self.node(part) for name, part in final.items()}
        if real is None:
            return items
        real.clear()
        real.update(items)
        return real
