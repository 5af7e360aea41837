"""Does recording cost the host more than in another checkout of recoup?

A process for each checkout runs the same steps, of a GPT whose operators take no time.
They take turns, so that a machine that slows down slows both down.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch

from benchmarks.harness import Row, markdown_table, parsed, publish

ROOT = Path(__file__).parents[2]
CASES = ("plain", "scope", "keep costly", "two outputs, plain", "two outputs")
WARMUP = 8  # the first ones are verified

_REQUESTS = """
#include <valgrind/callgrind.h>
void instrument(void) { CALLGRIND_START_INSTRUMENTATION; }
void start(void) { CALLGRIND_ZERO_STATS; CALLGRIND_TOGGLE_COLLECT; }
int stop(void) { CALLGRIND_TOGGLE_COLLECT; CALLGRIND_DUMP_STATS; return 0; }
"""

Pair = tuple[float, float]
"""What was measured of forward, and of backward."""


class Checkout:
    """A process that runs steps with the recoup of one checkout."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None, "opened with pipes"
        assert process.stdout is not None, "opened with pipes"
        self._commands: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout

    def ask(self, kind: str, case: str) -> Pair:
        self._commands.write(f"{kind} {case}\n")
        self._commands.flush()
        forward, backward = map(float, self._answers.readline().split())
        return forward, backward


@contextmanager
def checkout(
    root: Path, under: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Iterator[Checkout]:
    """Run a process with the sources of a checkout, under a tool if one is given."""
    path = os.pathsep.join([str(root.resolve() / "src"), str(ROOT)])
    names = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        [*under, sys.executable, "-m", "benchmarks.host_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if under else None,
        text=True,
        env={**os.environ, **names, **(variables or {})},
    )
    with process:
        yield Checkout(process)


def times_of(roots: Mapping[str, Path], *, rounds: int) -> Iterator[Row]:
    """Measure the thread time of all cases in turns, and count calls."""
    with ExitStack() as stack:
        workers = {n: stack.enter_context(checkout(r)) for n, r in roots.items()}
        times: dict[tuple[str, str], list[Pair]] = {}
        for turn in range(WARMUP + rounds):
            for case in CASES:
                for name, worker in workers.items():
                    pair = worker.ask("time", case)
                    if turn >= WARMUP:
                        times.setdefault((case, name), []).append(pair)
        for (case, name), pairs in times.items():
            forwards, backwards = zip(*pairs, strict=True)
            calls = workers[name].ask("calls", case)
            yield {
                "case": case,
                "checkout": name,
                "forward us": round(min(forwards)),
                "backward us": round(min(backwards)),
                "forward calls": int(calls[0]),
                "backward calls": int(calls[1]),
            }


def instructions_of(root: Path, folder: Path) -> Iterator[tuple[str, Pair]]:
    """Count thousands of instructions of each case, by callgrind."""
    source, library = folder / "requests.c", folder / "requests.so"
    source.write_text(_REQUESTS)
    command = ["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
    tool += ["--instr-atstart=no", "--collect-atstart=no"]
    with checkout(root, tool, {"CALLGRIND_REQUESTS": str(library)}) as worker:
        for case in CASES:
            for _ in range(WARMUP):
                worker.ask("time", case)
        for case in CASES:
            worker.ask("dump", case)
    found: list[float] = []
    for number in range(1, 2 * len(CASES) + 1):
        text = (folder / f"out.{number}").read_text()
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        assert total is not None, "callgrind writes one of the two"
        found.append(round(int(total[1]) / 1000))
    for place, case in enumerate(CASES):
        yield case, (found[2 * place], found[2 * place + 1])


def with_instructions(rows: Sequence[Row], roots: Mapping[str, Path]) -> list[Row]:
    """Add the instructions of each case to its row."""
    counts: dict[tuple[object, object], Pair] = {}
    for name, root in roots.items():
        with tempfile.TemporaryDirectory() as folder:
            for case, pair in instructions_of(root, Path(folder)):
                counts[case, name] = pair
    return [
        {
            **row,
            "forward k instructions": counts[row["case"], row["checkout"]][0],
            "backward k instructions": counts[row["case"], row["checkout"]][1],
        }
        for row in rows
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="seconds, no meaning")
    parser.add_argument(
        "--against",
        type=Path,
        default=ROOT,
        help="another checkout, as made by `git worktree add ../old 1b39e56`",
    )
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="count them too, with valgrind and a C compiler; takes minutes",
    )
    options = parsed(parser, arguments)
    if options.instructions and shutil.which("valgrind") is None:
        parser.error("--instructions needs valgrind")
    roots = {"other": options.against, "this": ROOT}
    rounds = 2 if options.small else options.rounds
    rows = list(times_of(roots, rounds=rounds))
    if options.instructions:
        rows = with_instructions(rows, roots)
    print(markdown_table(rows))
    publish(
        "checkouts",
        rows,
        device=torch.device("cpu"),
        settings={
            "other": options.against.name,
            "times": f"least of {rounds} rounds in turns, CPU time of the thread",
            "model": "8 blocks of a GPT of width 32: a CPU's host time, no kernels'",
        },
        folder=options.out,
    )


if __name__ == "__main__":
    main()
