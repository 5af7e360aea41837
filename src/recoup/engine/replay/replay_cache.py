"""ReplayCache: the values that a backward has recomputed in a region.

A backward through one of several outputs needs a part of the saved tensors. Autograd
does not tell which part, so the cache grows: each requested value is recomputed with
its ancestors, and nothing else. Intermediate values stay while autograd, or a value
that may still be requested, needs them. So no operation runs twice.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from recoup.backend.memory.storages import NO_VERSION, version_counter, version_of
from recoup.engine.lifetime.operations import TapeOperation, reads_of
from recoup.engine.lifetime.values import Layout, TapeValue, written_in_backward
from recoup.engine.replay.program import Live, Program, free
from recoup.engine.replay.program_parts import Part, ProgramParts


class Recalling(Protocol):
    """A region.

    Attributes:
        recall: The values that its last backward has recomputed.
    """

    recall: "ReplayCache | None"


class Saved:
    """The packed form of a tensor that autograd saved in a region, to be recomputed.

    It adds one to its value's demand, and takes that back when autograd frees the saved
    tensor.

    Attributes:
        task: The last backward that unpacked it.
    """

    __slots__ = ("__weakref__", "layout", "region", "task", "value")

    def __init__(
        self, region: Recalling, value: TapeValue, layout: Layout | None
    ) -> None:
        self.value = value
        self.layout = layout
        self.task = -1
        value.demand += 1
        self.region = region  # last: `__del__` releases nothing without it

    def __del__(self) -> None:
        try:
            recall = self.region.recall
        except AttributeError:  # `__init__` was interrupted
            return
        value = self.value
        value.demand -= 1
        hold = value.hold
        if hold is not None and hold.stored is not None:
            hold.stored.release(self)
        if recall is not None and self.task != recall.task and value in recall.pending:
            recall.release(value)


Given = tuple[Tensor, Tensor | None, tuple[int, int]]
"""A recomputed value, the view of it that was given, if any, and their versions then: a
view that a replay made has a separate version counter."""


class Uses:
    """An index from values to the operations of a region that read them.

    Operations are removed once autograd has freed everything computed from them, so
    that many backwards take no longer than one. Backwards on several threads may share
    it, because entries are only removed.

    Args:
        operations: All operations of the region.
        reads: The values that each operation reads, if known.

    Attributes:
        reads: The values that each operation reads.
    """

    def __init__(
        self,
        operations: Sequence[TapeOperation],
        reads: list[list[TapeValue]] | None = None,
    ) -> None:
        self._operations = operations
        self._places: dict[TapeValue, dict[int, None]] = {}
        self.reads = reads_of(operations) if reads is None else reads
        for place, values in enumerate(self.reads):
            for value in values:
                self._places.setdefault(value, {})[place] = None

    def awaited(
        self, value: TapeValue, recall: "ReplayCache", run: Container[int]
    ) -> Iterator[TapeValue]:
        """Yield values that autograd may request later and that need this one.

        Args:
            value: The value to start from.
            recall: The replay cache.
            run: The positions of the operations that are about to run.
        """
        trail: list[tuple[TapeValue, int]] = []
        seen: set[int] = set()
        stack = [value]
        try:
            while stack:
                start = stack.pop()
                # A copy: garbage collection may remove entries meanwhile.
                for place in tuple(self._places.get(start, ())):
                    if place in seen or place in run or recall.has_run(place):
                        continue
                    seen.add(place)
                    trail.append((start, place))
                    for made in _made_by(self._operations[place]):
                        if made.hold is None and made not in recall.live:
                            if recall.is_outstanding(made):
                                yield made
                            stack.append(made)
        finally:
            # In reverse, so that dependents are removed first.
            for start, place in reversed(trail):
                if self._leads_nowhere(place):
                    self._places[start].pop(place, None)

    def _leads_nowhere(self, place: int) -> bool:
        return all(
            made.hold is not None or (made.demand == 0 and not self._places.get(made))
            for made in _made_by(self._operations[place])
        )


class ReplayCache:
    """The recomputed values of a region, each until its last use.

    Counting takes no lock: two threads of one backward may lose a count, and then a
    value is freed at the end of backward instead, or recomputed again.

    Args:
        task: The backward that it serves.
        lasting: Whether to keep saved values for other backwards as well.

    Attributes:
        live: The values and views of them.
        pending: The number of outstanding uses of each value.
    """

    def __init__(self, task: int, *, lasting: bool) -> None:
        self.live: Live = {}
        self.task = task
        self._lasting = lasting
        self.pending: dict[TapeValue, int] = {}
        # Tensors given to backward functions, of values that are needed again.
        self._given: dict[TapeValue, Given] = {}
        self._served: set[TapeValue] = set()
        self._run: set[int] = set()
        self._uses: Uses | None = None
        # Values kept after their last use for values that may be requested later, and
        # some of the latter.
        self._kept: set[TapeValue] = set()
        self._later: set[TapeValue] = set()
        self._spare_bytes = 0
        # The bits of ends that ran with their shared operations. If nonzero and no
        # search has run, later ends need the kept values.
        self._ends = 0

    def serves(self, task: int) -> bool:
        """Return whether the backward with this task id may use it."""
        return self._lasting or self.task == task

    def has_served(self, value: TapeValue) -> bool:
        """Return whether the value was recomputed, even if it was freed since."""
        return value in self._served

    def has_run(self, place: int) -> bool:
        """Return whether the operation at a position was run."""
        return place in self._run

    def is_outstanding(self, value: TapeValue) -> bool:
        """Return whether autograd may request a value that was not recomputed yet."""
        return value not in self._served and is_wanted(value)

    def begin(self, places: Collection[int]) -> bool:
        """Record that operations are about to run; return False if one ran before."""
        if not self._run.isdisjoint(places):
            return False
        self._run.update(places)
        return True

    def begin_shared(self, parts: ProgramParts, place: int) -> tuple[Part, Live] | None:
        """Begin the remaining operations that an end needs.

        Only if all values that later ends need of them are kept for autograd anyway:
        otherwise `plan` weighs the cost.

        Returns:
            The part to run and the tensors to start from, or None if a search is
            needed.
        """
        bit = parts.bits.get(place)
        if bit is None or self._uses is not None or self._lasting:
            return None
        done = self._ends
        now = done | bit
        places: list[int] = []
        wanted: list[TapeValue] = []
        for mark, (some, made) in parts.by_mark.items():
            if mark & bit and not mark & done:
                places += some
                wanted += made
        places.sort()
        for value in wanted:
            if value.demand <= 0:
                return None
        found = self._crossing_at(parts, now)
        if found is None or not self.begin(places):
            return None
        self._ends = now
        given, self._kept = found
        return (places, wanted), given

    def _crossing_at(
        self, parts: ProgramParts, now: int
    ) -> tuple[Live, set[TapeValue]] | None:
        """Return shared values: those from earlier ends, and those for later ends.

        None if some of them are not kept for autograd.

        Args:
            parts: The parts of the region's program.
            now: The bits of the ends that were run, and of the current one.
        """
        done = self._ends
        given: Live = {}
        later: set[TapeValue] = set()
        for value, readers in parts.crossing().items():
            mark = parts.marks[value.producer]
            if not mark & now:
                continue
            for reader in readers:
                if not reader & now:
                    if value.demand <= 0:
                        return None
                    later.add(value)
                elif mark & done and not reader & done:
                    if value not in self.pending or not self._has(value):
                        return None
                    given[value] = self.live[value]
        return given, later

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been recomputed yet."""
        return not self._served and not self._run

    def give(self, saved: Saved, task: int) -> Tensor | None:
        """Return a recomputed tensor, or None if it is missing.

        The first time in a backward, this counts as one of the value's uses. Inlined
        for the common case, because autograd unpacks every saved tensor here.

        Raises:
            ChangedTensorError: An earlier backward function wrote to the tensor that it
                got of this value.
        """
        value, layout = saved.value, saved.layout
        live = self.live
        # Removed at once: this is nearly always its last use.
        whole = live.pop(value, None)
        if whole is None:
            return None
        viewed = None
        if layout is not None:
            viewed = live.get(layout)
            if viewed is None:
                viewed = layout.view(whole)
        if self._given and value in self._given:
            self._check(value)
        if saved.task != task:
            saved.task = task
            left = self.pending.pop(value, 0)
            if left > 1:
                self.pending[value] = left - 1
            elif (
                left == 1
                and value not in self._kept
                and (self._uses is None or not self._is_awaited(value))
            ):
                # No other value needs this one: `_drop`, inlined.
                if self._given:
                    self._given.pop(value, None)
                if value.layouts:
                    for other in value.layouts.values():
                        live.pop(other, None)
                return whole if viewed is None else viewed
        # It stays. Only the last view is checked, so that many take linear time.
        live[value] = whole
        self._given[value] = whole, viewed, _versions(whole, viewed)
        return whole if viewed is None else viewed

    def _is_awaited(self, value: TapeValue) -> bool:
        """Keep a value, and return True, if a value that may be requested needs it."""
        assert self._uses is not None, "only called when there is something to search"
        found = next(iter(self._uses.awaited(value, self, ())), None)
        self._share(value, found)
        return found is not None

    def _check(self, value: TapeValue) -> None:
        """Raise if a backward function wrote to the tensor that it got of a value."""
        whole, viewed, versions = self._given[value]
        now = _versions(whole, viewed)
        if now != versions:
            if viewed is None or now[0] != versions[0]:
                raise written_in_backward(whole)
            raise written_in_backward(viewed)

    def release(self, value: TapeValue) -> None:
        """Decrement a value's outstanding uses. No search: finalizers call it."""
        left = self.pending.get(value, 0) - 1
        if left > 0:
            self.pending[value] = left
        elif left == 0:
            self.pending.pop(value, None)
            if self._uses is None and value not in self._kept:
                self._drop(value)

    def _drop(self, value: TapeValue) -> None:
        self._given.pop(value, None)
        free(value, self.live)

    def _has(self, value: TapeValue) -> bool:
        """Return whether a value is available to compute others from."""
        if value in self._given:
            if value in self.pending:
                self._check(value)
            else:
                whole, viewed, versions = self._given[value]
                if _versions(whole, viewed) != versions:
                    self._drop(value)  # its last reader wrote to it
        return value in self.live

    def plan(
        self,
        operations: Sequence[TapeOperation],
        value: TapeValue,
        uses: Uses,
    ) -> tuple[Program, Live]:
        """Return a program that recomputes a value, and the tensors to start from."""
        run: dict[int, list[TapeValue]] = {}
        if self._kept and self._uses is None:
            self._stop_crossing(uses)
        touched = self._ancestors(operations, [value], run, uses)
        if len(self._run) + len(run) < len(operations):
            self._uses = uses
            touched.update(self._settle(operations, touched, run, uses))
        if len(self._run) + len(run) >= len(operations):
            self._uses = None
            touched.update(dict.fromkeys(self._kept))
            self._kept.clear()
        self._run.update(run)
        kept = self._awaited(touched)
        kept |= self._kept
        wanted = [each for each in touched if each in kept]
        given: Live = {}
        for each in touched:
            tensor = self.live.get(each)
            if tensor is not None and (each.hold is None or not self._lasting):
                given[each] = tensor
                if each not in kept:
                    self._drop(each)  # the program is its last use
        return Program(operations, wanted, dict(sorted(run.items())), given), given

    def _stop_crossing(self, uses: Uses) -> None:
        """Keep shared values that autograd has used only if later values need them."""
        crossing, self._kept = self._kept, set()
        for value in crossing:
            if value in self.pending or value not in self.live:
                continue
            found = next(iter(uses.awaited(value, self, ())), None)
            if found is None:
                self._drop(value)
            else:
                self._share(value, found)

    def take(self, wanted: Iterable[TapeValue], live: Live) -> None:
        """Add recomputed values with their tensors."""
        pending, served = self.pending, self._served
        if not served and not self._later and not self._lasting:
            # The common case: everything at once.
            pending.update([(v, v.demand) for v in wanted if v.demand > 0])
            served.update(pending)
            self.live = live if not self.live else {**self.live, **live}
            return
        for value in wanted:
            if self._lasting and value.hold is not None:
                # It may change between two backwards: each fetches it again.
                free(value, live)
            elif value not in served and value.demand > 0:
                served.add(value)
                if not self._lasting:
                    pending[value] = value.demand
                if value in self._later:
                    self._later.discard(value)
                    self._spare_bytes -= value.nbytes
        self.live.update(live)

    def take_part(self, wanted: Iterable[TapeValue], live: Live) -> None:
        """Add the wanted values of a part of the region.

        Args:
            wanted: The values.
            live: The result of running the part. May also contain held values whose
                last use is in another part.
        """
        for value in tuple(live):
            if type(value) is TapeValue and value.hold is not None:
                free(value, live)
        if self._later or self._lasting:
            self.take(wanted, live)
            return
        pending = self.pending
        for value in wanted:
            pending[value] = value.demand
        self._served.update(wanted)
        self.live.update(live)

    def _awaited(self, values: Iterable[TapeValue]) -> set[TapeValue]:
        """Return the values that autograd may request and that are not on a device."""
        found: set[TapeValue] = set()
        for value in values:
            if self._lasting and value.hold is not None:
                continue  # it is fetched for each backward
            if value in self._served:
                if self._lasting or value in self.pending:
                    found.add(value)
            # `is_wanted`, inlined for the common case.
            elif value.demand > 0 and (value.hold is None or is_wanted(value)):
                found.add(value)
        return found

    def _ancestors(
        self,
        operations: Sequence[TapeOperation],
        values: Iterable[TapeValue],
        run: dict[int, list[TapeValue]],
        uses: Uses,
    ) -> dict[TapeValue, None]:
        """Add the operations that values need to `run`; return the touched values."""
        touched = dict.fromkeys(values)
        stack = list(touched)
        while stack:
            value = stack.pop()
            if value.hold is not None or value.producer in run:
                continue
            if value in self.live and self._has(value):
                continue
            reads = run[value.producer] = uses.reads[value.producer]
            touched.update(dict.fromkeys(reads))
            operation = operations[value.producer]
            touched.update(dict.fromkeys(operation.outputs))
            for _, after in operation.writes:
                touched[after] = None
            stack.extend(reads)
        return touched

    def _settle(
        self,
        operations: Sequence[TapeOperation],
        touched: Iterable[TapeValue],
        run: dict[int, list[TapeValue]],
        uses: Uses,
    ) -> dict[TapeValue, None]:
        """Decide which values to keep for values that are recomputed later.

        Keeping them must not take more bytes than the later values would. Otherwise the
        later values are recomputed now, and the values that this touches are returned.
        """
        more: dict[TapeValue, None] = {}
        new = list(touched)
        while new:
            awaited = self._awaited(new)
            for value in new:
                # An external value may change between two backwards: a lasting cache
                # fetches it again.
                is_remade = value.hold is None or (
                    value.hold.tensor is None and not self._lasting
                )
                if is_remade and value not in awaited:
                    found = next(iter(uses.awaited(value, self, run)), None)
                    self._share(value, found)
            if self._spare_bytes >= 0:
                break
            for value in tuple(self._kept):
                for found in uses.awaited(value, self, run):
                    self._share(value, found)
            if self._spare_bytes >= 0:
                break
            new = list(self._ancestors(operations, self._later, run, uses))
            more.update(dict.fromkeys(new))
            new = [*new, *self._kept]
        return more

    def _share(self, value: TapeValue, later: TapeValue | None) -> None:
        """Keep a value for one that may be requested later; None: stop keeping it."""
        if later is None and value in self._kept:
            self._kept.discard(value)
            self._spare_bytes += value.nbytes
        elif later is not None:
            if value not in self._kept:
                self._kept.add(value)
                self._spare_bytes -= value.nbytes
            if later not in self._later:
                self._later.add(later)
                self._spare_bytes += later.nbytes


def _versions(whole: Tensor, viewed: Tensor | None) -> tuple[int, int]:
    try:
        version = version_counter(whole)
        return version, version if viewed is None else version_counter(viewed)
    except RuntimeError:  # recomputed in inference mode
        return version_of(whole), NO_VERSION if viewed is None else version_of(viewed)


def _made_by(operation: TapeOperation) -> list[TapeValue]:
    if not operation.writes:
        return operation.outputs
    return [*operation.outputs, *(after for _, after in operation.writes)]


def is_wanted(value: TapeValue) -> bool:
    """Return whether autograd may request a value that is not on its device."""
    return value.demand > 0 and (value.hold is None or not value.hold.is_at_hand)


def wanted_of(saved: Iterable[TapeValue]) -> list[TapeValue]:
    """Return the saved values that a replay must compute."""
    return [
        value
        for value in saved
        if value.demand > 0 and (value.hold is None or is_wanted(value))
    ]
