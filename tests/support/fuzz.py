"""A fuzzer: training programs made of a seed, each compared with its plain twin.

A program is data (`tests.support.programs`). It runs plain and with recoup. Everything
that can be observed must be bitwise equal, nothing of recoup may stay behind, and after
an interrupt at any line of recoup both the plain run and the run with recoup must be
what they were. Writes that plain PyTorch refuses are left out; with them the gradients
must be those of what forward computed, or refused as well. A program that fails is
reduced to the lines that are needed to fail.

`python -m tests.support.fuzz --programs 50000` runs many in several processes.
"""

import argparse
import contextlib
import functools
import gc
import os
import random
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _pop_mode

from recoup import CheckpointScope
from recoup.backend.autograd.saved_tensors import has_graph
from recoup.checkpointing import is_recomputing
from recoup.engine.lifetime.values import Hold
from recoup.engine.recording.active import _OPEN, abandon_from, open_regions
from recoup.engine.recording.region import Region as RecordedRegion
from recoup.engine.replay.rerun import Rerun
from recoup.engine.verification.verification_log import LEDGER, Ledger
from recoup.errors import ChangedTensorError
from tests.support.interrupts import Interrupter
from tests.support.programs import (
    ALL_NAMES,
    Instruction,
    Machine,
    Program,
    as_step,
    repaired,
    save_some,
)
from tests.support.refused_writes import examine_refused_writes
from tests.support.shards import Tally, run_in_shards
from tests.support.twin import (
    Observed,
    Region,
    Step,
    Verdict,
    differences,
    last_line,
    leftovers,
    observe,
    plain,
)
from tests.support.wrapping import begin_fake_group

NUMBERS = 11


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and where a second run of it is interrupted.

    Attributes:
        program: The program.
        interrupt: A number from zero to one, which stands for a line of recoup that
            runs in the program; None to interrupt nothing.
    """

    program: Program
    interrupt: float | None = None

    def __str__(self) -> str:
        program = self.program
        lines = [
            f"    {position:2} {line}" for position, line in enumerate(program.lines)
        ]
        head = (
            f"backwards={program.backwards} second_order={program.second_order} "
            f"steps={program.steps} tiers={program.tiers} interrupt={self.interrupt}"
        )
        return "\n".join([head, *lines])


def case_of(seed: int) -> Case:
    """Make the case that a seed stands for."""
    source = random.Random(seed)

    def number() -> int:
        return source.randint(0, NUMBERS)

    def line() -> Instruction:
        return Instruction(source.choice(ALL_NAMES), number(), number())

    count = source.choice((source.randint(3, 15), source.randint(10, 40)))
    program = Program(
        lines=tuple(line() for _ in range(count)),
        backwards=tuple(
            tuple(number() for _ in range(source.randint(1, 3)))
            for _ in range(source.choice((1, 1, 2, 3)))
        ),
        second_order=source.random() < 0.3,
        steps=source.choice((1, 1, 1, 2)),
        tiers=source.random() < 0.5,
    )
    interrupted = source.random() < 0.1
    return Case(program, source.random() if interrupted else None)


class Living:
    """The regions, calls and holds that were made since then and are not gone."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []

    def add(self, made: Any) -> None:
        """Watch another one."""
        self._made.append(weakref.ref(made))

    def count(self) -> Counter[str]:
        """Return how many there are of each kind."""
        found = (each() for each in self._made)
        return Counter(type(each).__name__ for each in found if each is not None)


@contextlib.contextmanager
def watching() -> Iterator[Living]:
    """Watch what recoup makes in the block."""
    living = Living()
    with contextlib.ExitStack() as stack:
        for kind in (RecordedRegion, Rerun, Hold):
            stack.enter_context(_watching(kind, living))
        yield living


@contextlib.contextmanager
def _watching(kind: Any, living: Living) -> Iterator[None]:
    make = kind.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        living.add(self)
        make(self, *args, **kwargs)

    kind.__init__ = watched
    try:
        yield
    finally:
        kind.__init__ = make


def examine(case: Case, region: Region = CheckpointScope) -> Verdict:
    """Compare a program with its plain twin, and look at what is left of it."""
    # What was verified before is verified again: a verdict depends on its case alone.
    LEDGER.__dict__.update(Ledger().__dict__)
    try:
        return _examine(case, region)
    except Exception as error:  # noqa: BLE001
        # A run that was to be interrupted raised something else.
        return Verdict("crashed", last_line(error))
    finally:
        clear()


def _examine(case: Case, region: Region) -> Verdict:
    seen: list[Observed] = []

    def run(machine: Machine) -> None:
        seen.append(observe(lambda _: machine.run(), plain, seed=0))

    try:
        left_out, machine = repaired(case.program, run)
    except AssertionError:
        return Verdict("excluded", "plain run raises without its writes")
    step = as_step(case.program, left_out)
    expected = seen[-1]  # of the machine, which is the last that was not stopped
    may_refuse = machine.written_after_use
    seen.clear()
    del machine
    verdict = _compared(step, region, expected, case.interrupt, may_refuse=may_refuse)
    if verdict.failed:
        return verdict
    LEDGER.__dict__.update(Ledger().__dict__)
    other = examine_refused_writes(case.program, left_out, region)
    if other is None or not other.failed:
        return verdict
    return Verdict(other.kind, f"with writes to saved tensors: {other.detail}")


def _compared(
    step: Step,
    region: Region,
    expected: Observed,
    interrupt: float | None,
    *,
    may_refuse: bool,
) -> Verdict:
    """Compare a step with what its plain run gave, and look at what is left of it."""
    with watching() as living:
        actual = _try_observing(step, region)
        if isinstance(actual, Verdict):
            if actual.kind == "refused" and not may_refuse:
                return Verdict("wrong", f"refused for no reason: {actual.detail}")
            if actual.failed:
                return actual
            verdict = actual
            _end_failed()
        else:
            verdict = Verdict("equal")
            if found := differences(expected, actual):
                return Verdict("wrong", "; ".join(found))
        del actual
        left = _left()
        if alive := _alive(living):
            left += [] if _keeps_itself(step) else [alive]
        if left:
            return Verdict("wrong", "left: " + "; ".join(left))
    if interrupt is not None and verdict.kind == "equal":
        return _interrupt(step, region, expected, interrupt)
    return _following(step, expected, "a following plain step: ") or verdict


def _interrupt(
    step: Step, region: Region, expected: Observed, fraction: float
) -> Verdict:
    counter = Interrupter()
    counter.run(lambda: observe(step, region, seed=0))
    interrupter = Interrupter(int(fraction * counter.count))
    with watching() as living:
        interrupter.run(lambda: observe(step, region, seed=0))
        where = f"after an interrupt at {interrupter.where}, "
        _end_failed()
    left = _left()
    if alive := _alive(living):
        left += [] if _keeps_itself(step) else [alive]
    if left:
        return Verdict("wrong", where + "left: " + "; ".join(left))
    if wrong := _following(step, expected, where + "a plain step: "):
        return wrong
    again = _try_observing(step, region)
    if isinstance(again, Verdict):
        return Verdict("wrong", f"{where}the step: {again.detail}")
    if found := differences(expected, again):
        return Verdict("wrong", f"{where}the step: {'; '.join(found)}")
    return Verdict("equal")


def _end_failed() -> None:
    """Let go of what a step that has failed leaves with PyTorch and Python."""
    # PyTorch keeps the gradients of a failed backward until the next one.
    torch.ones((), requires_grad=True).backward()
    save_some()
    gc.collect()  # errors make cycles without recoup too


def _following(step: Step, expected: Observed, where: str) -> Verdict | None:
    """Run the step without recoup; return what is wrong with it."""
    following = _try_observing(step, plain)
    if isinstance(following, Verdict):
        return Verdict("wrong", where + following.detail)
    found = differences(expected, following)
    return Verdict("wrong", where + "; ".join(found)) if found else None


def _try_observing(step: Step, region: Region) -> Observed | Verdict:
    try:
        return observe(step, region, seed=0)
    except ChangedTensorError as error:
        return Verdict("refused", last_line(error))
    except Exception as error:  # noqa: BLE001
        # Whatever it is: that is the finding.
        return Verdict("crashed", last_line(error))


def _left() -> list[str]:
    found = list(leftovers())
    if regions := open_regions():
        found.append(f"{len(regions)} open regions")
    if is_recomputing():
        found.append("a replay seems to run")
    return found


def _alive(living: Living) -> str:
    """Say what is alive although the program is over; empty if nothing is.

    Without a collection of garbage: a cycle holds memory until one comes, and after it
    a weak reference may be dead whose object was brought back to life.
    """
    count = living.count()
    return f"alive: {dict(count)}" if count else ""


def _keeps_itself(step: Step) -> bool:
    """Return whether the plain program keeps its own graph alive for good.

    Autograd saves the inputs of an operator themselves. If the result is then written
    to one of these, or to what it is a view of, they refer to each other through C++,
    where no collector looks, until a backward comes that frees what was saved.
    """
    gc.collect()
    before = {id(each): each for each in _graph_tensors()}
    _try_observing(step, plain)
    gc.collect()
    return any(id(each) not in before for each in _graph_tensors())


def _graph_tensors() -> Iterator[Tensor]:
    """Return all tensors there are that operators have computed."""
    for each in gc.get_objects():
        # By its type: some objects warn when they are asked for their class.
        if issubclass(type(each), Tensor) and has_graph(each):
            yield each


def clear() -> None:
    """Take back what a failed program left, so that the next one begins anew."""
    stack = _OPEN.stack
    while stack:
        abandon_from(stack[0][0], 0)
    while _len_torch_dispatch_stack():
        _pop_mode()
    while (hooks := _hooks())._top_saved_tensors_default_hooks(True) is not None:
        hooks._pop_saved_tensors_default_hooks()
    torch.set_grad_enabled(True)


def _hooks() -> Any:
    internals: Any = torch._C
    return internals._autograd


def reduced(case: Case, fails: Callable[[Case], bool], *, most: int = 400) -> Case:
    """Return a case that still fails, with as few lines as can be found."""
    size = max(1, len(case.program.lines) // 2)
    for attempt in _simpler(case):
        case = attempt if fails(attempt) else case
    while size and most > 0:
        position = 0
        while position < len(case.program.lines) and most > 0:
            lines = case.program.lines
            lines = lines[:position] + lines[position + size :]
            attempt = replace(case, program=replace(case.program, lines=lines))
            most -= 1
            if fails(attempt):
                case = attempt
            else:
                position += size
        size //= 2
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Return cases with one thing less; only the first that fails may be used."""
    for change in (
        {"second_order": False},
        {"steps": 1},
        {"tiers": False},
        {"backwards": case.program.backwards[-1:]},
    ):
        yield replace(case, program=replace(case.program, **change))


def run_seeds(
    seeds: Iterable[int],
    region: Region = CheckpointScope,
    *,
    report: Callable[[str], None] = lambda _: None,
    most: int = 400,
    tally: Tally | None = None,
) -> Tally:
    """Examine the programs of seeds; describe those that fail.

    Args:
        seeds: The seeds.
        region: Makes the regions of the programs.
        report: Called with each failure as it is found.
        most: How many times a program that fails is run to reduce it.
        tally: What came of others, to be added to.
    """
    tally = Tally() if tally is None else tally
    with _small_heap():
        for seed in seeds:
            tally.kinds[_judge(seed, region, tally, report, most)] += 1
    return tally


def _judge(
    seed: int,
    region: Region,
    tally: Tally,
    report: Callable[[str], None],
    most: int,
) -> str:
    case = case_of(seed)
    verdict = examine(case, region)
    if verdict.failed:
        smaller = reduced(case, lambda other: examine(other, region).failed, most=most)
        detail = examine(smaller, region).detail
        text = f"seed {seed}: {verdict.detail}\nreduced: {detail}\n{smaller}"
        tally.failures[seed] = text
        report(text)
    return verdict.kind


@contextlib.contextmanager
def _small_heap() -> Iterator[None]:
    """Keep the collector away from what is there: it takes longer than a program."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _work(region: Region, seeds: Iterator[int], tally: Tally) -> None:
    # Python says of an interrupt in a destructor that it is ignored, and that is all.
    sys.unraisablehook = lambda _: None
    torch.set_num_threads(1)
    gc.disable()  # as in tests: what only the collector would free is a leak
    begin_fake_group()
    run_seeds(seeds, region, tally=tally)


_HANG_SECONDS = 600
"""So long a program may take, with its reduction."""


def run_in_processes(
    seeds: range,
    processes: int,
    *,
    seconds: float,
    region: Region = CheckpointScope,
    report: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Run the programs of seeds in several processes; return what came of all.

    Args:
        seeds: The seeds.
        processes: How many run at a time.
        seconds: No program begins later than that.
        region: Makes the regions of the programs.
        report: Called with each failure as it is found, and each minute with a tally.
    """
    work = functools.partial(_work, region)
    return run_in_shards(
        work, seeds, processes, seconds=seconds, hang=_HANG_SECONDS, report=report
    )


def main() -> None:
    """Run programs as the command line asks; fail if one of them does."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="the first; at random if not given")
    parser.add_argument("--limit", type=float, default=3600, help="in seconds")
    options = parser.parse_args()
    first = options.seed
    if first is None:
        first = random.SystemRandom().randrange(10**9)
    seeds = range(first, first + options.programs)
    start = time.time()

    def report(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    tally = run_in_processes(
        seeds, options.processes, seconds=options.limit, report=report
    )
    done = tally.kinds.total()
    report(f"seeds {first} to {seeds[-1]}, {time.time() - start:.0f} s, {tally}")
    if done < len(seeds):
        report(f"{len(seeds) - done} not begun in {options.limit:.0f} s")
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    # By its name: what the processes send is of the classes there.
    from tests.support.fuzz import main as run

    run()
