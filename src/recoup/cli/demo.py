"""Train a small GPT plainly and in half the memory, and compare the two."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from recoup.cli.demo_training import (
    Settings,
    TrainingRun,
    compare_repeatably,
    gradients_equal,
    losses_equal,
    read_text,
)
from recoup.cli.gpt import Shape
from recoup.cli.output_files import as_json, print_verdict, write_whole
from recoup.cli.statuses import FAILED, CommandError
from recoup.cli.work import other_work
from recoup.core.units import print_bytes, print_seconds
from recoup.report.pages import page as page_of


def demonstrate(steps: int, page: Path | None, *, is_small: bool, in_json: bool) -> int:
    """Run the demonstration; return 0 if both runs agree to the last bit, else 1.

    Raises:
        CommandError: The device has too little memory.
    """
    settings = _settings(steps, is_small=is_small)
    # With JSON, standard output is reserved for it.
    console = Console(stderr=in_json)
    busy = other_work(settings.device)
    try:
        with Progress(
            TextColumn("{task.description:>6}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # it would leave an empty line
        ) as progress:
            plain, fitted, note = compare_repeatably(settings, progress)
    except torch.OutOfMemoryError:
        raise CommandError(
            "the GPU has too little free memory; try again with --small", status=FAILED
        ) from None
    same = losses_equal(plain, fitted) and gradients_equal(plain, fitted)
    if in_json:
        numbers = comparison_numbers(settings, plain, fitted)
        print(as_json({**numbers, "busy": busy}))
    else:
        words, good = ("equal in every bit", "yes") if same else ("NOT equal", "no")
        print_verdict(
            f"Fits in half the memory: peak {print_bytes(fitted.cost.peak_bytes)}, "
            f"plain {print_bytes(plain.cost.peak_bytes)}; losses and gradients "
            f"{words}.",
            good,
        )
        console.print(comparison_table(settings, plain, fitted))
    lines = [busy, note and f"Some bits may differ by chance: {note}"]
    if fitted.report is not None:
        lines.insert(0, f"The plan: {fitted.report}")
        if page is not None:
            found = fitted.report.findings(title="GPT of the demonstration")
            write_whole(page, page_of(found))
            lines.insert(1, f"The page: {page}")
    for line in filter(None, lines):
        console.print(line, highlight=False, markup=False)
    return 0 if same else 1


def comparison_table(
    settings: Settings, plain: TrainingRun, fitted: TrainingRun
) -> Table:
    """Return a table of both runs."""
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
    settings: Settings, plain: TrainingRun, fitted: TrainingRun
) -> dict[str, Any]:
    """Return the numbers of both runs, for programs."""
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
    """Return the common name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU" if device.type == "cpu" else str(device)


def _settings(steps: int, *, is_small: bool) -> Settings:
    vocabulary = len(set(read_text()))
    device = torch.accelerator.current_accelerator(check_available=True)
    shape = Shape(6, 128, 4, vocabulary, context=128, dropout=0.1)
    settings = Settings(shape, 16, steps, device or torch.device("cpu"))
    if is_small:
        small = replace(shape, layers=3, width=64, context=64)
        return replace(settings, batch=32, shape=small)
    if device is not None:
        large = replace(shape, layers=12, width=1024, heads=16, context=512)
        return replace(settings, batch=32, shape=large)
    return settings


def _print_flops(flops: int) -> str:
    scale, unit = (1e12, "TFLOP") if flops >= 1e12 else (1e9, "GFLOP")
    return f"{flops / scale:.2f} {unit}"


def _yes_or_no(claim: bool) -> str:  # noqa: FBT001 (the printed claim)
    return "[green]yes[/]" if claim else "[red]no[/]"
