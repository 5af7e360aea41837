"""Random programs: drawn as data, run plainly or inside regions.

A program is a list of instructions on a growing list of tensors. An instruction names
its tensors by numbers that are taken modulo the length of the list, and operands whose
shapes do not fit are reduced, so that nearly every list of instructions is a program.
Some instructions open a block, which the next `close` that is left for it ends.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C import _len_torch_dispatch_stack

from recoup import (
    CheckpointGroup,
    Device,
    Disk,
    Host,
    KeepCostly,
    KeepSmall,
    Packed,
    checkpoint,
    checkpoint_module,
    keep,
    recompute,
    rerun,
    uncheckpoint_module,
)
from recoup.checkpointing import mark_checkpoint, unmark_checkpoint
from recoup.errors import UsageError
from recoup.tiers import Tier
from tests.support.instructions import COMPUTE, RANDOM, VIEWS, WRITES
from tests.support.twin import Region, Step, idle, plain
from tests.support.wrapping import COLLECTIVES, Wrapped, parts_of


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
        steps: How many times all of it is done, with an update of the leaves between.
        tiers: Whether regions may keep tensors in tiers.
    """

    lines: tuple[Instruction, ...]
    backwards: tuple[tuple[int, ...], ...]
    second_order: bool = False
    steps: int = 1
    tiers: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A line at its place in the program, and the lines of the block it opens."""

    position: int
    line: Instruction
    body: list["Node"]


class Raised(Exception):  # noqa: N818 (what user code may raise)
    """An error in the code of a program."""


class Stopped(BaseException):
    """An exception in the code of a program that is no error."""


OPTIONS: tuple[dict[str, Any], ...] = (
    {"verify": "off"},
    {"verify": "always"},
    {"verify": "full"},
    {"verify": "always", "cache": True},
    {"verify": "off", "policy": KeepCostly()},
    {"verify": "always", "policy": KeepSmall(32)},
    {"verify": "always", "use_recomputation": False},
)

_HOST, _DISK = Host(smallest_bytes=0), Disk(smallest_bytes=0)
STORES: tuple[Tier, ...] = (
    Device(),
    _HOST,
    _DISK,
    Packed(smallest_bytes=0),
    Packed(_HOST, smallest_bytes=0),
    Packed(_DISK, smallest_bytes=0),
)
TIERED: tuple[dict[str, Any], ...] = (
    *({"verify": "always", "store": store} for store in STORES),
    *({"verify": "full", "store": store, "policy": KeepCostly()} for store in STORES),
)

BLOCKS = ("open", "function", "group", "module", "rerun", "try")
CONTROL = ("close", "keep", "recompute", "unmark", "delete", "backward", "off")
DEEPER = ("raise", "gradient", "accumulate", "hook", "layer", "mark")
WRAPPING = ("wrap", "wrapped", "wrapped_write", "unwrap")
CHANGES = {*WRITES, "wrapped_write"}

_STRAIGHT = (
    *(name for name in COMPUTE for _ in range(2)),
    *VIEWS,
    *(name for name in WRITES for _ in range(2)),
    *(name for name in RANDOM for _ in range(2)),
    *(name for name in CONTROL for _ in range(3)),
)

WEIGHTED = (
    *_STRAIGHT,
    *("open" for _ in range(9)),
    *("function", "group", "group", "module"),
    *("close" for _ in range(5)),
)

ALL_NAMES = (
    *_STRAIGHT,
    *(name for name in DEEPER for _ in range(3)),
    *(name for name in WRAPPING for _ in range(4)),
    *COLLECTIVES,
    *(name for name in BLOCKS for _ in range(5)),
    *("open" for _ in range(10)),
    *("close" for _ in range(25)),
)

SAVES = 5000
"""More tensors than are saved until the last of nested regions knows it was left."""


class Layer(nn.Module):
    """A layer with parameters, and with buffers that every call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh()


class Stage(nn.Module):
    """A module whose forward is a block of a program."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self._run = run

    def forward(self) -> None:
        self._run()


@dataclass
class Machine:
    """Runs a program once.

    Attributes:
        region: Makes regions; `plain` for the twin.
        left_out: Lines that are not run.
        around: Makes what forward runs in.
        written_after_use: A tensor was changed after a region had used it, before the
            backwards, which recoup may refuse.
    """

    program: Program
    region: Region
    left_out: frozenset[int]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = plain
    written_after_use: bool = False
    refused: set[int] = field(default_factory=set)
    slots: list[Tensor] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    layer: Layer | None = None
    leaves: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    own: torch.Generator = field(default_factory=torch.Generator)
    _given: tuple[Tensor, ...] | None = None
    _wrapped: Wrapped = field(default_factory=Wrapped)
    _depth: int = 0
    _used: dict[int, set[int]] = field(default_factory=dict)
    _storages: list[torch.UntypedStorage] = field(default_factory=list)
    _region_number: int = 0

    def run(self) -> dict[str, Any]:
        """Run forward and all backwards; return everything that can be seen."""
        source = torch.Generator().manual_seed(7)
        self.own = torch.Generator().manual_seed(8)
        shapes = [(4, 4), (4,), (2, 4), (4, 4), (4, 4), (4,)]
        given = [torch.randn(s, dtype=torch.float64, generator=source) for s in shapes]
        self.leaves = [tensor.requires_grad_() for tensor in given[:3]]
        if any(line.name == "layer" for line in self.program.lines):
            self.layer = Layer()
            self.leaves += self.layer.parameters()
        self.buffers = given[3:]
        for step in range(self.program.steps):
            self.slots = list(given)
            self._wrapped.clear()
            self._step(f"step {step}: ")
            if step + 1 < self.program.steps:
                self._update()
        save_some()
        self.seen["leaves"] = [leaf.grad for leaf in self.leaves]
        self.seen["buffers"] = [buffer.detach().clone() for buffer in given[3:]]
        if self.layer is not None:
            self.seen["state"] = dict(self.layer.state_dict())
        self.seen["slots"] = self.slots
        self.seen["wrapped"] = self._wrapped.locals()
        self.seen["generator"] = self.own.get_state()
        return self.seen

    def run_pure(
        self, body: list[Node], given: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Run a block on tensors it does not change; return the tensors it makes."""
        self.slots = list(given)
        self._given = given
        self._run(body)
        known = set(map(id, given))
        return tuple(tensor for tensor in self.slots if id(tensor) not in known)

    def _step(self, name: str) -> None:
        with self.around(), contextlib.suppress(Raised, Stopped):
            self._run(as_tree(self.program.lines))
        self._backwards(name)

    def _update(self) -> None:
        if any(tensor.grad_fn is not None for tensor in self.buffers):
            # The next step reaches the graph of this one through them.
            self._note_write(*self.leaves)
        with torch.no_grad():
            for leaf in self.leaves:
                if leaf.grad is not None:
                    leaf.sub_(leaf.grad, alpha=0.01)
                    leaf.grad.zero_()

    def _run(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.position not in self.left_out:
                self._try(node)

    def _try(self, node: Node) -> None:
        """Run a line; the twin leaves out what plain PyTorch refuses in forward."""
        try:
            if node.line.name in BLOCKS:
                self._block(node)
            else:
                self._execute(node.position, node.line)
        except (RuntimeError, IndexError, ValueError, AssertionError):
            if self.region is not plain:
                raise
            self.refused.add(node.position)

    def _block(self, node: Node) -> None:
        if node.line.name == "try":
            with contextlib.suppress(Raised, Stopped):
                self._run(node.body)
            return
        if not self._depth:
            self._region_number += 1
        self._depth += 1
        try:
            self._in_region(node)
        finally:
            self._depth -= 1

    def _in_region(self, node: Node) -> None:
        name, run = f"program {node.position}", lambda: self._run(node.body)
        choices = (*OPTIONS, *TIERED) if self.program.tiers else OPTIONS
        options = choices[node.line.second % len(choices)]
        is_plain = self.region in (plain, idle)
        match node.line.name:
            case "rerun":
                self._rerun(node, is_plain=is_plain)
            case "function" if not is_plain:
                checkpoint(run)
            case "group" if not is_plain:
                CheckpointGroup(name).checkpoint_fn(None, lambda _: run())
            case "module" if not is_plain:
                options = {k: v for k, v in options.items() if k != "use_recomputation"}
                stage = checkpoint_module(Stage(run), **options)
                stage()
                if node.line.first % 2:
                    uncheckpoint_module(stage)
            case _:
                with self.region(name, **options):
                    run()

    def _rerun(self, node: Node, *, is_plain: bool) -> None:
        """Run a block that is called again in backward, so that it changes nothing."""
        program, region, left_out = self.program, self.region, self.left_out
        layer, machines = self.layer, list[Machine]()

        def pure(*given: Tensor) -> tuple[Tensor, ...]:
            machine = Machine(program, region, left_out, layer=layer)
            if is_plain:
                machines.append(machine)
            return machine.run_pure(node.body, given)

        given = tuple(self.slots)
        # The second call needs its arguments, even if a region around has them.
        self._note_use(*given, number=-1 - node.position)
        try:
            if is_plain:
                with self.region("rerun"):
                    made = pure(*given)
            else:
                made = rerun(pure, *given)
        finally:
            for machine in machines:
                self.refused |= machine.refused
                self.written_after_use |= machine.written_after_use
        self.slots += made

    def _execute(self, position: int, line: Instruction) -> None:
        name = line.name
        a, b = self._slot(line.first), self._slot(line.second)
        if name in CONTROL:
            self._control(position, line)
        elif name in DEEPER:
            self._deeper(line)
        elif name in WRAPPING:
            self._wrapping(line)
        elif name in WRITES:
            self._note_use(a, b)
            target = self._writable(line.first)
            if target is not None and (name != "foreach_" or self._may_write(b)):
                self._note_use(target)
                WRITES[name](target, b)
                self._note_write(target, *([b] if name == "foreach_" else []))
        elif name in VIEWS:
            self._note_use(a)
            self.slots.append(VIEWS[name](a, line.second))
        elif name in RANDOM:
            self._note_use(a)
            # A second call would go on with a generator of its own.
            if self._given is None or not name.startswith("own_"):
                self.slots.append(RANDOM[name](a, self.own))
        elif name in COLLECTIVES:
            self._note_use(a, b)
            if distributed.is_initialized():
                self.slots.append(COLLECTIVES[name](a, b))
        else:
            self._note_use(a, b)
            self.slots.append(COMPUTE[name](a, b))

    def _control(self, position: int, line: Instruction) -> None:
        tensor = self._slot(line.first)
        match line.name:
            case "delete" if len(self.slots) > 4:
                del self.slots[line.first % len(self.slots)]
            case "backward" if self._given is None:
                self._gradients(f"line {position}", [line.first, line.second])
            case "off":
                self._note_use(tensor)
                with torch.no_grad():
                    self.slots.append(tensor * 2)
            case "keep" | "recompute" | "unmark":
                # For the twin too: PyTorch refuses to show some views' graph.
                _ = tensor.grad_fn
                if self.region is not plain:
                    stored = self.program.tiers and line.second % 3 == 0
                    store = STORES[line.second % len(STORES)] if stored else None
                    _mark(line.name, tensor, store)

    def _deeper(self, line: Instruction) -> None:
        tensor = self._slot(line.first)
        match line.name:
            case "raise":
                if line.second % 4 == 0:
                    raise Raised if line.first % 2 else Stopped
            case "mark":
                _ = tensor.grad_fn
                if self.region is not plain:
                    mark_checkpoint(tensor)
            case "layer" if self.layer is not None:
                self._note_use(tensor)
                rows = COMPUTE["product"](tensor, tensor)
                x = rows if rows.shape == (4, 4) else COMPUTE["filled"](rows, tensor)
                self.slots.append(self.layer(x))
            case "hook" if self._given is None and tensor.requires_grad:
                _ = tensor.grad_fn  # raises where registering would crash PyTorch
                tensor.register_hook(lambda gradient: gradient * 1.5)
            case "accumulate" if self._given is None:
                self._note_use(*self.slots)
                self._loss([line.first]).backward(retain_graph=True)
            case "gradient" if self._given is None:
                self._note_use(*self.slots)
                found = torch.autograd.grad(
                    self._loss([line.first]),
                    self.leaves,
                    create_graph=True,
                    allow_unused=True,
                )
                self.slots += [g for g in found[:3] if g is not None]

    def _wrapping(self, line: Instruction) -> None:
        wrapped = self._wrapped
        tensor = self._slot(line.first)
        self._note_use(tensor, *wrapped.operands(line.first, line.second))
        match line.name:
            case "wrap":
                wrapped.wrap(tensor, line.second)
            case "wrapped":
                wrapped.compute(line.first, line.second)
            case "wrapped_write":
                self._note_write(*wrapped.write(line.first, line.second))
            case _:
                self.slots += wrapped.unwrap(line.first)

    def _backwards(self, name: str) -> None:
        for number, chosen in enumerate(self.program.backwards):
            self._gradients(f"{name}backward {number}", chosen)
        if self.program.second_order:
            loss = self._loss(self.program.backwards[0])
            first = torch.autograd.grad(
                loss, self.leaves, create_graph=True, allow_unused=True
            )
            squares = [g.square().sum() for g in first if g is not None]
            self.seen[f"{name}first order"] = first
            if squares and (total := torch.stack(squares).sum()).requires_grad:
                self.seen[f"{name}second order"] = torch.autograd.grad(
                    total, self.leaves, retain_graph=True, allow_unused=True
                )
        loss = self._loss(self.program.backwards[-1])
        loss.backward()
        self.seen[f"{name}loss"] = loss.detach()

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
        found = [tensor for tensor in found if self._may_write(tensor)]
        return found[-1 - number % len(found)] if found else None

    def _may_write(self, tensor: Tensor) -> bool:
        # What a block is given that is called again must be there for the second call.
        given = {t.untyped_storage()._cdata for t in self._given or ()}
        return tensor.untyped_storage()._cdata not in given

    def _note_use(self, *tensors: Tensor, number: int | None = None) -> None:
        if not self._depth:
            return
        for tensor in parts_of(tensors):
            storage = tensor.untyped_storage()
            used = self._used.setdefault(storage._cdata, set())
            used.add(self._region_number if number is None else number)
            # Kept, so that no other storage gets the same address.
            self._storages.append(storage)

    def _note_write(self, *tensors: Tensor) -> None:
        now = {self._region_number} if self._depth else set[int]()
        for tensor in parts_of(tensors):
            address = tensor.untyped_storage()._cdata
            if self._used.get(address, set()) - now:
                self.written_after_use = True


def save_some() -> None:
    """Let autograd save tensors: every few, a region asks whether its call was left.

    torch does not call the hooks of a module after an exception that is no error, so
    that nobody else closes its region, up to the next call of a module with regions.
    """
    x = torch.ones(1, requires_grad=True)
    saves = 0
    while _len_torch_dispatch_stack() and saves < SAVES:
        torch.addcmul(x, x, x)  # saves two
        saves += 2


def as_tree(lines: Sequence[Instruction]) -> list[Node]:
    """Put the lines of every block below the line that opens it."""
    outermost = list[Node]()
    blocks = [outermost]
    for position, line in enumerate(lines):
        if line.name == "close":
            if len(blocks) > 1:
                blocks.pop()
            continue
        node = Node(position, line, [])
        blocks[-1].append(node)
        if line.name in BLOCKS:
            blocks.append(node.body)
    return outermost


def repaired(
    program: Program, run: Callable[[Machine], object] = Machine.run, **how: Any
) -> tuple[frozenset[int], Machine]:
    """Find which lines plain PyTorch accepts, in every step; leave the others out.

    Without a line the lines after it may name other tensors, so that others are
    refused: all that are left were run together, and none was refused.

    Args:
        program: The program.
        run: Runs a machine.
        **how: `around`, as for a machine.

    Returns:
        The lines to leave out, and the plain machine that ran the rest.
    """
    left_out, machine = _accepted(program, frozenset(), run, how)
    while machine.refused:
        left_out, machine = _accepted(program, left_out | machine.refused, run, how)
    return left_out, machine


def _accepted(
    program: Program,
    left_out: frozenset[int],
    run: Callable[[Machine], object],
    how: dict[str, Any],
) -> tuple[frozenset[int], Machine]:
    """Leave out the writes, too, that make the backwards fail."""
    machine = _attempt(program, left_out, run, how)
    if machine is not None:
        return left_out, machine
    lines = enumerate(program.lines)
    changes = {position for position, line in lines if line.name in CHANGES} - left_out
    left_out |= changes
    machine = _attempt(program, left_out, run, how)
    assert machine is not None, "a program without writes runs"
    for position in sorted(changes):
        attempt = _attempt(program, left_out - {position}, run, how)
        if attempt is not None:
            machine, left_out = attempt, left_out - {position}
    return left_out, machine


def as_step(
    program: Program,
    left_out: frozenset[int],
    *,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = plain,
) -> Step:
    """Return the program as a step for the twin's judge."""

    def step(region: Region) -> dict[str, Any]:
        return Machine(program, region, left_out, around).run()

    return step


def _attempt(
    program: Program,
    left_out: frozenset[int],
    run: Callable[[Machine], object],
    how: dict[str, Any],
) -> Machine | None:
    machine = Machine(program, plain, left_out, **how)
    try:
        run(machine)
    except RuntimeError:
        return None
    return machine


def _is_leaf_memory(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


def _overlaps(tensor: Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _mark(name: str, tensor: Tensor, store: Tier | None) -> None:
    if name == "keep":
        keep(tensor, store=store)
    elif name == "unmark":
        unmark_checkpoint(tensor)
    else:
        with contextlib.suppress(UsageError):
            recompute(tensor)
