"""Random generators: of operators, of the process, and of user objects."""

import ctypes
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from recoup.core.restoring import restoring


def generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Generator:
    """Return the generator that an operator with these arguments draws from.

    Examples:
        >>> generator_of((torch.zeros(2),), {}) is torch.default_generator
        True
    """
    found: torch.device | None = None
    for argument in (*kwargs.values(), *args):
        if argument.__class__ in _PLAIN:
            continue  # without a call: forward waits for it
        if isinstance(argument, Generator):
            return argument
        if found is None or found.type == "cpu":
            found = _device_of(argument) or found
    named = kwargs.get("device") if kwargs else None
    if named is not None:
        found = torch.device(named)
    return torch.default_generator if found is None else default_generator(found)


_PLAIN = frozenset((bool, float, int, str, type(None)))


def default_generator(device: torch.device) -> Generator:
    """Return the device's default generator."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


def generators_at_hand(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Generator]:
    """Return the default generators that a kernel with these arguments may draw from.

    That of the CPU, and those of the arguments' devices, but for those that have none
    or cannot be read now (as during graph capture).

    Examples:
        >>> generators_at_hand((torch.zeros(2),), {}) == [torch.default_generator]
        True
    """
    found = [torch.default_generator]
    for device in _devices_of(args, kwargs):
        if device.type in ("cpu", "meta"):
            continue
        module = torch.get_device_module(device)
        is_capturing = getattr(module, "is_current_stream_capturing", bool)()
        if hasattr(module, "default_generators") and not is_capturing:
            generator = default_generator(device)
            if generator not in found:
                found.append(generator)
    return found


def same_state(before: Tensor, after: Tensor) -> bool:
    """Return whether two states of a generator are equal; faster than torch.equal."""
    length = before.numel()
    return ctypes.string_at(before.data_ptr(), length) == ctypes.string_at(
        after.data_ptr(), length
    )


class random_state(restoring):  # noqa: N801 (used as a verb)
    """Run the block with the generator in `state`, then restore its previous state."""

    __slots__ = ("_generator", "_state")

    def __init__(self, generator: Generator, state: Tensor) -> None:
        # Inlined `super().__init__`: this is on the replay's critical path.
        self.restore = partial(generator.set_state, generator.get_state())
        self.is_due = False
        self._generator = generator
        self._state = state

    def __enter__(self) -> None:
        super().__enter__()
        self._generator.set_state(self._state)


def default_states(devices: Sequence[torch.device]) -> list[tuple[Generator, Tensor]]:
    """Return the default generators of the CPU and these devices with their states."""
    return [(each, each.get_state()) for each in _generators(devices)]


def devices_in_use() -> list[torch.device]:
    """Return the accelerators of this process, once it uses any.

    Returns none during graph capture, when their generators cannot be read. Does not
    query a runtime that this process has not started: without a driver that fails.

    Examples:
        >>> all(device.type != "cpu" for device in devices_in_use())
        True
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    # `bool()` is False: a backend without this query has no such generators.
    if not getattr(module, "is_initialized", bool)():
        return []
    if getattr(module, "is_current_stream_capturing", bool)():
        return []
    count = torch.accelerator.device_count()
    return [torch.device(accelerator.type, index) for index in range(count)]


def _device_of(argument: Any) -> torch.device | None:
    """Return the device of a tensor, or of the first of a list on an accelerator."""
    if isinstance(argument, Tensor):
        return argument.device
    devices = sorted(_devices_of((argument,), {}), key=lambda each: each.type == "cpu")
    return devices[0] if devices else None


def _devices_of(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[torch.device, None]:
    found: dict[torch.device, None] = {}
    for argument in (*args, *kwargs.values()):
        for each in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(each, Tensor):
                found[each.device] = None
            elif isinstance(each, torch.device):
                found[each] = None
    return found


@dataclass(frozen=True, slots=True)
class RandomStates:
    """A snapshot of the states of Python's, NumPy's and torch's generators."""

    python: Any
    numpy: Any
    torch: tuple[Tensor, ...]

    def plain(self) -> dict[str, Any]:
        """Return the states as numbers, texts and tensors, for a file."""
        version, words, spare = self.python
        plain: dict[str, Any] = {
            "python": [version, list(words), spare],
            "torch": list(self.torch),
        }
        if self.numpy is not None:
            name, key, *rest = self.numpy
            plain["numpy"] = [name, key.tolist(), *rest]
        return plain

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> "RandomStates":
        """Return the states from the result of `plain`."""
        version, words, spare = plain["python"]
        return RandomStates(
            python=(version, tuple(words), spare),
            numpy=tuple(plain["numpy"]) if "numpy" in plain else None,
            torch=tuple(plain["torch"]),
        )


def random_states(*devices: torch.device, with_numpy: bool = True) -> RandomStates:
    """Return the states of all generators that a step on devices may draw from.

    NumPy's is included only if NumPy has been imported. It takes more than a hundred
    microseconds, the others together ten.

    Examples:
        >>> before = random_states(torch.device("cpu"))
        >>> first = torch.rand(3)
        >>> restore_random_states(before, torch.device("cpu"))
        >>> torch.equal(torch.rand(3), first)
        True
    """
    numpy = sys.modules.get("numpy") if with_numpy else None
    return RandomStates(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        torch=tuple(generator.get_state() for generator in _generators(devices)),
    )


def restore_random_states(states: RandomStates, *devices: torch.device) -> None:
    """Restore every generator; pass the same devices as to `random_states`."""
    random.setstate(states.python)
    for generator, state in zip(_generators(devices), states.torch, strict=False):
        generator.set_state(state)
    numpy = sys.modules.get("numpy")
    if numpy is not None and states.numpy is not None:
        numpy.random.set_state(states.numpy)


def same_random_states(states: RandomStates, *devices: torch.device) -> bool:
    """Return whether no generator was drawn from since; ignores NumPy's.

    Examples:
        >>> before = random_states(torch.device("cpu"))
        >>> same_random_states(before, torch.device("cpu"))
        True
        >>> _ = torch.rand(3)
        >>> same_random_states(before, torch.device("cpu"))
        False
    """
    now = (generator.get_state() for generator in _generators(devices))
    return random.getstate() == states.python and all(
        map(same_state, states.torch, now)
    )


def _generators(devices: Sequence[torch.device]) -> list[torch.Generator]:
    if not devices:  # a fast path, for every step of a loop on the CPU
        return [torch.default_generator]
    found = [torch.default_generator, *map(default_generator, devices)]
    return list({id(generator): generator for generator in found}.values())


AnyGenerator = Any
"""A `torch.Generator`, `random.Random`, NumPy `Generator` or `RandomState`."""


def generators_of(things: Iterable[object]) -> list[AnyGenerator]:
    """Return the generators that are attributes of objects, each once, in order.

    Attributes named `generator` come first: torch's loaders and samplers use that name.

    Examples:
        >>> from torch.utils.data import RandomSampler
        >>> own = torch.Generator()
        >>> generators_of([RandomSampler([1, 2], generator=own)]) == [own]
        True
    """
    kinds = generator_kinds()
    named: dict[int, Any] = {}
    others: dict[int, Any] = {}
    for thing in things:
        for name, value in getattr(thing, "__dict__", {}).items():
            if isinstance(value, kinds):
                found = named if name == "generator" else others
                found[id(value)] = value
    return list((named | {k: v for k, v in others.items() if k not in named}).values())


def generator_states(generators: Sequence[AnyGenerator]) -> list[Any]:
    """Return the states of generators as tensors, numbers and texts, for a file."""
    return [_state(generator) for generator in generators]


def restore_generators(
    generators: Sequence[AnyGenerator], states: Sequence[Any]
) -> None:
    """Restore the states of generators, pairwise."""
    for generator, state in zip(generators, states, strict=False):
        _restore(generator, state)


def generator_kinds() -> tuple[type, ...]:
    """Return the classes of random generators: torch's, Python's and NumPy's."""
    numpy = sys.modules.get("numpy")
    own = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (torch.Generator, random.Random, *own)


def _state(generator: AnyGenerator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, spare = generator.getstate()
        return [version, list(words), spare]
    if hasattr(generator, "bit_generator"):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def _restore(generator: AnyGenerator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, spare = state
        generator.setstate((version, tuple(words), spare))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _of_plain(state)
    else:
        generator.set_state(_of_plain(state))


def _plain(state: Any) -> Any:
    """Return a NumPy generator state with arrays as lists, tagged by their dtype."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if hasattr(state, "tolist") and getattr(state, "ndim", 0):
        return {"dtype": str(state.dtype), "values": state.tolist()}
    return state.item() if hasattr(state, "item") else state


def _of_plain(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if set(state) == {"dtype", "values"}:
        return sys.modules["numpy"].array(state["values"], dtype=state["dtype"])
    return {name: _of_plain(value) for name, value in state.items()}


def draw_as_if_new(loader: Any) -> None:
    """Draw the seed that a loader's new iterator would draw, if it reuses the old one.

    A new iterator draws a seed for its workers before the sampler draws an order. A
    loader with persistent workers creates an iterator in its first epoch only, so its
    orders would depend on when its process was started.

    Examples:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> before = torch.get_rng_state()
        >>> draw_as_if_new(torch.utils.data.DataLoader([1, 2], shuffle=True))
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    persists = getattr(loader, "persistent_workers", False)
    # torchdata's loader always has an iterator, and replaces it.
    if persists and getattr(loader, "_iterator", None) is not None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
