"""Writes that an operator's schema does not declare, found by looking."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from recoup.backend.memory.storages import has_contents, has_storage
from recoup.backend.operators.fingerprints import fingerprint
from recoup.backend.operators.kernels import Kernel
from recoup.backend.state.trees import tensors
from recoup.core.restoring import restoring


class FirstSight:
    """Finds out at an operator's first call whether it writes to its arguments.

    Costs a copy of the tensors that it does not say it writes to, two passes over each
    and one synchronisation: once for each operator of an unknown library, in each
    process. Nothing is found out on tensors without contents; the next call is asked.

    Args:
        kernel: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self, kernel: Kernel, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._kernel = kernel
        declared = kernel.facts.writes
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        self._suspects = [
            (place, tensor)
            for place, argument in named
            if place not in declared
            for tensor in tensors(argument)
            if has_storage(tensor)
        ]
        self._copies: list[Tensor] | None = None

    def begin(self) -> None:
        """Copy the arguments: the operator is about to run."""
        self._copies = [tensor.detach().clone() for _, tensor in self._suspects]

    def end(self) -> list[Tensor]:
        """Let the kernel know what it writes to; return those tensors."""
        kernel, copies = self._kernel, self._copies
        known = all(has_contents(tensor) for _, tensor in self._suspects)
        if copies is None or not known:
            return []
        written: list[Tensor] = []
        places = dict.fromkeys(kernel.facts.writes)
        for (place, tensor), copy in zip(self._suspects, copies, strict=True):
            if bool(fingerprint(tensor) != fingerprint(copy)):
                written.append(tensor)
                places[place] = None
        kernel.learn(replace(kernel.facts, is_unproven=False, writes=tuple(places)))
        return written

    @contextmanager
    def undone(self, written: Sequence[Tensor]) -> Iterator[None]:
        """Give tensors their contents before the call, while the block runs."""
        assert self._copies is not None, "only called after `end`"
        before = {
            id(tensor): copy
            for (_, tensor), copy in zip(self._suspects, self._copies, strict=True)
        }
        after = [tensor.detach().clone() for tensor in written]

        def redo() -> None:
            for tensor, contents in zip(written, after, strict=True):
                tensor.detach().copy_(contents)

        with restoring(redo):
            for tensor in written:
                tensor.detach().copy_(before[id(tensor)])
            yield
