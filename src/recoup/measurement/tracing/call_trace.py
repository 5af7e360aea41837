"""A trace of one model call in training: its operators and the bytes they allocate."""

from collections import defaultdict
from functools import partial
from typing import Any

import torch

from recoup.backend.autograd.hook_stacks import Footing
from recoup.backend.memory.ledger import rounded_up
from recoup.backend.memory.meters import BLOCK_BYTES, StorageMeter
from recoup.backend.operators.properties import Facts
from recoup.backend.operators.timers import OperatorTimer
from recoup.core.graph import Graph
from recoup.measurement.tracing.tracer import Ran, StepTracer


class CallTrace(StepTracer):
    """Trace one forward while it runs, with any plan.

    Uses no meter and no timer: it resets no peak statistics, and costs some ten
    microseconds per operator.
    """

    def __init__(self) -> None:
        super().__init__(StorageMeter(), OperatorTimer("cpu"))  # neither is used
        self._footing: Footing | None = None

    @property
    def operators(self) -> list[tuple[str, list[int]]]:
        """The name of each operator, and the bytes of each storage it allocated."""
        made: dict[int, list[int]] = defaultdict(list)
        for storage in self.trace.storages:
            made[storage.born].append(storage.bytes)
        return [(op.name, made[n]) for n, op in enumerate(self.trace.operations)]

    @property
    def live_bytes(self) -> int:
        """Bytes that the call allocated and that are alive now."""
        self._lifetimes.bury()
        return sum(
            storage.bytes
            for storage in self.trace.storages
            if storage.born >= 0 and storage.dies is None
        )

    def begin(self) -> None:
        """Enter the mode."""
        self._footing = Footing()
        self.__enter__()

    def end(self) -> None:
        """Leave the mode, also if an interrupt left other modes above it."""
        footing = self._footing
        if footing is not None:
            # One statement: no interrupt may come between leaving and recording it.
            self._footing = footing.leave_mode(self)

    def _counted_bytes(self, storage: torch.UntypedStorage) -> int:
        """Return a storage's size, rounded up to blocks as in a measured step."""
        block_bytes = 1 if storage.device.type == "cpu" else BLOCK_BYTES
        return rounded_up(storage.nbytes(), block_bytes)

    def _run(self, facts: Facts, call: partial[Any]) -> Ran:
        del facts
        return Ran(call())


def storage_bytes(
    graph: Graph, trace: CallTrace, operations: range
) -> tuple[dict[int, int], bool]:
    """Return the bytes of a step's storages in a traced call.

    Operators are matched in order. If the sequences differ, they are matched in order
    for each name that occurs equally often.

    Returns:
        The bytes by storage number, and whether the operator sequences are equal.
    """
    born: dict[int, list[int]] = defaultdict(list)
    for number, storage in enumerate(graph.storages):
        if storage.bytes and storage.born in operations:
            born[storage.born].append(number)
    measured = [graph.operations[number].name for number in operations]
    is_same = measured == [name for name, _ in trace.operators]
    if is_same:
        pairs = list(zip(operations, trace.operators, strict=True))
    else:
        pairs = _by_name(graph, trace, operations)
    found: dict[int, int] = {}
    for number, (_, made) in pairs:
        storages = born.get(number, [])
        if len(storages) == len([nbytes for nbytes in made if nbytes]):
            found.update(zip(storages, filter(None, made), strict=True))
    return found, is_same


def _by_name(
    graph: Graph, trace: CallTrace, operations: range
) -> list[tuple[int, tuple[str, list[int]]]]:
    measured: dict[str, list[int]] = defaultdict(list)
    for number in operations:
        measured[graph.operations[number].name].append(number)
    called: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for operator in trace.operators:
        called[operator[0]].append(operator)
    return [
        pair
        for name, numbers in measured.items()
        if len(numbers) == len(called[name])
        for pair in zip(numbers, called[name], strict=True)
    ]
