"""Writes: in-place writes of a loop's steps, and who else must see them.

A checkpointed loop runs on copies of its variables. In Python an in-place write changes
the object itself, for all its references. So the first sweep is watched; at its end the
written values are copied to the original objects. Where Python would behave
differently, the loop is refused before anything has been changed.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, MappingView
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from recoup.backend.memory.storages import has_storage, storage_address, version_of
from recoup.backend.state.walk import reach
from recoup.errors import CaptureError, UnsupportedError
from recoup.loops.rewriting.source_loop import Carry, SourceLoop
from recoup.loops.state_trees import flatten
from recoup.loops.steps import KindError

_MOST_SOURCES = 1000


class Undefined:
    """The marker of an unbound variable."""


def nodes_of(trees: Iterable[Any]) -> list[Any]:
    """Return the containers and leaves of some trees, parents first.

    Examples:
        >>> nodes_of([{"a": 1}, [2]])
        [{'a': 1}, 1, [2], 2]
    """
    found: list[Any] = []
    for tree in trees:
        found.append(tree)
        if type(tree) is dict:
            found += nodes_of(tree.values())
        elif type(tree) is list or isinstance(tree, tuple):
            found += nodes_of(tree)
    return found


def is_mutable(node: Any) -> bool:
    """Return whether a node can be written to: a tensor, an array or a container."""
    return isinstance(node, Tensor) or type(node) in (list, dict) or _is_numpy(node)


def is_known(leaf: Any) -> bool:
    """Return whether a leaf is a tensor or an array, or cannot be written to."""
    if isinstance(leaf, (Tensor, Number, str, bytes, type(None), Undefined)):
        return True
    # Arrays of other libraries, including traced ones, cannot be written to.
    return hasattr(leaf, "dtype")


def mark_of(node: Any) -> Any:
    """Return a mark that changes when a node is written to.

    The children of a container must be kept alive meanwhile. Costs a copy of a NumPy
    array.
    """
    if isinstance(node, Tensor):
        return version_of(node)
    if type(node) is list:
        return tuple(map(id, node))
    if type(node) is dict:
        return tuple(node), tuple(map(id, node.values()))
    return node.tobytes() if _is_numpy(node) else None


def memory_of(node: Any) -> int:
    """Return the identity of the memory of a node."""
    if isinstance(node, Tensor) and has_storage(node):
        return storage_address(node)
    base: Any = node
    while _is_numpy(base) and base.base is not None:
        base = base.base
    return id(base)


def copied(tree: Any, *, tensors_too: bool) -> Any:
    """Return a tree of new containers and arrays, so that the old ones stay intact."""
    if type(tree) is list:
        return [copied(part, tensors_too=tensors_too) for part in tree]
    if type(tree) is dict:
        return {k: copied(part, tensors_too=tensors_too) for k, part in tree.items()}
    if isinstance(tree, tuple):
        parts = [copied(part, tensors_too=tensors_too) for part in tree]
        named = hasattr(tree, "_fields")
        return type(tree)(*parts) if named else type(tree)(parts)
    if isinstance(tree, Tensor):
        return tree.clone() if tensors_too else tree
    return tree.copy() if _is_numpy(tree) else tree


def containers_in(things: Iterable[Any]) -> set[int]:
    """Return the `id` of every list and dictionary that some objects can reach."""
    return {id(each) for each in reach(*things, kind=(list, dict))}


def sources_of(items: Any) -> list[Any]:
    """Return the objects from which an iterator takes its elements.

    Examples:
        >>> values = [1, 2]
        >>> any(source is values for source in sources_of(enumerate(zip(values))))
        True
    """
    found: list[Any] = []
    waiting = [items]
    while waiting and len(found) < _MOST_SOURCES:
        thing = waiting.pop()
        if isinstance(thing, (Iterator, MappingView, tuple)):
            waiting.extend(gc.get_referents(thing))
        else:
            found.append(thing)
    return found


def _is_numpy(node: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray)


class Putting:
    """Copies the results of a loop to the original objects.

    Args:
        real: The nodes from before the loop.
        last: The nodes that its last step returned.
        origin: The original of a node, by `id`.
        written: The original nodes that were written to.
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
        """Return the replacement of one node of the final state, in order."""
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
        """Return the container, or the original with its content."""
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


class WriteError(KindError):
    """An in-place write that a checkpointed loop cannot do as Python does."""


class Writes:
    """Watches the first sweep of one loop.

    Costs some microseconds a step while a variable is still the original object, or is
    written to by the source; and a copy of those at the start.

    Args:
        loop: The loop. Autograd would find that its own arguments were changed, so it
            gets copies of the variables in `kept`.
        carry: The variables of the loop before it.

    Attributes:
        given: The variables to run the loop on.
    """

    def __init__(self, loop: SourceLoop, carry: Carry) -> None:
        self._loop = loop
        self._carry = carry
        self._real = nodes_of(carry)
        named = list(zip(loop.names, carry, strict=True))
        self._owners = [name for name, value in named for _ in nodes_of([value])]
        self.given: Carry = tuple(
            copied(value, tensors_too=name in loop.kept) for name, value in named
        )
        self._origin: dict[int, int] = {}
        # Kept alive, or another object might reuse one of the addresses.
        self._held: list[Any] = []
        self._geometry: list[Any] = []
        self._result: Any = None
        self._last: list[Any] | None = None
        self._rows: tuple[Any, ...] = ()
        self._listed: set[int] = set()
        self._written: set[int] = set()
        self._writes_at_first = False
        self._is_done = False
        self._count = 0
        self._refuse_unknown()

    def run(self, body: Any, carry: Carry, item: Any, index: Any = None) -> Any:
        """Run one step and detect its writes."""
        if self._is_done:
            result = body(carry, item)
            self._result = result if result[0] is None else self._result
            return result
        index = self._count if index is None else index
        self._count += 1
        nodes = nodes_of(carry)
        self._follow(nodes, index)
        marks = [mark_of(node) for node in nodes]
        given = [leaf for leaf in flatten(item)[0] if isinstance(leaf, Tensor)]
        versions = [version_of(leaf) for leaf in given]
        result = body(carry, item)
        if versions != [version_of(leaf) for leaf in given]:
            raise CaptureError(
                "the loop writes to the elements that it iterates over, by another "
                "name: the written values would be lost; write to a clone."
            )
        signal, after, rows = result
        now = [mark_of(node) for node in nodes]
        places = [p for p, (m, n) in enumerate(zip(marks, now, strict=True)) if m != n]
        self._note(nodes, places, index)
        if signal is not None:
            if places:
                raise self._error(nodes, places[0], "in the iteration that ends it")
            return result
        self._result = result
        self._last, self._rows = nodes_of(after), rows
        self._follow_rows()
        alive = any(id(node) in self._origin for node in self._last)
        self._is_done = not (alive or self._loop.changed or given)
        if self._is_done:
            self._origin, self._held = {}, []
        return result

    def write_back(self, final: Carry) -> Carry:
        """Return the variables after the loop, with written values in place.

        Raises:
            WriteError: Python would have behaved differently; nothing is changed.
        """
        if self._result is None:  # no step ran
            return self._carry
        _, after, self._rows = self._result
        self._last = nodes_of(after)
        for place in sorted(self._written):
            self._check(place)
        self._refuse_views()
        sources = [self._origin.get(id(node)) for node in self._last]
        for place in self._written:
            if sources[place] != place:
                raise self._error(self._real, place, "and sets it as well")
        putting = Putting(self._real, self._last, self._origin, self._written)
        return tuple(putting.node(value) for value in final)

    def row_objects(self, carry: Carry) -> list[Any]:
        """Return, for each list, the variable that is its last element, or None."""
        if self._last is None:
            return []
        by_address = {
            id(node): value
            for node, value in zip(self._last, nodes_of(carry), strict=True)
            if isinstance(node, Tensor)
        }
        return [by_address.get(id(row)) for row in self._rows]

    def _follow(self, nodes: list[Any], index: Any) -> None:
        """Track which nodes are originals."""
        if not isinstance(index, int) or index == 0 or self._last is None:
            self._origin = {
                id(node): place for place, node in enumerate(nodes) if is_mutable(node)
            }
            self._held = nodes
            self._geometry = [_geometry(node) for node in nodes]
            return
        if len(nodes) == len(self._last) and any(
            new is not old for new, old in zip(nodes, self._last, strict=True)
        ):
            # The tape of the last steps starts with copies.
            pairs = zip(nodes, self._last, strict=True)
            self._origin = {
                id(new): self._origin[id(old)]
                for new, old in pairs
                if id(old) in self._origin and is_mutable(new)
            }
            self._held = nodes

    def _note(self, nodes: list[Any], places: list[int], index: Any) -> None:
        """Record the writes of a step; refuse those that cannot be tracked."""
        addresses = [memory_of(node) for node in nodes]
        for place in places:
            node, address = nodes[place], addresses[place]
            if addresses.count(address) > 1:
                raise self._error(nodes, place, "which two of its variables refer to")
            if not isinstance(node, (Tensor, list, dict)):
                raise self._error(
                    nodes, place, "which is no tensor, list or dictionary"
                )
            if isinstance(node, Tensor):
                if address in self._listed:
                    raise self._error(nodes, place, "which is in a list as well")
                if index == 0 or not isinstance(index, int):
                    self._writes_at_first = True
                elif not self._writes_at_first:
                    raise self._error(nodes, place, "but not in the first iteration")
            if id(node) in self._origin:
                self._written.add(self._origin[id(node)])

    def _follow_rows(self) -> None:
        """Track list elements that are still variables."""
        if not self._rows:
            return
        assert self._last is not None, "set by the caller"
        here = {memory_of(node) for node in self._last if isinstance(node, Tensor)}
        rows = {memory_of(leaf) for leaf in flatten(self._rows)[0]}
        self._listed = (self._listed | rows) & here

    def _check(self, place: int) -> None:
        """Refuse a write that other references would see differently."""
        real, address = self._real[place], memory_of(self._real[place])
        if self._owners[place] not in self._loop.changed:
            raise self._error(self._real, place, "though its syntax does not show it")
        if [memory_of(node) for node in self._real].count(address) > 1:
            raise self._error(self._real, place, "which two of its variables refer to")
        if not isinstance(real, Tensor):
            if id(real) in containers_in(self._loop.sources):
                raise UnsupportedError(
                    f"a loop writes to {self._owners[place]!r} in place and iterates "
                    "over it by another name; iterate over a copy: list(...)."
                )
            if id(real) in containers_in(self._loop.seen):
                raise self._error(self._real, place, "and sees it by another name")
            return
        if address in {
            memory_of(tensor) for tensor in reach(self._loop.seen, kind=Tensor)
        }:
            raise self._error(self._real, place, "and sees its memory by another name")
        assert self._last is not None, "there was a step"
        other = self._last[place]
        if self._geometry[place] != _geometry(other):
            raise self._error(self._real, place, "and changes its shape")
        shared = [memory_of(node) for node in self._last].count(memory_of(other))
        if shared > 1:
            raise self._error(self._real, place, "and makes further views of it")
        if not _is_writable(real):
            raise self._error(self._real, place, "which PyTorch does not allow")

    def _refuse_views(self) -> None:
        """Refuse results that share memory, if one of them is written to elsewhere.

        Each result of a loop has its own memory.
        """
        assert self._last is not None, "there was a step"
        places = [p for p, name in enumerate(self._owners) if name in self._loop.kept]
        if not places or len(self._last) != len(self._owners):
            return
        seen = [memory_of(tensor) for tensor in reach(self._loop.seen, kind=Tensor)]
        outside = {*seen, *containers_in(self._loop.seen)}
        objects: dict[int, set[int]] = {}
        for node in filter(is_mutable, self._last):
            objects.setdefault(memory_of(node), set()).add(id(node))
        for place in places:
            node = self._last[place]
            if not is_mutable(node) or id(node) in self._origin:
                continue
            if len(objects[memory_of(node)]) > 1 or memory_of(node) in outside:
                raise self._error(
                    self._last, place, "of which another object is a part"
                )

    def _refuse_unknown(self) -> None:
        for name, value in zip(self._loop.names, self._carry, strict=True):
            if name not in self._loop.changed:
                continue
            for leaf in flatten(value)[0]:
                if not is_known(leaf):
                    raise WriteError(
                        f"it writes to {name!r} in place, which has a "
                        f"{type(leaf).__name__} in it"
                    )

    def _error(self, nodes: list[Any], place: int, why: str) -> WriteError:
        same = len(nodes) == len(self._owners)
        name = repr(self._owners[place]) if same else "a variable"
        return WriteError(f"it writes to {name} in place, {why}")


def watched(body: Any, writes: Writes) -> Any:
    """Return the body of a loop, watched while `writes` is alive.

    The reference is weak: objects that a loop's function can reach count as captured,
    and in backward nothing is watched.
    """
    reference = weakref.ref(writes)

    def run(carry: Carry, item: Any, index: Any = None) -> Any:
        watching = reference()
        if watching is None:
            return body(carry, item)
        return watching.run(body, carry, item, index)

    return run


def _geometry(node: Any) -> Any:
    if not isinstance(node, Tensor):
        return None
    strides = node.stride() if has_storage(node) else None
    return node.shape, strides, node.dtype, node.device


def _is_writable(tensor: Tensor) -> bool:
    """Return whether autograd allows an in-place write to a whole tensor."""
    if torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf:
        return False
    if not has_storage(tensor):
        return False
    overlaps = any(
        stride == 0 and size > 1
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    return not overlaps and not tensor.is_inference()
