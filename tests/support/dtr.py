"""Operator traces published with Dynamic Tensor Rematerialization, as graphs.

The liveness model:

- Operators keep their order. Forward ends at the `BACKWARD` mark.
- `CONSTANT`s (parameters, inputs) are in use throughout.
- A view is not a value: its operator takes no time to run again, and it is its base.
- A write in place makes a new value of the same storage; the one before cannot be held.
- What forward makes is in use until its last forward reader; what backward reads of it
  is a saved tensor, from the place where its reference was taken, needed from the first
  to the last backward operator that reads it.
- What backward makes is in use until its last reference and its last use are gone. No
  plan changes it.
"""

import gzip
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from recoup.core.graph import BEFORE, Boundary, Graph, Operation, Save, Storage, Value

_ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("RECOUP_DTR", _ROOT.parent / "shared" / "data" / "dtr"))


def has_traces() -> bool:
    """Return whether the traces are where they are looked for."""
    return (FOLDER / "unet.log.gz").exists()


def read_trace(name: str) -> Graph:
    """Return the graph of a trace, with a boundary after every forward operator."""
    with gzip.open(FOLDER / f"{name}.log.gz", "rt") as lines:
        entries = [json.loads(line) for line in lines]
    reader = _Reader()
    for entry in entries:
        if entry["INSTRUCTION"] == "MEMORY":
            reader.sizes[entry["NAME"]] = int(entry["MEMORY"])
        elif entry["INSTRUCTION"] == "ALIAS":
            reader.bases[entry["NAME"]] = int(entry["ALIAS"])
    for entry in entries:
        getattr(reader, entry["INSTRUCTION"].lower())(entry)
    return reader.graph()


@dataclass
class _Block:
    """One storage of the trace: `version` is the value in it that forward made."""

    nbytes: int
    born: int
    last_use: int
    references: int = 0
    freed: int | None = None
    version: int = -1


@dataclass
class _Reader:
    sizes: dict[str, int] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)
    half: int | None = None
    moment: int = 0
    blocks: list[_Block] = field(default_factory=list)
    block_of: dict[str, int] = field(default_factory=dict)
    taken_at: dict[str, int] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    saves: dict[tuple[int, int], Save] = field(default_factory=dict)
    nanoseconds: int = 0

    def annotate(self, entry: dict) -> None:
        if entry["ANNOTATION"] == "BACKWARD":
            self.half = self.moment

    def memory(self, entry: dict) -> None:
        """Known beforehand."""

    def alias(self, entry: dict) -> None:
        """Known beforehand."""

    def constant(self, entry: dict) -> None:
        self._bind(entry["NAME"], self._new(entry["NAME"], born=BEFORE))

    def copy(self, entry: dict) -> None:
        self._bind(entry["DST"], self.block_of[entry["SRC"]])
        if self.half is not None:
            self.taken_at[entry["DST"]] = self.taken_at[entry["SRC"]]

    def release(self, entry: dict) -> None:
        block = self.blocks[self.block_of[entry["NAME"]]]
        block.references -= 1
        if not block.references:
            block.freed = self.moment - 1

    def call(self, entry: dict) -> None:
        self.nanoseconds += int(entry["TIME"])
        views = [name for name in entry["RESULT"] if self.bases.get(name, -1) >= 0]
        for name in views:
            base = entry["ARGS"][self.bases[name]]
            self._bind(name, self.block_of[base])
            if self.half is not None:
                self.taken_at[name] = self.taken_at[base]
        made = [name for name in entry["RESULT"] if name not in views]
        if not made:
            return
        reads = self._read(entry["ARGS"])
        blocks = [self._new(name, born=self.moment) for name in made]
        for name, block in zip(made, blocks, strict=True):
            self._bind(name, block)
        self._ran(entry, reads, blocks)

    def mutate(self, entry: dict) -> None:
        self.nanoseconds += int(entry["TIME"])
        reads = self._read(entry["ARGS"])
        written = [self.block_of[entry["ARGS"][place]] for place in entry["MUTATE"]]
        self._ran(entry, reads, [b for b in written if self.blocks[b].born != BEFORE])

    def _new(self, name: str, *, born: int) -> int:
        self.blocks.append(_Block(self.sizes[name], born, born))
        return len(self.blocks) - 1

    def _bind(self, name: str, block: int) -> None:
        self.block_of[name] = block
        self.taken_at[name] = self.moment
        self.blocks[block].references += 1
        self.blocks[block].freed = None

    def _read(self, names: list[str]) -> tuple[int, ...]:
        """Note who reads what; return the values of forward that are read."""
        found = []
        for name in names:
            block = self.blocks[self.block_of[name]]
            if block.version >= 0:
                found.append(block.version)
            if self.half is None or block.version < 0:
                block.last_use = self.moment
                continue
            key = (block.version, self.taken_at[name])
            known = self.saves.get(key, Save(block.version, self.moment, self.moment))
            self.saves[key] = Save(block.version, known.used, self.moment)
        return tuple(dict.fromkeys(found))

    def _ran(self, entry: dict, reads: tuple[int, ...], blocks: list[int]) -> None:
        if self.half is None:
            makes = tuple(self._value(block) for block in dict.fromkeys(blocks))
            seconds = int(entry["TIME"]) / 1e9
            self.operations.append(Operation(entry["NAME"], seconds, reads, makes))
        self.moment += 1

    def _value(self, number: int) -> int:
        block = self.blocks[number]
        if block.version >= 0:
            before = self.values[block.version]
            self.values[block.version] = Value(number, before.producer, holdable=False)
        self.values.append(Value(number, self.moment))
        block.version = len(self.values) - 1
        return block.version

    def graph(self) -> Graph:
        assert self.half is not None, "a trace marks where backward begins"
        storages, other = [], [0] * (self.moment + 1)
        for block in self.blocks:
            of_forward = block.version >= 0
            storages.append(
                Storage(block.nbytes if of_forward else 0, block.born, block.last_use)
            )
            if not of_forward:
                freed = self.moment if block.freed is None else block.freed
                dies = self.moment - 1
                if block.born != BEFORE:
                    dies = min(dies, max(block.last_use, freed, block.born))
                other[max(block.born, 0)] += block.nbytes
                other[dies + 1] -= block.nbytes
        total, other_bytes = 0, []
        for change in other[: self.moment]:
            total += change
            other_bytes.append(total)
        order = sorted(self.saves, key=lambda key: key[1])
        counts = [sum(at <= place for _, at in order) for place in range(self.half + 1)]
        return Graph(
            operations=tuple(self.operations),
            backward=self.moment - self.half,
            storages=tuple(storages),
            values=tuple(self.values),
            saves=tuple(self.saves[key] for key in order),
            boundaries=tuple(
                Boundary(place, counts[place], f"at{place}")
                for place in range(self.half + 1)
            ),
            other_bytes=tuple(other_bytes),
            step_seconds=self.nanoseconds / 1e9,
        )
