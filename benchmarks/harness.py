"""Run contenders in turns, describe the machine, and write down what came out."""

import argparse
import gc
import json
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.zoo.case import Scale

Cell = str | int | float | None
Row = Mapping[str, Cell]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeated measurements, with the least and the largest."""

    median: float
    least: float
    largest: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(statistics.median(values), min(values), max(values))


def in_turns(
    contenders: Mapping[str, Callable[[], Result]], *, warmup: int, rounds: int
) -> dict[str, list[Result]]:
    """Run every contender once a round; return what each returned after warm-up."""
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    for turn in range(warmup + rounds):
        for name, measure in contenders.items():
            result = measure()
            if turn >= warmup:
                results[name].append(result)
    return results


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step takes, in seconds.

    Attributes:
        alone: With the device idle before it, as where every loss is looked at.
        in_a_row: Among steps that are issued one after the other, as training does: the
            host works ahead while the device computes.
    """

    alone: float
    in_a_row: float


LONGEST_ROW_SECONDS = 1.0


def pace_of(step: Callable[[], object], device: torch.device, *, steps: int) -> Pace:
    """Run a step by itself, then several in a row: fewer of those that take long.

    Python's garbage is collected before. A full collection stops the host for 0.1 to
    0.2 s, once in tens of steps: it is a few percent of training, whoever it is that
    allocated the object too many, and would be a third of a row.
    """
    gc.collect()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    alone = time.perf_counter() - start
    return Pace(alone, seconds_in_a_row(step, device, steps=steps, alone=alone))


def seconds_in_a_row(
    step: Callable[[], object], device: torch.device, *, steps: int, alone: float
) -> float:
    """Return the time of a step among several, given what one takes by itself.

    The first of the row is not counted: it finds the device idle.
    """
    steps = max(2, min(steps, round(LONGEST_ROW_SECONDS / alone)))
    step()
    since = mark(device)
    for _ in range(steps):
        step()
    return since() / steps


def mark(device: torch.device) -> Callable[[], float]:
    """Return a clock of the device, which tells the seconds since now.

    Both moments are those at which it has done what it was given until then.
    """
    if device.type == "cpu":
        begun = time.perf_counter()
        return lambda: time.perf_counter() - begun
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    first.record()

    def seconds() -> float:
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000

    return seconds


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Return the options of a case's command line; `--out` is the same for all."""
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


def numbers(text: str) -> list[float]:
    """Return the numbers of an option such as `0.75,0.5`."""
    return [float(number) for number in text.split(",") if number]


def device_at_hand(*, threads: int | None = 1) -> torch.device:
    """Return the accelerator, or else the CPU.

    Args:
        threads: How many the CPU may use then; None: all. A second one only adds
            noise where the question is the host's time.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        return device
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.device("cpu")


def scale_for(device: torch.device, asked: Scale | None) -> Scale:
    """Return the size of models that was asked for, or one that suits the device."""
    return asked or ("tiny" if device.type == "cpu" else "large")


def publish(
    theme: str,
    rows: Sequence[Row],
    *,
    device: torch.device,
    settings: Mapping[str, Cell],
    folder: Path,
) -> None:
    """Write the rows with the machine they are from, and say where they are."""
    page = write_results(
        theme, rows, machine=describe_machine(device), settings=settings, folder=folder
    )
    print(f"Written to {page} and the .json beside it.")


class Table:
    """Rows that are measured one by one, and written after each.

    A row that is there from today, with the same settings, is not measured again: where
    a machine is lent for minutes, the same command goes on later.

    Args:
        theme: Its name.
        device: Where it is measured.
        settings: What the rows have in common.
        folder: Where it is written.
        limit: Seconds after which no row is begun.

    Attributes:
        rows: Those of today with these settings, from earlier runs too.
    """

    def __init__(
        self,
        theme: str,
        device: torch.device,
        settings: Mapping[str, Cell],
        folder: Path,
        limit: float,
    ) -> None:
        self._theme, self._device, self._folder = theme, device, folder
        self._settings = dict(settings)
        self._ends = time.perf_counter() + limit
        self.rows = self._known()

    def row(self, model: str, contender: str, measure: Callable[[], Row]) -> Row:
        """Return a row: the known one, or what is measured now, which is written.

        Raises:
            TimeoutError: The time is over.
        """
        for known in self.rows:
            if (known["model"], known["contender"]) == (model, contender):
                return known
        if time.perf_counter() > self._ends:
            raise TimeoutError(f"{contender} of {model} was not begun")
        found: dict[str, Cell] = {"model": model, "contender": contender}
        try:
            found |= measure()
        except Exception as error:  # noqa: BLE001 (a row of its own)
            found["remark"] = f"{type(error).__name__}: {error!s:.300}"
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        print(found, flush=True)
        self.rows.append(found)
        write_results(
            self._theme,
            self.rows,
            machine=describe_machine(self._device),
            settings=self._settings,
            folder=self._folder,
        )
        return found

    def _known(self) -> list[Row]:
        today = datetime.now(tz=UTC).date().isoformat()
        for file in self._folder.glob(f"{self._theme}_*_{today}.json"):
            record = json.loads(file.read_text())
            if record["settings"] == self._settings:
                return record["rows"]
        return []


def describe_pace(steps: int) -> str:
    """Return what the columns of times mean, for the settings of a run."""
    return (
        f"of {steps} at most in a row after a first one, as training issues them; "
        "alone: with the device idle before it"
    )


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return what a reader needs to judge or repeat the numbers."""
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "device": _device_name(device),
        "driver": _driver_version() if device.type == "cuda" else "none",
        "processor threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_results(
    theme: str,
    rows: Sequence[Row],
    *,
    machine: Mapping[str, str],
    settings: Mapping[str, Cell],
    folder: Path,
) -> Path:
    """Write the rows as JSON and as a table; return the path of the table."""
    hardware = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    stem = f"{theme}_{hardware}_{machine['date']}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "theme": theme,
        "machine": dict(machine),
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
    }
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n")
    page = folder / f"{stem}.md"
    page.write_text(markdown_page(theme, rows, machine=machine, settings=settings))
    return page


def markdown_page(
    theme: str,
    rows: Sequence[Row],
    *,
    machine: Mapping[str, str],
    settings: Mapping[str, Cell],
) -> str:
    """Return the page for people: the facts of the run, then the table."""
    facts = [f"- {name}: {value}" for name, value in machine.items()]
    facts += [f"- {name}: {value}" for name, value in settings.items()]
    return "\n".join([f"# {theme}", "", *facts, "", markdown_table(rows), ""])


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, without columns that are empty throughout.

    Examples:
        >>> print(
        ...     markdown_table([{"name": "a", "ms": 1.25}, {"name": "b", "ms": None}])
        ... )
        | name | ms |
        |---|---|
        | a | 1.25 |
        | b |  |
    """
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(row.get(name) is not None for row in rows)
    ]
    lines = [_line(columns), "|" + "---|" * len(columns)]
    lines += [_line([_show(row.get(name)) for name in columns]) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _show(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.0f}"
    return str(cell)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def _driver_version() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    answer = subprocess.run(
        [program, "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.splitlines()[0] if answer.stdout else "unknown"
