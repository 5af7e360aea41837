"""Writes to parameters in a step that must leave them as they are: seen and undone."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.dispatch import OperatorMode, copy_unseen
from recoup.backend.kernels import kernel_of
from recoup.backend.storages import has_storage, storage_address
from recoup.backend.trees import tensors


class Writes:
    """Puts parameters back that a step writes to, such as one with an optimizer in it.

    The first run is watched, and a parameter copied to the host before an operator
    writes to it: later runs of the same step write to the same ones. Nearly always
    there is none, and nothing is copied. Costs a look at every operator of that run.

    Args:
        parameters: The parameters.

    Examples:
        >>> table = nn.Embedding(2, 2, max_norm=1.0)
        >>> _ = nn.init.constant_(table.weight, 3.0)
        >>> writes = Writes(table.parameters())
        >>> _ = writes.watched(lambda: table(torch.tensor([0])))()
        >>> writes.restore()
        >>> table.weight.tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._before = [(p, p.detach()) for p in parameters if _has_memory(p)]
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._has_run = False

    def watched(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return the run of a step, watched when it is called for the first time."""

        def first_watched() -> object:
            if self._has_run:
                return run()
            self._has_run = True
            with _Watch(self._before, self._copies):
                return run()

        return first_watched

    def restore(self) -> None:
        """Put the parameters back: the memory they were given, and what was in it."""
        for parameter, before in self._before:
            if storage_address(parameter) != storage_address(before):
                parameter.data = before
        with torch.no_grad():
            for before, copy in self._copies:
                before.copy_(copy)


class _Watch(OperatorMode):
    """Copies tensors before operators write to their storages."""

    def __init__(
        self,
        known: Iterable[tuple[Tensor, Tensor]],
        copies: list[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__()
        self._copies = copies
        self._waiting: dict[int, list[Tensor]] = {}
        for _, before in known:
            self._waiting.setdefault(storage_address(before), []).append(before)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        for place in kernel_of(func).facts.writes:
            # One that is left to its default is not among the arguments.
            by_name = isinstance(place, str)
            given = kwargs.get(place) if by_name else args[place : place + 1]
            for tensor in filter(has_storage, tensors(given)):
                self._copy(storage_address(tensor))
        return func(*args, **kwargs)

    def _copy(self, address: int) -> None:
        for before in self._waiting.pop(address, ()):
            self._copies.append((before, copy_unseen(before)))  # no part of the step


def _has_memory(parameter: Tensor) -> bool:
    """Return whether a parameter is plain memory, not one of several processes'."""
    return (
        type(parameter) in (Tensor, nn.Parameter)
        and has_storage(parameter)
        and not parameter.is_meta
    )
