"""ReplayCache: the values that a backward has recomputed in a region.

A backward through one of several outputs needs a part of what autograd saved. Autograd
does not say which part, so a recall grows: each value that is asked for is recomputed
with its ancestors, and with nothing else. What these give on the way stays while
autograd, or a value that may still be asked for, needs it. So no operation runs twice.
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
        recall: What the last backward through it has recomputed.
    """

    recall: "ReplayCache | None"


class Saved:
    """Stands for one tensor that autograd saved in a region and that can be remade.

    It dies when autograd frees the saved tensor: then there is one demand less for its
    value.

    Attributes:
        task: The last backward in which it was asked for.
    """

    __slots__ = ("__weakref__", "layout", "region", "task", "value")

    def __init__(
        self, region: Recalling, value: TapeValue, layout: Layout | None
    ) -> None:
        self.value = value
        self.layout = layout
        self.task = -1
        self.region = region  # last: without it there is nothing to release

    def __del__(self) -> None:
        try:
            recall = self.region.recall
        except AttributeError:  # an interrupt came before it was whole
            return
        value = self.value
        value.demand -= 1
        hold = value.hold
        if hold is not None and hold.stored is not None:
            hold.stored.release(self)
        if recall is not None and self.task != recall.task and value in recall.pending:
            recall.release(value)


Given = tuple[Tensor, Tensor | None, tuple[int, int]]
"""A recomputed value, the view of it that was given, if it was one, and the versions
that they had then: a view that a replay made has a counter of its own."""


class Uses:
    """Knows which operations of a region read a value.

    It forgets operations that can lead to nothing any more, because autograd has freed
    everything computed from them. So many backwards take no longer than one.
    Backwards on several threads may share it: it only forgets.

    Args:
        operations: What the region ran; there is no more to come.
        reads: What each operation reads, if that is known.

    Attributes:
        reads: What each operation reads.
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
        """Yield values that autograd may ask for later and that need this one.

        Args:
            value: Where to start.
            recall: What was recomputed so far.
            run: The places of the operations that are about to be run.
        """
        trail: list[tuple[TapeValue, int]] = []
        seen: set[int] = set()
        stack = [value]
        try:
            while stack:
                start = stack.pop()
                # A copy: a collection of garbage may come to forget some as well.
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
            # The last found first: what depends on others is forgotten before them.
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

    Counts are taken without a lock: two threads of one backward may lose one, and then
    a value is freed at the end of the backward instead, or recomputed once more.

    Args:
        task: The backward that it serves.
        lasting: Keep what autograd saved for other backwards, too.

    Attributes:
        live: The values, and views of them.
        pending: How many uses of each are to come.
    """

    def __init__(self, task: int, *, lasting: bool) -> None:
        self.live: Live = {}
        self.task = task
        self._lasting = lasting
        self.pending: dict[TapeValue, int] = {}
        # What backward functions were given of values that are needed again.
        self._given: dict[TapeValue, Given] = {}
        self._served: set[TapeValue] = set()
        self._run: set[int] = set()
        self._uses: Uses | None = None
        # Kept after their last use, for values that may be asked for later, and some of
        # those values.
        self._kept: set[TapeValue] = set()
        self._later: set[TapeValue] = set()
        self._spare_bytes = 0
        # The ends that were run with what they share with others. While there are any
        # and no search has run, later ends need the kept values.
        self._ends = 0

    def serves(self, task: int) -> bool:
        """Return whether the backward of this number may use it."""
        return self._lasting or self.task == task

    def has_served(self, value: TapeValue) -> bool:
        """Return whether the value was recomputed, even if it was freed since."""
        return value in self._served

    def has_run(self, place: int) -> bool:
        """Return whether the operation at a place was run."""
        return place in self._run

    def is_outstanding(self, value: TapeValue) -> bool:
        """Return whether autograd may ask for a value that was not recomputed yet."""
        return value not in self._served and is_wanted(value)

    def begin(self, places: Collection[int]) -> bool:
        """Note that operations are about to run, unless one of them was run."""
        if not self._run.isdisjoint(places):
            return False
        self._run.update(places)
        return True

    def begin_shared(self, parts: ProgramParts, place: int) -> tuple[Part, Live] | None:
        """Note that what an end needs is about to run, except for what was run.

        Only where all that ends to come need of it is kept for autograd anyway: else
        `plan` weighs what that costs.

        Returns:
            What is to be run, and the tensors to start from. None: it takes a search.
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
        """Return values made for other ends: those needed now, and those needed later.

        None: some of it is not kept for autograd.

        Args:
            parts: The parts of the region's program.
            now: The bits of the ends that were run, and of the one that is to be.
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
        """Whether nothing was recomputed so far."""
        return not self._served and not self._run

    def give(self, saved: Saved, task: int) -> Tensor | None:
        """Return a recomputed tensor, or None if it is not there.

        The first time in a backward that is one of the uses that free the value.
        Written out for the common case: autograd asks for every saved tensor here.

        Raises:
            ChangedTensorError: A backward function wrote to the tensor that it got, and
                this is another one that needs the value.
        """
        value, layout = saved.value, saved.layout
        live = self.live
        # Taken out at once: nearly always this is its last use.
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
                # No other value needs this one; as `_drop` does.
                if self._given:
                    self._given.pop(value, None)
                if value.layouts:
                    for other in value.layouts.values():
                        live.pop(other, None)
                return whole if viewed is None else viewed
        # It stays. Only the last view is looked at, so that many take no more than
        # linear time.
        live[value] = whole
        self._given[value] = whole, viewed, _versions(whole, viewed)
        return whole if viewed is None else viewed

    def _is_awaited(self, value: TapeValue) -> bool:
        """Keep a value if another one needs it that autograd may ask for later."""
        assert self._uses is not None, "only called when there is something to search"
        found = next(iter(self._uses.awaited(value, self, ())), None)
        self._share(value, found)
        return found is not None

    def _check(self, value: TapeValue) -> None:
        """Raise if a backward function wrote to what it was given of a value."""
        whole, viewed, versions = self._given[value]
        now = _versions(whole, viewed)
        if now != versions:
            if viewed is None or now[0] != versions[0]:
                raise written_in_backward(whole)
            raise written_in_backward(viewed)

    def release(self, value: TapeValue) -> None:
        """Count one use less to come. Finalizers call it, so it searches nothing."""
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
        """Return whether a value is there to compute others from."""
        if value in self._given:
            if value in self.pending:
                self._check(value)
            else:
                whole, viewed, versions = self._given[value]
                if _versions(whole, viewed) != versions:
                    self._drop(value)  # the last function that needed it wrote to it
        return value in self.live

    def plan(
        self,
        operations: Sequence[TapeOperation],
        value: TapeValue,
        uses: Uses,
    ) -> tuple[Program, Live]:
        """Return what recomputes a value, and the tensors to start from."""
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
                    self._drop(each)  # the program uses it for the last time
        return Program(operations, wanted, dict(sorted(run.items())), given), given

    def _stop_crossing(self, uses: Uses) -> None:
        """Keep what ends shared for later values, if autograd has used it."""
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
        """Take values that were recomputed, with their tensors."""
        pending, served = self.pending, self._served
        if not served and not self._later and not self._lasting:
            # All at once, as nearly always.
            pending.update([(v, v.demand) for v in wanted if v.demand > 0])
            served.update(pending)
            self.live = live if not self.live else {**self.live, **live}
            return
        for value in wanted:
            if value not in served and value.demand > 0:
                served.add(value)
                if not self._lasting:
                    pending[value] = value.demand
                if value in self._later:
                    self._later.discard(value)
                    self._spare_bytes -= value.nbytes
        self.live.update(live)

    def take_part(
        self, wanted: Iterable[TapeValue], live: Live, roots: Iterable[TapeValue]
    ) -> None:
        """Take all that is wanted of a part of the region, and nothing else of it.

        Args:
            wanted: The values.
            live: What running the part has returned. Held values that it has used may
                be there too, if the last use of all is in another part.
            roots: The held values that the region uses.
        """
        for value in live.keys() & roots:
            assert type(value) is TapeValue, "roots are values"
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
        """Return the values that autograd may ask for and that are not at hand."""
        found: set[TapeValue] = set()
        for value in values:
            if value in self._served:
                if self._lasting or value in self.pending:
                    found.add(value)
            # `is_wanted`, written out for the common case.
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
        """Add the operations that values need by place; return what these touch."""
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

        To keep it must not cost more than these values would. Else they are recomputed
        now, and what that touches is returned.
        """
        more: dict[TapeValue, None] = {}
        new = list(touched)
        while new:
            awaited = self._awaited(new)
            for value in new:
                # A value from outside may be written to between two backwards: a cache
                # for several asks for it again.
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
        """Keep a value for one that may be asked for later, or for none."""
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
    """Return whether autograd may ask for a value that is not at hand."""
    return value.demand > 0 and (value.hold is None or not value.hold.is_at_hand)


def wanted_of(saved: Iterable[TapeValue]) -> list[TapeValue]:
    """Return those of the saved values that a replay is to give."""
    return [
        value
        for value in saved
        if value.demand > 0 and (value.hold is None or is_wanted(value))
    ]
