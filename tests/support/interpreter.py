"""Runs a plan step by step: allocates, holds, hands over, replays and frees.

It does what the engine does, object by object: `recoup.engine.recording.region`.
With `recoup.core.simulation` it shares nothing but the graph and the segments.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from recoup.core.graph import Graph, Save
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
    """Stands for one value in a region, as long as somebody may ask for it."""

    region: "Region"
    value: int

    def ask(self) -> Block | None:
        """Return where the value is; None if it was there all the time."""
        return self.region.give(self)

    def die(self) -> None:
        self.region.tickets.remove(self)
        self.region.end_if_unused()


@dataclass(eq=False)
class Kept:
    """A tensor from outside that autograd saved in a region, which keeps it."""

    region: "Region"
    ticket: Ticket | None

    def ask(self) -> Block | None:
        return None if self.ticket is None else self.ticket.ask()

    def die(self) -> None:
        self.region.autograd_keeps -= 1
        self.region.end_if_unused()


@dataclass(eq=False)
class Region:
    """One segment as it runs."""

    machine: "Machine"
    segment: Segment
    parent: "Region | None"
    tickets: list[Ticket] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    autograd_keeps: int = 0
    handed_over: list[Ticket] = field(default_factory=list)
    starts: dict[int, Ticket] = field(default_factory=dict)
    program: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    copied: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    live: dict[int, Block | None] | None = None
    pending: Counter[int] = field(default_factory=Counter)

    @property
    def inside(self) -> range:
        return self.machine.graph.operations_between(
            self.segment.start, self.segment.stop
        )

    def makes(self, value: int) -> bool:
        return self.machine.graph.values[value].producer in self.inside

    @property
    def touched(self) -> set[int]:
        """The storages that it holds while it is open: what it reads from outside."""
        graph = self.machine.graph
        return {
            graph.values[value].storage
            for number in self.inside
            if graph.operations[number].replayable
            for value in graph.operations[number].reads
            if not self.records(value)
        }

    def records(self, value: int) -> bool:
        producer = self.machine.graph.values[value].producer
        return self.makes(value) and self.machine.graph.operations[producer].replayable

    def remakes(self, value: int) -> bool:
        return self.records(value) and value not in self.segment.actions

    def save(self, save: Save) -> Ticket | Kept:
        """Take what autograd saves."""
        if self.records(save.value):
            return self.ticket(save.value)
        self.autograd_keeps += 1
        if self.parent is None:
            self.kept.append(save.value)
            return Kept(self, None)
        ticket = self.parent.ticket(save.value)
        self.handed_over.append(ticket)
        return Kept(self, ticket)

    def ticket(self, value: int) -> Ticket:
        found = Ticket(self, value)
        self.tickets.append(found)
        return found

    def close(self) -> None:
        """Plan the replay; hold what it starts from, or hand that over."""
        graph = self.machine.graph
        needed: set[int] = set()
        roots: set[int] = set()
        to_do = [ticket.value for ticket in self.tickets]
        while to_do:
            value = to_do.pop()
            if not self.remakes(value):
                roots.add(value)
            elif graph.values[value].producer not in needed:
                needed.add(graph.values[value].producer)
                to_do += graph.operations[graph.values[value].producer].reads
        self.program = sorted(needed)
        if self.parent is None:
            # What is written over is copied.
            self.copied = [
                v for v in roots if not self.makes(v) and not graph.values[v].holdable
            ]
            self.held = (roots - set(self.copied)) | set(self.kept)
        else:
            self.starts = {value: self.parent.ticket(value) for value in roots}
            self.handed_over += self.starts.values()

    def copy_spoilt(self) -> None:
        for value in self.copied:
            nbytes = self.machine.graph.bytes_of(value)
            self.blocks.append(self.machine.memory.allocate(nbytes).take())

    def give(self, ticket: Ticket) -> Block | None:
        """Return a value, for the first time that a ticket asks for it."""
        if self.parent is None and not self.remakes(ticket.value):
            return None
        if self.live is None:
            self.live = self.replay()
        block = self.live[ticket.value]
        if block is not None:
            block.take()
        self.pending[ticket.value] -= 1
        if not self.pending[ticket.value] and block is not None:
            block.let_go()
        return block

    def replay(self) -> dict[int, Block | None]:
        graph, memory = self.machine.graph, self.machine.memory
        fetched = {value: ticket.ask() for value, ticket in self.starts.items()}
        present = {
            graph.values[value].storage: block
            for value, block in fetched.items()
            if block is not None
        }
        self.pending = Counter(ticket.value for ticket in self.tickets)
        wanted = {graph.values[value].storage for value in self.pending}
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
                for other in map(
                    graph.operations.__getitem__, self.program[place + 1 :]
                )
                for value in (*other.reads, *other.makes)
            }
            for storage in [s for s in present if s not in later | wanted]:
                present.pop(storage).let_go()
        live = {
            value: present.get(graph.values[value].storage) for value in self.pending
        }
        for block in live.values():
            if block is not None:
                block.take()
        for block in present.values():
            block.let_go()
        return live

    def end_if_unused(self) -> None:
        if self.tickets or self.autograd_keeps:
            return
        for block in self.blocks:
            block.let_go()
        for ticket in self.handed_over:
            ticket.die()


class Machine:
    """A device that runs one step of a graph under a plan."""

    def __init__(self, graph: Graph, segments: tuple[Segment, ...]) -> None:
        self.graph = graph
        self.memory = Memory()
        self.seconds = 0.0
        self.regions: list[Region] = []
        self.saved: dict[int, Ticket | Kept] = {}
        for segment in segments:
            self._open(segment, None)

    def _open(self, segment: Segment, parent: Region | None) -> None:
        region = Region(self, segment, parent)
        for inner in segment.inner:
            self._open(inner, region)
        first = self.graph.boundaries[segment.start].saves
        last = self.graph.boundaries[segment.stop].saves
        for number in range(first, last):
            if number not in self.saved:
                self.saved[number] = region.save(self.graph.saves[number])
        region.close()
        self.regions.append(region)

    def run(self) -> list[int]:
        """Return the most bytes in use at each moment."""
        graph = self.graph
        dying: dict[int, list[Callable[[], None]]] = {}
        found: list[int] = []
        for moment in range(graph.moments):
            self.memory.peak = self.memory.used
            for storage, block in enumerate(graph.storages):
                if max(block.born, 0) == moment:
                    self._allocate(storage, dying)
            for region in self.regions:
                if region.inside.start == moment:
                    region.copy_spoilt()
            for number, ticket in self.saved.items():
                save = graph.saves[number]
                if save.used == moment:
                    block = ticket.ask()
                    if block is not None:
                        dying.setdefault(save.replayed_until, []).append(block.let_go)
                    dying.setdefault(save.released, []).append(ticket.die)
            found.append(self.memory.peak + graph.other_bytes[moment])
            for let_go in dying.pop(moment, ()):
                let_go()
        return found

    def _allocate(self, storage: int, dying: dict[int, list]) -> None:
        graph = self.graph
        block = self.memory.allocate(graph.storages[storage].bytes).take()
        dying.setdefault(graph.storages[storage].dies, []).append(block.let_go)
        for number, save in enumerate(graph.saves):
            if number not in self.saved and graph.values[save.value].storage == storage:
                block.take()
                dying.setdefault(save.released, []).append(block.let_go)
        for region in self.regions:
            if storage in region.touched:
                block.take()
                dying.setdefault(region.inside.stop - 1, []).append(block.let_go)
            if any(graph.values[value].storage == storage for value in region.held):
                region.blocks.append(block.take())
