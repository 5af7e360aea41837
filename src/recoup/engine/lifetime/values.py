"""Values, and the holds that keep some of them.

Both own their transitions. Other modules set their attributes in three places only,
where a call would cost as much as the rest: `demand` in `Saved`, which counts itself,
`is_spare` in `record_call`, and what `Tape.save` keeps for autograd.
"""

import weakref
from collections.abc import Iterable, Sequence
from copy import copy
from math import prod
from typing import Any, Protocol, final

from torch import Tensor

from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    is_parameter,
    without_parameters,
)
from recoup.backend.autograd.wrappers import is_wrapper
from recoup.backend.memory.ledger import tensor_bytes
from recoup.backend.memory.storages import (
    NO_VERSION,
    Geometry,
    alias,
    fitted,
    flat,
    geometry_of,
    has_contents,
    has_storage,
    shaped,
    storage_address,
    version_counter,
    version_of,
)
from recoup.backend.state.trees import tensors
from recoup.engine.tiers.deposits import Deposit, DepositClaim, deposit
from recoup.engine.tiers.device import Device
from recoup.engine.tiers.protocol import Tier
from recoup.errors import ChangedTensorError

OUTSIDE = -1
"""The producer of a value that no recorded operation made."""

HELD: Any = object()
"""Stands for a weak reference to the tensor that a hold has: making one takes long."""

MOVED = -2
"""The version of a tensor that was given other memory after it was used."""

GIVEN_OTHER_MEMORY = "was given other memory, by an assignment to `.data`"


@final
class TapeValue:
    """One storage at one version, as a region saw it.

    One is made for every operator that runs, hence the slots. Few objects should live
    until backward: Python's garbage collector scans all objects whenever their number
    has grown by a quarter.

    Attributes:
        producer: The index of the operation that made it, or `OUTSIDE`.
        place: Its place in what the operation returned; None: it is all of that.
        geometry: How the tensor that first named it lies in its storage; None for a
            value from outside, which is only referred to by views.
        hold: What keeps it, or None when it is to be recomputed.
        demand: How many tensors saved by autograd refer to it now.
        born: A weak reference to the tensor that first named it, or `HELD` if its hold
            has that tensor. An argument that is this very tensor needs no look at its
            geometry.
        layouts: The layouts of other tensors in the storage, by geometry; None while
            there are none.
        is_spare: The hold is there because autograd was given one; no operation has
            referred to the value so far.
    """

    __slots__ = (
        "born",
        "demand",
        "geometry",
        "hold",
        "is_spare",
        "layouts",
        "place",
        "producer",
    )

    def __init__(
        self,
        producer: int,
        geometry: Geometry | None,
        born: weakref.ref[Tensor] | None = None,
        place: int | None = None,
    ) -> None:
        self.producer = producer
        self.geometry = geometry
        self.place = place
        self.hold: Hold | None = None
        self.demand = 0
        self.is_spare = False
        self.born = born
        self.layouts: dict[Geometry, Layout] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor that first named it; 0 if it came from outside."""
        if self.geometry is None:
            return 0
        return prod(self.geometry[0]) * self.geometry[3].itemsize

    def layout(self, geometry: Geometry) -> "Layout":
        """Return the layout of this geometry, always the same object."""
        layouts = self.layouts
        if layouts is None:  # as of most values
            layout = Layout(geometry, self.geometry)
            self.layouts = {geometry: layout}
            return layout
        layout = layouts.get(geometry)
        if layout is None:
            layout = layouts[geometry] = Layout(geometry, self.geometry)
        return layout

    def first_tensor(self) -> Tensor | None:
        """Return the tensor that first named it, if that is known and there."""
        born = self.born
        if born is HELD:
            return None if self.hold is None else self.hold.tensor
        return None if born is None else born()

    def keep(self, hold: "Hold") -> "Hold":
        """Keep the value by a hold; return the hold."""
        self.hold = hold
        return hold

    def keep_tensor(self, tensor: Tensor, *, is_first: bool = False) -> "Hold":
        """Keep the value by an alias of a tensor that names it; return the hold.

        Args:
            tensor: The tensor.
            is_first: It is the one that first named the value, and lies as that does.
        """
        self.hold = Hold(alias(tensor), None if is_first else self.geometry)
        return self.hold

    def keep_from_outside(self, hold: "Hold", tensor: Tensor) -> None:
        """Keep a value that the region did not make and that a tensor names."""
        is_held = self.geometry is None and hold.tensor is tensor
        self.hold = hold
        self.born = HELD if is_held else weakref.ref(tensor)
        self.is_spare = False

    def drop_hold(self) -> None:
        """Recompute the value instead of keeping it."""
        self.hold = None
        self.is_spare = False

    def mark_used(self) -> None:
        """Record that an operation refers to the value."""
        self.is_spare = False

    def forget_tensor(self) -> None:
        """Forget the tensor that first named it: that may lie otherwise from now on."""
        self.born = None

    def move_outside(self) -> None:
        """Forget how it was made: the memory was filled by something unknown."""
        self.producer = OUTSIDE
        self.born = None


class Layout:
    """The layout of a tensor in a value's storage that differs from the value's own.

    All tensors of one layout share one view, made once in a replay.

    Args:
        geometry: The geometry of such a tensor.
        whole: The geometry of the value itself, if known.
    """

    __slots__ = ("_is_strided", "geometry")

    def __init__(self, geometry: Geometry, whole: Geometry | None) -> None:
        self.geometry = geometry
        self._is_strided = (
            whole is not None and whole[3] is geometry[3] and not whole[4]
        )

    def view(self, whole: Tensor) -> Tensor:
        """Return a view of a tensor that lies as the value does."""
        shape, stride, offset, _, bits = self.geometry
        if self._is_strided and not bits:
            return whole.as_strided(shape, stride, offset)
        return fitted(whole, self.geometry)


def forget_tensors(values: Iterable[TapeValue]) -> None:
    """Do `forget_tensor` of each, without a call for each."""
    for value in values:
        value.born = None


class Makes(Protocol):
    """An operation, as its values know it."""

    outputs: list[TapeValue]
    writes: Sequence[tuple[TapeValue, TapeValue]]


def number(operations: Sequence[Makes]) -> None:
    """Set the values' final positions; drop state that only recording needs."""
    for index, operation in enumerate(operations):
        for value in operation.outputs:
            value.producer = index
            value.born = None
        for _, value in operation.writes:
            value.producer = index
            value.born = None


class Earlier(Protocol):
    """Contents of a storage that has been written to since."""

    def fetch(self) -> Tensor:
        """Return the contents in one dimension."""
        ...

    def holds(self) -> "list[Hold]":
        """Return the holds of all that the contents are put together from."""
        ...


@final
class Hold:
    """Keeps one value: a tensor with its version, or what became of it elsewhere.

    Args:
        tensor: A tensor without a graph behind it that names the value.
        geometry: The geometry to give it back in, if that is not its own.
        address: The address of a leaf's storage, which may be replaced.
        is_frozen: It holds a parameter that requires no gradient.

    Attributes:
        version: The tensor's version when it was used, or None while it is not known.
        leaf: The leaf of autograd that a region around keeps by an alias, weakly. Set
            by `hand_over`.
        owner: The wrapper that the tensor is a part of, weakly, with its version.
        tier: Where the value is to be kept, if not on its device.
        stored: The value in its tier, once it has been put there.
        past: The value, if it is what a tensor was before the region wrote to it.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "geometry",
        "guard",
        "is_frozen",
        "leaf",
        "owner",
        "packed",
        "past",
        "stored",
        "tensor",
        "tier",
        "unpack",
        "version",
    )

    def __init__(
        self,
        tensor: Tensor,
        geometry: Geometry | None = None,
        address: int | None = None,
        *,
        is_frozen: bool = False,
    ) -> None:
        self.tensor: Tensor | None = tensor
        try:
            self.version: int | None = version_counter(tensor)
        except RuntimeError:  # as `version_of` does
            self.version = NO_VERSION
        self.geometry = geometry
        self.packed: Any = None
        self.unpack: Unpack | None = None
        self.address = address
        self.guard: Tensor | None = None
        self.is_frozen = is_frozen
        self.owner: tuple[weakref.ref[Tensor], int] | None = None
        self.tier: Tier | None = None
        self.stored: Deposit | None = None
        self.past: Earlier | None = None

    def become_past(self, past: Earlier) -> None:
        """Give the tensor up: it is about to be written to."""
        assert self.tensor is not None, "it was held by reference"
        self.geometry = self.geometry or geometry_of(self.tensor)
        self.past = past
        self.tensor = None
        self.address = None

    def forget_version(self) -> None:
        """Take the version later, by `settle`: a write that is under way counts."""
        self.version = None

    def replace_tensor(self, tensor: Tensor) -> None:
        """Keep the value by another tensor of the same memory."""
        self.tensor = tensor

    def parts(self) -> "list[Hold]":
        """Return the holds that keep the value: itself, or those of its pieces."""
        return [self] if self.past is None else self.past.holds()

    @property
    def has_parts_elsewhere(self) -> bool:
        """Whether hooks around the region keep the value, or pieces of it."""
        return any(part.unpack is not None for part in self.parts())

    @property
    def is_at_hand(self) -> bool:
        """Whether it can be fetched by itself: no foreign hooks keep it."""
        return not (self.tensor is None and self.stored is None and self.past is None)

    @property
    def resident(self) -> Tensor | None:
        """The tensor that is held, here or by a region around that it was given to."""
        hold: Hold | None = self
        while hold is not None and hold.tensor is None:
            value = getattr(hold.packed, "value", None)
            hold = value.hold if isinstance(value, TapeValue) else None
        return None if hold is None else hold.tensor

    @property
    def is_parameter(self) -> bool:
        """Whether it holds a parameter, or a view of one."""
        tensor = self.resident
        return self.is_frozen or (tensor is not None and is_parameter(tensor))

    @property
    def stored_bytes(self) -> int:
        """The bytes it takes where it is kept."""
        if self.stored is not None:
            return self.stored.stored_bytes
        return 0 if self.tensor is None else tensor_bytes(self.tensor)

    def hand_over(self, pack: Pack, unpack: Unpack) -> None:
        """Let the saved-tensor hooks around the region keep the value instead.

        The hooks get the whole storage, because references to the value may name any
        part of it.
        """
        tensor = self.tensor
        # One that was changed already stays: fetching it raises.
        if tensor is None or version_of(tensor) != self.version:
            return
        if is_wrapper(tensor):
            self.packed = pack(tensor)
        elif not has_storage(tensor):  # as inside a torch.func transform
            return
        else:
            whole = flat(tensor)
            self.geometry = self.geometry or geometry_of(tensor)
            self.packed = pack(whole)
        self.leaf: weakref.ref[Tensor] | None = None
        self.unpack = unpack
        self.tensor = None
        if self.address is not None and self.resident is not None:
            # A region around has an alias, which assigning to `.data` does not move.
            self.leaf = weakref.ref(tensor)
        if any(_shares(tensor, kept) for kept in tensors(self.packed)):
            self.guard = tensor  # the hooks kept the tensor itself: it may change
        if self.owner is not None:
            self._hand_over_owner(getattr(pack, "__self__", None))

    def _hand_over_owner(self, around: Any) -> None:
        """Let a region around watch the wrapper: it sees what is written there."""
        assert self.owner is not None, "there is a wrapper"
        wrapper, version = self.owner[0](), self.owner[1]
        tape: Any = getattr(around, "tape", None)
        if wrapper is not None and tape is not None and version_of(wrapper) == version:
            tape.meet_wrapper(wrapper, is_written=False)
            self.owner = None

    def assign(self, tier: Tier | None) -> None:
        """Set the tier of the value; `store` moves it there."""
        self.tier = None if isinstance(tier, Device) else tier

    def store(self, claims: int) -> bool:
        """Put the value in its tier, if it can be there; return whether it is.

        The whole storage is put, because references to the value may name any part.
        """
        tensor, tier = self.tensor, self.tier
        self.tier = None
        if tensor is None or tier is None or not can_move(tensor, tier):
            return False
        # One that was changed already stays: fetching it raises.
        if self.version is not None and version_of(tensor) != self.version:
            return False
        self.geometry = self.geometry or geometry_of(tensor)
        self.stored = deposit(tier, tensor)
        self.stored.claims += claims
        self.tensor = None
        return True

    def watch(self, owner: Tensor | None) -> None:
        """Go by the version of a wrapper too, or of none.

        One that is watched already stays: another may name the same tensors.
        """
        if owner is None:
            self.owner = None
        elif self.owner is None:
            # Weak: what the hold keeps may move, while the wrapper would stay.
            self.owner = weakref.ref(owner), version_of(owner)

    def settle(self) -> None:
        """Take the current version, if none was known."""
        if self.version is None and self.tensor is not None:
            self.version = version_of(self.tensor)

    def twin(self) -> "Hold":
        """Return a second hold of the same value, which hooks can keep by itself."""
        assert self.is_at_hand, "not handed over yet"
        return copy(self)

    def drop(self) -> None:
        """Free the value."""
        self.tensor = None
        self.guard = None
        self.owner = None
        self.packed = None
        self.unpack = None
        self.stored = None
        self.past = None

    def fetch(self, user: str, claim: DepositClaim | None = None) -> Tensor:
        """Return the value, or raise if it was changed; `user` is named then."""
        tensor = self.tensor
        if tensor is not None:
            try:
                version = version_counter(tensor)
            except RuntimeError:  # as `version_of` does
                version = NO_VERSION
            if version != self.version:
                self.check(tensor, user)
            if self.owner is not None:
                self.check_owner(user)
            return tensor if self.geometry is None else shaped(tensor, self.geometry)
        if self.stored is not None:
            assert self.geometry is not None, "set together with stored"
            return shaped(self.stored.fetch(claim), self.geometry)
        if self.past is not None:
            assert self.geometry is not None, "set together with past"
            return shaped(self.past.fetch(), self.geometry)
        assert self.unpack is not None, "a tensor, a tier or hooks hold the value"
        self.check(self.guard, user)
        return self.given_back(self.unpack(self.packed), user)

    def given_back(self, tensor: Tensor, user: str) -> Tensor:
        """Return the value in what the hooks that keep it have given back."""
        self.check(self.guard, user)
        self.check_owner(user)
        leaf = None if self.leaf is None else self.leaf()
        if leaf is not None and storage_address(leaf) != self.address:
            raise changed_tensor(leaf, user, GIVEN_OTHER_MEMORY)
        return tensor if self.geometry is None else shaped(tensor, self.geometry)

    def check(self, tensor: Tensor | None, user: str) -> None:
        """Raise if the tensor was written to since the region used it."""
        if tensor is None or self.version is None:
            return
        if version_of(tensor) != self.version:
            happened = (
                "was given other memory inside it, by an assignment to `.data`"
                if self.version == MOVED
                else f"was changed in place before backward (it is at version "
                f"{version_of(tensor)}, the region used version {self.version})"
            )
            raise changed_tensor(tensor, user, happened)

    def check_owner(self, user: str) -> None:
        """Raise if the wrapper that the tensor is a part of was written to since."""
        if self.owner is None:
            return
        wrapper, version = self.owner[0](), self.owner[1]
        if wrapper is not None and version_of(wrapper) != version:
            happened = "was changed in place before backward"
            raise changed_tensor(wrapper, user, happened)

    def check_memory(self, user: str) -> None:
        """Raise if the tensor got other memory since: a replay would see that.

        Plain autograd sees it too where it saved the very tensor, so backward's own
        look at a value is not checked.
        """
        tensor = self.tensor
        if tensor is None:
            return
        if storage_address(tensor) != self.address:
            raise changed_tensor(tensor, user, GIVEN_OTHER_MEMORY)
        if tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
            happened = (
                "has no memory now: it belongs to another sharded unit of FSDP than "
                "the one that runs its backward. Put each region inside one unit"
            )
            raise changed_tensor(tensor, user, happened)


def separate_holds(holds: Iterable[tuple[Hold, int]]) -> None:
    """Give each hold an alias of its tensor with a version counter of its own.

    Without a call for each: the end of forward waits for it.

    Args:
        holds: Holds of tensors from outside, each with the address of its storage when
            it was used. A tensor that has other memory now is lost.
    """
    for hold, address in holds:
        tensor = hold.tensor
        if tensor is None:
            continue
        if storage_address(tensor) != address:
            hold.version = MOVED  # by an assignment to its `.data`
        hold.tensor = tensor.detach()


def changed_tensor(tensor: Tensor, user: str, happened: str) -> ChangedTensorError:
    """Return the error for a tensor that was changed after a region used it."""
    return ChangedTensorError(
        f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} that {user} "
        f"used inside a checkpointed region {happened}. Change it after backward, or "
        "give the region a clone of it."
    )


def written_in_backward(tensor: Tensor) -> ChangedTensorError:
    """Return the error for a saved tensor that a backward function wrote to."""
    return ChangedTensorError(
        f"a saved tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} was "
        "changed in place by a backward function, and another one needs it. Clone what "
        "`ctx.saved_tensors` gives before writing to it."
    )


def activation_bytes(holds: Iterable[Hold]) -> int:
    """Return the bytes of held tensors, without parameters, every storage once.

    Parameters are in memory anyway.
    """
    found: list[Tensor] = []
    for hold in holds:
        # Written out for the common case: backward waits for this.
        tensor = hold.resident if hold.tensor is None else hold.tensor
        if tensor is not None and not hold.is_frozen:
            found.append(tensor)
    storages: dict[int, int] = {}
    for tensor in without_parameters(found):
        if has_storage(tensor):
            storages[storage_address(tensor)] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def bytes_of(values: Iterable[TapeValue]) -> int:
    """Return the sum of `nbytes`, without a call for each: backward waits for it."""
    total = 0
    for value in values:
        geometry = value.geometry
        if geometry is not None:
            total += prod(geometry[0]) * geometry[3].itemsize
    return total


def can_move(tensor: Tensor, tier: Tier) -> bool:
    """Return whether a tensor is plain memory, and enough of it to be worth moving."""
    if type(tensor) is not Tensor or not has_storage(tensor):
        return False
    if not has_contents(tensor):
        return False
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes > 0 and tier.takes(nbytes)


def _shares(tensor: Tensor, other: Tensor) -> bool:
    if is_wrapper(tensor):
        return type(other) is type(tensor)
    return has_storage(other) and storage_address(tensor) == storage_address(other)
