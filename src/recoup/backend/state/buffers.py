"""The buffers of a model, found quickly enough to look at every step."""

from collections.abc import Iterable

from torch import Tensor, nn


def buffers_of(model: nn.Module) -> list[Tensor]:
    """Return the buffers of a model and all its parts, each once.

    `nn.Module.buffers` puts a name together for every module on the way, which takes
    five times as long.

    Examples:
        >>> [tuple(buffer.shape) for buffer in buffers_of(nn.BatchNorm1d(3))]
        [(3,), (3,), ()]
    """
    found: dict[int, Tensor] = {}
    modules = {id(model): model}
    waiting = [model]
    for module in waiting:
        for buffer in module._buffers.values():
            if buffer is not None:
                found[id(buffer)] = buffer
        for part in module._modules.values():
            if part is not None and id(part) not in modules:
                modules[id(part)] = part
                waiting.append(part)
    return list(found.values())


BufferSlot = tuple[dict[str, Tensor | None], str, Tensor | None]
"""A buffer in its place: the dictionary of a module, the name, and what is there."""


def buffer_slots(modules: Iterable[nn.Module]) -> list[BufferSlot]:
    """Return the buffers that modules themselves have, not their parts, in place.

    Examples:
        >>> norm = nn.BatchNorm1d(3)
        >>> [name for _, name, _ in buffer_slots([norm])]
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return [
        (module._buffers, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
    ]


def buffers_in(slots: Iterable[BufferSlot]) -> list[Tensor]:
    """Return the buffers that are in their places, each once."""
    return list({id(b): b for _, _, b in slots if b is not None}.values())


def are_in_place(slots: Iterable[BufferSlot]) -> bool:
    """Return whether every buffer is still the tensor that was in its place."""
    return all(buffers.get(name) is buffer for buffers, name, buffer in slots)


def put_in_place(slots: Iterable[BufferSlot]) -> None:
    """Put buffers back that a forward pass replaced, as `self.mean = ...` does.

    Names that were not there before are taken out.

    Examples:
        >>> norm = nn.BatchNorm1d(3)
        >>> slots, mean = buffer_slots([norm]), norm.running_mean
        >>> norm.running_mean = norm.running_mean * 0.9
        >>> put_in_place(slots)
        >>> norm.running_mean is mean
        True
    """
    known: dict[int, tuple[dict[str, Tensor | None], set[str]]] = {}
    for buffers, name, buffer in slots:
        known.setdefault(id(buffers), (buffers, set()))[1].add(name)
        if buffers.get(name) is not buffer:
            buffers[name] = buffer
    for buffers, names in known.values():
        for name in [name for name in buffers if name not in names]:
            del buffers[name]
