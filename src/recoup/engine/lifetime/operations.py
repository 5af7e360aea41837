"""Operations on a tape: operator calls whose tensors are replaced by values."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Generator, Tensor

from recoup.backend.autograd.autocast import default_dtype
from recoup.backend.memory.storages import Geometry
from recoup.backend.operators.kernels import Kernel
from recoup.backend.operators.properties import Operator
from recoup.engine.lifetime.values import Layout, TapeValue

View = tuple[TapeValue, Layout]
"""A reference to a value by a layout."""


class TapeOperation:
    """One operator call on the tape, its tensors replaced by values.

    Attributes:
        kernel: What was called.
        args: Positional arguments; each tensor is a `TapeValue`, if it has the geometry
            of the tensor that first named it, or a `View`.
        kwargs: Keyword arguments, likewise.
        places: Positions of the arguments that hold references.
        names: Names of the keyword arguments that do.
        outputs: Its new values.
        writes: Pairs of the value before and the value after a write.
        random: The generator it draws from and the state before it did.
        default_dtype: The default type of floating-point numbers when it was called.
    """

    __slots__ = (
        "args",
        "default_dtype",
        "kernel",
        "kwargs",
        "names",
        "outputs",
        "places",
        "random",
        "writes",
    )

    def __init__(
        self,
        kernel: Kernel,
        args: list[Any],
        kwargs: dict[str, Any],
        places: tuple[int, ...],
    ) -> None:
        self.kernel = kernel
        self.args = args
        self.kwargs = kwargs
        self.places = places
        self.names: Sequence[str] = ()
        self.outputs: list[TapeValue] = []
        self.writes: Sequence[tuple[TapeValue, TapeValue]] = ()
        self.random: tuple[Generator, Tensor] | None = None
        self.default_dtype = default_dtype()

    def reads(self) -> list[TapeValue]:
        """Return the values it takes."""
        found: list[TapeValue] = []
        args = self.args
        for place in self.places:
            reference = args[place]
            # Written out for the common kinds: a call costs as much as all the rest.
            if type(reference) is TapeValue:
                found.append(reference)
            elif type(reference) is tuple:
                found.append(reference[0])
            else:
                _collect(reference, found)
        for name in self.names:
            _collect(self.kwargs[name], found)
        return found

    def lies(self) -> "list[tuple[TapeValue, Geometry]]":
        """Return the values from outside that it takes, and how each lies there."""
        found: list[tuple[TapeValue, Geometry]] = []
        references = [self.args[place] for place in self.places]
        references += [self.kwargs[name] for name in self.names]
        while references:
            reference = references.pop()
            if type(reference) is list:
                references += reference
            elif type(reference) is tuple:
                found.append((reference[0], reference[1].geometry))
            elif type(reference) is TapeValue:
                hold = reference.hold
                geometry = None if hold is None else hold.geometry
                if geometry is not None:
                    found.append((reference, geometry))
        return found

    @property
    def operator(self) -> Operator:
        """The operator that was called."""
        return self.kernel.operator


def _collect(reference: Any, found: list[TapeValue]) -> None:
    kind = type(reference)
    if kind is TapeValue:
        found.append(reference)
    elif kind is tuple:
        found.append(reference[0])
    elif kind is list:
        for element in reference:
            _collect(element, found)


def reads_of(operations: Iterable[TapeOperation]) -> list[list[TapeValue]]:
    """Return what `reads` of each returns, without a call for each."""
    all_reads: list[list[TapeValue]] = []
    for operation in operations:
        found: list[TapeValue] = []
        args = operation.args
        for place in operation.places:
            reference = args[place]
            if type(reference) is TapeValue:
                found.append(reference)
            elif type(reference) is tuple:
                found.append(reference[0])
            else:
                _collect(reference, found)
        for name in operation.names:
            _collect(operation.kwargs[name], found)
        all_reads.append(found)
    return all_reads
