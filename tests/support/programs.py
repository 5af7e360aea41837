"""Random straight-line programs: drawn as data, run plainly or inside regions.

A program is a list of instructions on a growing list of tensors. An instruction names
its tensors by numbers that are taken modulo the length of the list, and operands whose
shapes do not fit are reduced, so that nearly every list of instructions is a program.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import Phase
from hypothesis import strategies as st
from torch import Tensor

from recoup import KeepCostly, KeepSmall, UsageError, keep, recompute, unmark_checkpoint
from tests.support.instructions import COMPUTE, RANDOM, VIEWS, WRITES
from tests.support.twin import Region, Step, plain

Call = Callable[[Callable[[], None]], Any]
STRETCH = 5


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a program: what to do, and to which of the tensors so far."""

    name: str
    first: int
    second: int

    def __repr__(self) -> str:
        return f"{self.name}({self.first}, {self.second})"


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions, and the backwards that follow: which tensors each starts from.

    Attributes:
        lines: What forward does.
        backwards: For each backward the tensors that its loss is made of.
        second_order: Whether a derivative of the gradients is taken too.
    """

    lines: tuple[Instruction, ...]
    backwards: tuple[tuple[int, ...], ...]
    second_order: bool = False


OPTIONS: tuple[dict[str, Any], ...] = (
    {"verify": "off"},
    {"verify": "always"},
    {"verify": "full"},
    {"verify": "always", "cache": True},
    {"verify": "off", "policy": KeepCostly()},
    {"verify": "always", "policy": KeepSmall(32)},
    {"verify": "always", "use_recomputation": False},
)

CONTROL = ("open", "close", "keep", "recompute", "unmark", "delete", "backward", "off")

_WEIGHTED = (
    *(name for name in COMPUTE for _ in range(2)),
    *VIEWS,
    *(name for name in WRITES for _ in range(2)),
    *(name for name in RANDOM for _ in range(2)),
    *(name for name in CONTROL for _ in range(3)),
    *("open" for _ in range(10)),
    *("close" for _ in range(5)),
)

# The phase that explains a failure line by line takes longer than all the others.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

_NUMBERS = st.integers(0, 11)
_LINES = st.builds(Instruction, st.sampled_from(_WEIGHTED), _NUMBERS, _NUMBERS)

programs: st.SearchStrategy[Program] = st.builds(
    Program,
    # Lists are drawn short by default; half of the programs are to be long.
    st.lists(_LINES, min_size=3, max_size=20).map(tuple)
    | st.lists(_LINES, min_size=18, max_size=45).map(tuple),
    st.lists(
        st.lists(_NUMBERS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
    ).map(tuple),
    st.booleans(),
)


@dataclass
class Machine:
    """Runs a program once.

    Attributes:
        region: Makes regions; `plain` for the twin.
        left_out: Lines that are not run.
        call: Runs a stretch of lines, if they are to be run in calls.
        around: Makes what forward runs in.
        written_after_use: A tensor was changed after a region had used it, before the
            backwards, which recoup may refuse.
    """

    program: Program
    region: Region
    left_out: frozenset[int]
    call: Call | None = None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = plain
    written_after_use: bool = False
    refused: set[int] = field(default_factory=set)
    slots: list[Tensor] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    _open: list[contextlib.AbstractContextManager[Any]] = field(default_factory=list)
    _used: dict[int, set[int]] = field(default_factory=dict)
    _storages: list[torch.UntypedStorage] = field(default_factory=list)
    _region_number: int = 0
    _in_call: bool = False

    def run(self) -> dict[str, Any]:
        """Run forward and all backwards; return everything that can be seen."""
        source = torch.Generator().manual_seed(7)
        self.own = torch.Generator().manual_seed(8)
        shapes = [(4, 4), (4,), (2, 4), (4, 4), (4, 4), (4,)]
        given = [torch.randn(s, dtype=torch.float64, generator=source) for s in shapes]
        self.leaves = [tensor.requires_grad_() for tensor in given[:3]]
        self.slots = list(given)
        with self.around():
            if self.call is None:
                self._run_lines(self.program.lines)
            else:
                self._run_in_calls(self.call)
        self._backwards()
        self.seen["leaves"] = [leaf.grad for leaf in self.leaves]
        self.seen["buffers"] = [buffer.detach().clone() for buffer in given[3:]]
        self.seen["slots"] = self.slots
        self.seen["generator"] = self.own.get_state()
        return self.seen

    def _run_lines(self, lines: Sequence[Instruction], start: int = 0) -> None:
        try:
            for position, line in enumerate(lines, start):
                if position not in self.left_out:
                    self._try(position, line)
        finally:
            self._close_all()

    def _run_in_calls(self, call: Call) -> None:
        """Run every second stretch of lines in a call, the others outside."""
        lines = self.program.lines
        for start in range(0, len(lines), STRETCH):
            stretch = lines[start : start + STRETCH]
            run = functools.partial(self._run_lines, stretch, start)
            self._in_call = start % (2 * STRETCH) == 0
            if self._in_call:
                self._region_number += 1
                call(run)
            else:
                run()
        self._in_call = False

    def _close_all(self) -> None:
        """Close what is open, innermost first, even if one of them raises."""
        with contextlib.ExitStack() as stack:
            for scope in self._open:
                stack.push(scope.__exit__)
        self._open.clear()

    def _try(self, position: int, line: Instruction) -> None:
        """Run a line; the twin leaves out what plain PyTorch refuses in forward."""
        try:
            self._execute(position, line)
        except (RuntimeError, IndexError, ValueError):
            if self.region is not plain:
                raise
            self.refused.add(position)

    def _execute(self, position: int, line: Instruction) -> None:
        name = line.name
        if name in CONTROL:
            self._control(position, line)
            return
        a, b = self._slot(line.first), self._slot(line.second)
        self._note_use(a, b)
        if name in WRITES:
            target = self._writable(line.first)
            if target is not None:
                self._note_use(target)
                WRITES[name](target, b)
                self._note_write(target, *([b] if name == "foreach_" else []))
        elif name in VIEWS:
            self.slots.append(VIEWS[name](a, line.second))
        elif name in RANDOM:
            self.slots.append(RANDOM[name](a, self.own))
        else:
            self.slots.append(COMPUTE[name](a, b))

    def _control(self, position: int, line: Instruction) -> None:
        tensor = self._slot(line.first)
        match line.name:
            case "open":
                if not self._open and not self._in_call:
                    self._region_number += 1
                options = OPTIONS[line.second % len(OPTIONS)]
                scope = self.region(f"program {position}", **options)
                scope.__enter__()
                self._open.append(scope)
            case "close" if self._open:
                self._open.pop().__exit__(None, None, None)
            case "delete" if len(self.slots) > 4:
                del self.slots[line.first % len(self.slots)]
            case "backward":
                self._gradients(f"line {position}", [line.first, line.second])
            case "off":
                with torch.no_grad():
                    self.slots.append(tensor * 2)
            case "keep" | "recompute" | "unmark":
                # For the twin too: PyTorch refuses to show some views' graph.
                _ = tensor.grad_fn
                if self.region is not plain:
                    _mark(line.name, tensor)

    def _backwards(self) -> None:
        for number, chosen in enumerate(self.program.backwards):
            self._gradients(f"backward {number}", chosen)
        if self.program.second_order:
            loss = self._loss(self.program.backwards[0])
            first = torch.autograd.grad(
                loss, self.leaves, create_graph=True, allow_unused=True
            )
            squares = [g.square().sum() for g in first if g is not None]
            self.seen["first order"] = first
            if squares and (total := torch.stack(squares).sum()).requires_grad:
                self.seen["second order"] = torch.autograd.grad(
                    total, self.leaves, retain_graph=True, allow_unused=True
                )
        self._loss(self.program.backwards[-1]).backward()

    def _gradients(self, name: str, chosen: Any) -> None:
        self.seen[name] = torch.autograd.grad(
            self._loss(chosen), self.leaves, retain_graph=True, allow_unused=True
        )

    def _loss(self, chosen: Any) -> Tensor:
        total = self.leaves[1].sum()
        for weight, number in enumerate(chosen, start=1):
            total = total + weight * self._slot(number).sum()
        return total

    def _slot(self, number: int) -> Tensor:
        # Counted from the end: low numbers, which shrinking prefers, are recent.
        return self.slots[-1 - number % len(self.slots)]

    def _writable(self, number: int) -> Tensor | None:
        found = [t for t in self.slots if not _is_leaf_memory(t) and not _overlaps(t)]
        return found[-1 - number % len(found)] if found else None

    def _note_use(self, *tensors: Tensor) -> None:
        if self._open or self._in_call:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                self._used.setdefault(storage._cdata, set()).add(self._region_number)
                # Kept, so that no other storage gets the same address.
                self._storages.append(storage)

    def _note_write(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            inside = self._open or self._in_call
            now = {self._region_number} if inside else set[int]()
            if self._used.get(address, set()) - now:
                self.written_after_use = True


def repaired(program: Program, **how: Any) -> tuple[frozenset[int], Machine]:
    """Find which writes plain autograd accepts; leave the others out.

    Args:
        program: The program.
        **how: `call` and `around`, as for a machine.

    Returns:
        The lines to leave out, and the plain machine that ran the rest.
    """
    writes = [i for i, line in enumerate(program.lines) if line.name in WRITES]
    left_out = frozenset(writes)
    machine = _attempt(program, left_out, how)
    assert machine is not None, "a program without writes runs"
    for position in writes:
        attempt = _attempt(program, left_out - {position}, how)
        if attempt is not None:
            machine, left_out = attempt, left_out - {position}
    return left_out | machine.refused, machine


def as_step(
    program: Program,
    left_out: frozenset[int],
    *,
    make_call: Callable[[Region], Call] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = plain,
) -> Step:
    """Return the program as a step for the twin's judge."""

    def step(region: Region) -> dict[str, Any]:
        call = None if make_call is None else make_call(region)
        return Machine(program, region, left_out, call, around).run()

    return step


def run_plainly(stretch: Callable[[], None]) -> None:
    """Run a stretch of lines as the twin of a call does."""
    stretch()


def _attempt(
    program: Program, left_out: frozenset[int], how: dict[str, Any]
) -> Machine | None:
    machine = Machine(program, plain, left_out, **how)
    try:
        machine.run()
    except RuntimeError:
        return None
    return machine


def _is_leaf_memory(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


def _overlaps(tensor: Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _mark(name: str, tensor: Tensor) -> None:
    if name == "keep":
        keep(tensor)
    elif name == "unmark":
        unmark_checkpoint(tensor)
    else:
        with contextlib.suppress(UsageError):
            recompute(tensor)
