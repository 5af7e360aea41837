"""The buffers of a model, found quickly enough to look at every step."""

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
