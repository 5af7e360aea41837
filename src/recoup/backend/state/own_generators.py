"""Random generators that objects own: torch's, NumPy's and Python's, as plain data."""

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

Generator = Any
"""A `torch.Generator`, `random.Random`, NumPy `Generator` or `RandomState`."""


def generators_of(things: Iterable[object]) -> list[Generator]:
    """Return the generators that are attributes of objects, each once, in order.

    Those called `generator` come first, as torch's loaders and samplers call them.

    Examples:
        >>> from torch.utils.data import RandomSampler
        >>> own = torch.Generator()
        >>> generators_of([RandomSampler([1, 2], generator=own)]) == [own]
        True
    """
    kinds = _kinds()
    named: dict[int, Any] = {}
    others: dict[int, Any] = {}
    for thing in things:
        for name, value in getattr(thing, "__dict__", {}).items():
            if isinstance(value, kinds):
                found = named if name == "generator" else others
                found[id(value)] = value
    return list((named | {k: v for k, v in others.items() if k not in named}).values())


def generator_states(generators: Sequence[Generator]) -> list[Any]:
    """Return the states of generators as tensors, numbers and texts, for a file."""
    return [_state(generator) for generator in generators]


def restore_generators(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    """Put generators back into states, as many as there are of both."""
    for generator, state in zip(generators, states, strict=False):
        _restore(generator, state)


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    own = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (torch.Generator, random.Random, *own)


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, spare = generator.getstate()
        return [version, list(words), spare]
    if hasattr(generator, "bit_generator"):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def _restore(generator: Generator, state: Any) -> None:
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
    """Return a state of NumPy's with its arrays as lists, marked by their type."""
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
