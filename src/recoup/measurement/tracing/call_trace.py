"""One call of a model as it trains: its operators, and the bytes that they make."""

from collections import defaultdict
from typing import Any

import torch

from recoup.backend.autograd.hook_stacks import Footing
from recoup.backend.memory.ledger import StorageLedger, rounded_up, storages_in
from recoup.backend.memory.meters import BLOCK_BYTES
from recoup.backend.operators.dispatch import OperatorMode
from recoup.backend.operators.fakes import makes_no_memory
from recoup.backend.operators.properties import Facts, facts_of
from recoup.core.graph import Graph
from recoup.engine.replay.recomputing import is_recomputing


class CallTrace(OperatorMode):
    """Write down the operators of one forward while it runs, with any plan.

    Costs some ten microseconds an operator, and holds no tensor.

    Attributes:
        operators: The name of each operator, and the bytes of each storage it made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, list[int]]] = []
        self._ledger = StorageLedger()
        self._facts: dict[Any, Facts] = {}
        self._footing: Footing | None = None

    @property
    def live_bytes(self) -> int:
        """Bytes that the call has made and that are alive now."""
        return self._ledger.live_bytes

    def begin(self) -> None:
        """Enter the mode."""
        self._footing = Footing()
        self.__enter__()

    def end(self) -> None:
        """Leave the mode, whatever an interrupt has left above it."""
        footing = self._footing
        if footing is not None:
            # On one line: an interrupt must not come between leaving and knowing it.
            self._footing = footing.leave_mode(self)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and write it down."""
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = facts_of(func)
        out = func(*args, **kwargs)
        if facts.passes or is_recomputing() or makes_no_memory(kwargs):
            return out
        given = {id(storage) for storage in storages_in((args, kwargs))}
        made = [
            _counted_bytes(storage)
            for storage in storages_in(out)
            if id(storage) not in given and self._ledger.add(storage)
        ]
        self.operators.append((facts.name, made))
        return out


def _counted_bytes(storage: torch.UntypedStorage) -> int:
    """Return what a storage counts in a measured step: allocators give blocks."""
    block_bytes = 1 if storage.device.type == "cpu" else BLOCK_BYTES
    return rounded_up(storage.nbytes(), block_bytes)


def storage_bytes(
    graph: Graph, trace: CallTrace, operations: range
) -> tuple[dict[int, int], bool]:
    """Return the bytes of a step's storages as a call made them.

    Operators are matched in order; where the call has others, the n-th of a name is the
    n-th of that name, if there are equally many.

    Args:
        graph: The measured step.
        trace: The call.
        operations: The operations of that call in the measured step.

    Returns:
        The bytes, by the number of the storage, and whether all operators are the same.
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
