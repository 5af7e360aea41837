"""Holds of external tensors of a region, detached from graphs when it ends."""

from itertools import islice

from torch import Tensor
from torch.nn import Parameter

from recoup.backend.autograd.saved_tensors import stays_leaf
from recoup.backend.memory.storages import Geometry, alias
from recoup.engine.lifetime.values import Hold, separate_holds


class ExternalHolds:
    """Makes the holds of tensors that a region uses but did not produce.

    A hold must not keep a graph alive, but a tensor that requires no gradient may get a
    graph later, by a write. Such holds are detached when the region ends, because
    between two operators a `detach` costs ten times as much.
    """

    def __init__(self) -> None:
        self._holds: dict[int, tuple[Hold, int]] = {}  # by the hold's identity
        self._found: dict[int, list[Hold]] = {}  # by the tensor's identity
        self._searched = 0

    def hold(
        self, tensor: Tensor, address: int, geometry: Geometry | None = None
    ) -> Hold:
        """Return a hold of a tensor."""
        if tensor.requires_grad:
            if stays_leaf(tensor):
                return Hold(tensor, geometry, address)  # `.data` may be assigned
            return Hold(alias(tensor), geometry)
        if type(tensor) is not Tensor:
            is_frozen = isinstance(tensor, Parameter)
            return Hold(alias(tensor), geometry, is_frozen=is_frozen)
        hold = Hold(tensor, geometry)
        if hold.version != -1:  # an inference tensor never gets a graph
            self._holds[id(hold)] = (hold, address)
        return hold

    def twin(self, hold: Hold) -> Hold:
        """Return a second hold of the same value, detached together with the first."""
        twin = hold.twin()
        found = self._holds.get(id(hold))
        if found is not None:
            self._holds[id(twin)] = (twin, found[1])
        return twin

    def part_from(self, tensor: Tensor) -> None:
        """Detach the holds of a tensor whose geometry is about to change."""
        for hold, _ in islice(self._holds.values(), self._searched, None):
            self._found.setdefault(id(hold.tensor), []).append(hold)
        self._searched = len(self._holds)
        for hold in self._found.get(id(tensor), ()):
            if hold.tensor is tensor:
                hold.replace_tensor(alias(tensor))

    def part(self) -> None:
        """Detach all holds; mark those whose tensor got another storage as moved."""
        separate_holds(self._holds.values())
        self._forget()

    def drop(self) -> None:
        """Drop all holds, when nothing is recomputed any more."""
        for hold, _ in self._holds.values():
            hold.drop()
        self._forget()

    def _forget(self) -> None:
        self._holds = {}
        self._found = {}
        self._searched = 0
