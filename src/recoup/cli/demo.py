"""Train a small GPT plainly and in half the memory, and show how the two compare."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from recoup.cli.corpus import read_text
from recoup.cli.demo_training import (
    Outcome,
    Settings,
    compare_repeatably,
    gradients_equal,
    losses_equal,
)
from recoup.cli.gpt import Shape
from recoup.cli.output_files import as_json
from recoup.core.units import print_bytes, print_seconds
from recoup.errors import RecoupError
from recoup.fitting.fit import Fit

INTERRUPTED = 130
"""The exit status of a program ended by Ctrl-C: 128 and the number of the signal."""


def main(
    arguments: Sequence[str] | None = None,
    *,
    program: str = "python -m recoup.cli.demo",
) -> int:
    """Run the demonstration; return 0 if both runs agree to the last bit.

    Args:
        arguments: What was asked for; by default what the process was started with.
        program: How it was started, for its help.

    Returns:
        1 if they differ or something failed, 130 if it was interrupted.
    """
    options = _parser(program).parse_args(arguments)
    try:
        return _demonstrate(_settings(options), options.page, in_json=options.json)
    except KeyboardInterrupt:
        _complain("Interrupted: nothing was written, there is nothing to clean up.")
        return INTERRUPTED
    except torch.OutOfMemoryError:
        _complain("The GPU has too little free memory: try again with --small.")
    except RecoupError as error:
        _complain(str(error))
    return 1


def comparison_table(settings: Settings, plain: Outcome, fitted: Outcome) -> Table:
    """Lay both outcomes side by side."""
    shape = settings.shape
    table = Table(
        title=(
            f"GPT, {shape.layers} blocks of width {shape.width}, "
            f"{settings.batch} x {shape.context} characters a step,\n"
            f"{settings.steps} steps on {device_name(settings.device)}"
        )
    )
    table.add_column("")
    for heading in ("plain", "fitted", "ratio"):
        table.add_column(heading, justify="right")
    before, after = plain.cost, fitted.cost
    table.add_row("budget", "", print_bytes(before.peak_bytes // 2), "0.50")
    for name, field, show in (
        ("peak memory", "peak_bytes", print_bytes),
        ("saved for backward", "saved_bytes", print_bytes),
        ("time of a step", "seconds", print_seconds),
        ("operations of a step", "flops", _print_flops),
    ):
        one, other = getattr(before, field), getattr(after, field)
        table.add_row(name, show(one), show(other), f"{other / one:.2f}")
    table.add_row("last loss", f"{plain.losses[-1]:.4f}", f"{fitted.losses[-1]:.4f}")
    table.add_row("loss curves equal", "", _yes_or_no(losses_equal(plain, fitted)))
    table.add_row(
        "gradients bitwise equal", "", _yes_or_no(gradients_equal(plain, fitted))
    )
    return table


def comparison_numbers(
    settings: Settings, plain: Outcome, fitted: Outcome
) -> dict[str, Any]:
    """Return both outcomes side by side, for programs."""
    return {
        "device": device_name(settings.device),
        "steps": settings.steps,
        "budget_bytes": plain.cost.peak_bytes // 2,
        "plain": {**asdict(plain.cost), "losses": plain.losses},
        "fitted": {**asdict(fitted.cost), "losses": fitted.losses},
        "losses_equal": losses_equal(plain, fitted),
        "gradients_equal": gradients_equal(plain, fitted),
    }


def device_name(device: torch.device) -> str:
    """Return what a person calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the processor" if device.type == "cpu" else str(device)


def other_work(device: torch.device) -> str:
    """Return a warning if the processors are at work for others, where times suffer."""
    processors = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if device.type != "cpu" or load < processors / 2:
        return ""
    return (
        f"Other programs were running when this began (load {load:.1f} on {processors} "
        "processors), and threads wait for each other: the times say little."
    )


def _demonstrate(settings: Settings, target: Path | None, *, in_json: bool) -> int:
    # With JSON, standard output is for that alone.
    console = Console(stderr=in_json)
    busy = other_work(settings.device)
    with Progress(
        TextColumn("{task.description:>6}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
    ) as progress:
        plain, fitted, note = compare_repeatably(settings, progress)
    if in_json:
        print(as_json(comparison_numbers(settings, plain, fitted)))
    else:
        console.print(comparison_table(settings, plain, fitted))
    if fitted.report is not None:
        console.print(f"The plan: {fitted.report}", highlight=False, markup=False)
        _write_page(fitted.report, target, console)
    if busy:
        console.print(busy, markup=False, highlight=False)
    if note:
        console.print(f"Some bits may differ by chance: {note}", markup=False)
    same = losses_equal(plain, fitted) and gradients_equal(plain, fitted)
    return 0 if same else 1


def _write_page(report: Fit, target: Path | None, console: Console) -> None:
    if target is None:
        return
    try:
        report.write_page(target, title="GPT of the demonstration")
    except OSError as error:
        _complain(f"The page was not written: {error}.")
    else:
        console.print(f"The page: {target}", highlight=False, markup=False)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=(
            "Train a small GPT plainly and within half the memory of that, on a GPU if "
            "there is one, and compare memory, time and every bit of the result."
        ),
    )
    parser.add_argument(
        "--steps", type=_positive, default=20, help="training steps (default: 20)"
    )
    parser.add_argument(
        "--small", action="store_true", help="a tiny model: seconds on any machine"
    )
    parser.add_argument(
        "--page", type=Path, help="write a page about the plan to this file (HTML)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, not a table"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _settings(options: argparse.Namespace) -> Settings:
    vocabulary = len(set(read_text()))
    device = torch.accelerator.current_accelerator(check_available=True)
    shape = Shape(6, 128, 4, vocabulary, context=128, dropout=0.1)
    settings = Settings(shape, 16, options.steps, device or torch.device("cpu"))
    if options.small:
        small = replace(shape, layers=3, width=64, context=64)
        return replace(settings, batch=32, shape=small)
    if device is not None:
        large = replace(shape, layers=12, width=1024, heads=16, context=512)
        return replace(settings, batch=32, shape=large)
    return settings


def _print_flops(flops: int) -> str:
    scale, unit = (1e12, "TFLOP") if flops >= 1e12 else (1e9, "GFLOP")
    return f"{flops / scale:.2f} {unit}"


def _yes_or_no(claim: bool) -> str:  # noqa: FBT001 (it is the claim that is printed)
    return "[green]yes[/]" if claim else "[red]no[/]"


def _complain(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
