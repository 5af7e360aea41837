"""Late writes: those after autograd saved a tensor that bypass its version counter."""

from torch import Tensor

from recoup.backend.memory.storages import alias, version_of
from recoup.engine.lifetime.values import Hold, TapeValue


class LateWrites:
    """Finds the writes to saved values that did not count as a new version.

    Autograd gives a tensor its new version after the operator that wrote to it. Where
    it does not (`rrelu_with_noise`, a write to `.data`), plain autograd shows backward
    what was written, so the tensor is held as it is.

    Attributes:
        holds: By value, what plain autograd would find there now.
    """

    def __init__(self) -> None:
        self.holds: dict[TapeValue, Hold] = {}
        self._pending: list[tuple[TapeValue, Hold]] = []

    def before(self, value: TapeValue, tensor: Tensor) -> None:
        """Record that a saved value is about to be written to, through a tensor."""
        # The tensor that was saved, if it is there: `.data` has versions of its own.
        saved = value.first_tensor()
        hold = Hold(alias(tensor if saved is None else saved), value.geometry)
        self._pending.append((value, hold))

    def settle(self) -> None:
        """Find out which of the writes so far counted."""
        if self._pending:
            for value, hold in self._pending:
                if hold.tensor is not None and version_of(hold.tensor) == hold.version:
                    self.holds[value] = hold
            self._pending = []
