"""Runs a plan step by step: allocates, holds, hands over, replays and frees.

It shares nothing with `recoup.core.simulation` but the graph and the segments.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from recoup.core.graph import Graph
from recoup.core.segments import Segment


class Memory:
    """Counts the bytes of blocks that somebody refers to."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0

    def allocate(self, nbytes: int) -> "Block":
        self.used += nbytes
        self.note()
        return Block(self, nbytes)

    def note(self, extra: int = 0) -> None:
        self.peak = max(self.peak, self.used + extra)


@dataclass(eq=False)
class Block:
    """A piece of memory that is freed when nobody refers to it."""

    memory: Memory
    nbytes: int
    references: int = 0

    def take(self) -> "Block":
        self.references += 1
        return self

    def let_go(self) -> None:
        self.references -= 1
        if self.references == 0:
            self.memory.used -= self.nbytes


@dataclass(eq=False)
class Ticket:
    """A claim on a value: used from one moment, given back at another.

    One that an inner region replays from, and nobody else needs, is given back by that
    replay: it has no moment of its own.
    """

    value: int
    used: int
    released: int

    @property
    def last(self) -> int:
        return max(self.used, self.released)


NEVER = -1


@dataclass(eq=False)
class Region:
    """One segment as it runs."""

    machine: "Machine"
    segment: Segment
    parent: "Region | None"
    tickets: list[Ticket] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    program: list[int] = field(default_factory=list)
    live: dict[int, Block] = field(default_factory=dict)
    replayed: bool = False
    blocks: list[Block] = field(default_factory=list)
    open_tickets: int = 0
    copied: list[int] = field(default_factory=list)
    starts: list[Ticket] = field(default_factory=list)

    @property
    def inside(self) -> range:
        return self.machine.graph.operations_between(
            self.segment.start, self.segment.stop
        )

    def makes(self, value: int) -> bool:
        return self.machine.graph.values[value].producer in self.inside

    def keeps(self, value: int) -> bool:
        graph = self.machine.graph
        operation = graph.operations[graph.values[value].producer]
        return value in self.segment.actions or not operation.replayable

    def is_spoilt(self, value: int) -> bool:
        """Return whether it comes from outside and is written over: it is copied."""
        return not self.makes(value) and not self.machine.graph.values[value].holdable

    def copy_spoilt(self) -> None:
        graph = self.machine.graph
        for value in self.copied:
            block = self.machine.memory.allocate(graph.bytes_of(value))
            self.blocks.append(block.take())

    def close(self) -> None:
        """Decide what to hold; what a region around takes over, it gets as tickets."""
        graph = self.machine.graph
        needed: set[int] = set()
        roots: list[int] = []

        def need(value: int) -> None:
            if not self.makes(value) or self.keeps(value):
                if value not in roots:
                    roots.append(value)
                return
            producer = graph.values[value].producer
            if producer not in needed:
                needed.add(producer)
                for read in graph.operations[producer].reads:
                    need(read)

        mine = [ticket for ticket in self.tickets if self.makes(ticket.value)]
        others = [ticket for ticket in self.tickets if not self.makes(ticket.value)]
        for ticket in mine:
            need(ticket.value)
        self.program = sorted(needed)
        self.open_tickets = len(self.tickets)
        if self.parent is None:
            spoilt = {v for v in roots if self.is_spoilt(v)}
            self.held = {*roots, *(ticket.value for ticket in others)} - spoilt
            self.held |= {ticket.value for ticket in others}
            self.copied = sorted(spoilt)
            return
        self.parent.tickets += others
        self.tickets = mine
        first = min((ticket.used for ticket in mine), default=0)
        for value in roots:
            last = [t.last for t in mine if t.value == value]
            ticket = Ticket(value, first, max(last, default=NEVER))
            self.parent.tickets.append(ticket)
            if not last:
                self.starts.append(ticket)

    def use(self, ticket: Ticket) -> None:
        if self.replayed or not self.makes(ticket.value):
            return
        # What an inner region keeps is with those around it: asking is a replay.
        if self.parent is None and self.keeps(ticket.value):
            return
        self.replayed = True
        if self.parent is not None:
            # What it starts from is claimed at this moment; make sure it is there.
            for claim in self.parent.tickets:
                if claim.used <= self.machine.moment:
                    self.parent.use(claim)
        wanted = {t.value for t in self.tickets if not self.keeps_or_outside(t.value)}
        self.run(wanted)
        for start in self.starts:
            holder = self.parent
            while holder is not None and start not in holder.tickets:
                holder = holder.parent  # one that did not make it passed it on
            assert holder is not None, "it handed over what it starts from"
            holder.release(start)

    def keeps_or_outside(self, value: int) -> bool:
        return not self.makes(value) or self.keeps(value)

    def run(self, wanted: set[int]) -> None:
        graph, memory = self.machine.graph, self.machine.memory
        present: dict[int, Block] = {}
        for place, number in enumerate(self.program):
            operation = graph.operations[number]
            for value in operation.makes:
                storage = graph.values[value].storage
                if storage not in present:
                    size = graph.storages[storage].bytes
                    present[storage] = memory.allocate(size).take()
            memory.note(operation.workspace_bytes)
            self.machine.seconds += operation.seconds
            later = {
                graph.values[value].storage
                for other in self.program[place + 1 :]
                for value in (
                    *graph.operations[other].reads,
                    *graph.operations[other].makes,
                )
            }
            kept = {graph.values[value].storage for value in wanted}
            for storage in [s for s in present if s not in later | kept]:
                present.pop(storage).let_go()
        for value in wanted:
            self.live[value] = present[graph.values[value].storage].take()
        for block in present.values():
            block.let_go()

    def release(self, ticket: Ticket) -> None:
        self.open_tickets -= 1
        rest = [t for t in self.tickets if t.value == ticket.value and t is not ticket]
        self.tickets.remove(ticket)
        if not rest and ticket.value in self.live:
            self.live.pop(ticket.value).let_go()
        if not self.tickets:
            for block in self.blocks:
                block.let_go()
            self.blocks = []


class Machine:
    """A device that runs one step of a graph under a plan."""

    def __init__(self, graph: Graph, segments: tuple[Segment, ...]) -> None:
        self.graph = graph
        self.memory = Memory()
        self.moment = 0
        self.seconds = 0.0
        self.regions: list[Region] = []
        self.plain: list[Ticket] = []
        covered: set[int] = set()
        for segment in segments:
            self._open(segment, None, covered)
        self.plain = [
            Ticket(save.value, save.used, save.released)
            for number, save in enumerate(graph.saves)
            if number not in covered
        ]

    def _open(self, segment: Segment, parent: Region | None, covered: set[int]) -> None:
        region = Region(self, segment, parent)
        for inner in segment.inner:
            self._open(inner, region, covered)
        first = self.graph.boundaries[segment.start].saves
        last = self.graph.boundaries[segment.stop].saves
        for number in range(first, last):
            if number not in covered:
                save = self.graph.saves[number]
                region.tickets.append(Ticket(save.value, save.used, save.released))
                covered.add(number)
        region.close()
        self.regions.append(region)

    def run(self) -> list[int]:
        """Return the most bytes in use at each moment."""
        graph = self.graph
        dying: dict[int, list[Callable[[], None]]] = {}
        found: list[int] = []
        half = len(graph.operations)
        for self.moment in range(graph.moments):
            self.memory.peak = self.memory.used
            for storage, block in enumerate(graph.storages):
                if max(block.born, 0) == self.moment:
                    self._allocate(storage, dying)
            for region in self.regions:
                if region.inside.start == self.moment:
                    region.copy_spoilt()
            if self.moment >= half:
                self._backward()
            found.append(self.memory.peak + graph.other_bytes[self.moment])
            for let_go in dying.pop(self.moment, ()):
                let_go()
            self._release()
        return found

    def _allocate(self, storage: int, dying: dict[int, list]) -> None:
        graph = self.graph
        block = self.memory.allocate(graph.storages[storage].bytes).take()
        dying.setdefault(graph.storages[storage].dies, []).append(block.let_go)
        for ticket in self.plain:
            if graph.values[ticket.value].storage == storage:
                block.take()
                dying.setdefault(ticket.released, []).append(block.let_go)
        for region in self.regions:
            if any(graph.values[value].storage == storage for value in region.held):
                region.blocks.append(block.take())

    def _backward(self) -> None:
        for region in self.regions:
            for ticket in region.tickets:
                if ticket.used == self.moment:
                    region.use(ticket)

    def _release(self) -> None:
        for region in self.regions:
            for ticket in list(region.tickets):
                if ticket.released == self.moment:
                    region.release(ticket)
