"""Random state: read, set and restore the generator an operator draws from."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from recoup.core.restoring import restoring


def generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Generator:
    """Return the generator an operator called with these arguments draws from.

    Examples:
        >>> generator_of((torch.zeros(2),), {}) is torch.default_generator
        True
    """
    for argument in (*kwargs.values(), *args):
        if isinstance(argument, Generator):
            return argument
    return default_generator(_device_of(args, kwargs))


def default_generator(device: torch.device) -> Generator:
    """Return the device's default generator."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


def same_state(before: Tensor, after: Tensor) -> bool:
    """Return whether two states of a generator are equal; faster than torch.equal."""
    length = before.numel()
    return ctypes.string_at(before.data_ptr(), length) == ctypes.string_at(
        after.data_ptr(), length
    )


class random_state(restoring):  # noqa: N801 (used as a verb)
    """Run the block with the generator in `state`, then put it back as it was."""

    __slots__ = ("_generator", "_state")

    def __init__(self, generator: Generator, state: Tensor) -> None:
        # As `super` does: replays wait for this.
        self.restore = partial(generator.set_state, generator.get_state())
        self.is_due = False
        self._generator = generator
        self._state = state

    def __enter__(self) -> None:
        super().__enter__()
        self._generator.set_state(self._state)


def default_states(devices: Sequence[torch.device]) -> list[tuple[Generator, Tensor]]:
    """Return the default generators of the CPU and these devices with their states."""
    found = {id(torch.default_generator): torch.default_generator}
    for device in devices:
        generator = default_generator(device)
        found[id(generator)] = generator
    return [(generator, generator.get_state()) for generator in found.values()]


def devices_in_use() -> list[torch.device]:
    """Return the accelerators of this process, once it uses any.

    None while their work is captured into a graph: their generators cannot be read.
    A runtime that this process has not started is asked nothing: without a driver any
    question to it is an error.

    Examples:
        >>> all(device.type != "cpu" for device in devices_in_use())
        True
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    # `bool()` is False: what cannot be asked has no generators of this kind either.
    if not getattr(module, "is_initialized", bool)():
        return []
    if getattr(module, "is_current_stream_capturing", bool)():
        return []
    count = torch.accelerator.device_count()
    return [torch.device(accelerator.type, index) for index in range(count)]


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            return argument.device
        if isinstance(argument, (list, tuple)) and argument:
            first = argument[0]
            if isinstance(first, Tensor):
                return first.device
    device = kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)
