"""Arguments of the commands: their names, types and help."""

from pathlib import Path
from typing import Annotated

import typer

from recoup.core.device_figures import figures_of
from recoup.core.units import parse_budget
from recoup.errors import UsageError

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function of yours that returns (model, batch), and optionally loss "
        "and optimizer; or path/to/file.py:function.",
    ),
]
SizedTargetName = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function of yours that takes a batch size and returns (model, batch), "
        "and optionally loss and optimizer; or path/to/file.py:function.",
    ),
]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Peak bytes, everything counted: 8GiB, 8Gi, 8G, 600MB; or a share of the "
        "plain peak: 60% or 0.6. Default: the memory of the device.",
        envvar="RECOUP_BUDGET",
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        help="A budget for recoup; may be repeated. Default: the peaks of the other "
        "contenders.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")]
Offload = Annotated[
    bool, typer.Option("--offload", help="Allow values to be offloaded to the host.")
]
CompileText = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="HOW",
        help="Compile the blocks: exact (eager kernels), inductor, or auto: the "
        "fastest of these and of not compiling.",
    ),
]
Dry = Annotated[
    bool,
    typer.Option(
        "--dry",
        help="Compute nothing: for a model that does not fit here, or a device that "
        "this machine lacks.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="With --dry: the device to estimate times for: h200, h100, a100, rtx4090, "
        "or cpu.",
    ),
]
Points = Annotated[int, typer.Option(min=2, max=64, help="Number of budgets to try.")]
PagePath = Annotated[Path | None, typer.Option(help="Write the report page here.")]
PlanPath = Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")]
FindingsPath = Annotated[
    Path | None, typer.Option(help="Write all findings here, as JSON.")
]
ChartPath = Annotated[
    Path | None, typer.Option(help="Write time versus memory here, as .svg or .png.")
]
MemoryPath = Annotated[
    Path | None,
    typer.Option(help="Write the memory over the step here, as .svg or .png."),
]
TracePath = Annotated[
    Path | None,
    typer.Option(
        help="Write the step here for a viewer: .json for Perfetto, .pickle for "
        "pytorch.org/memory_viz."
    ),
]


def check_budget_text(text: str | None) -> None:
    """Raise before any work if a text is not a budget that `fit` accepts.

    Examples:
        >>> for text in ("60%", "0.6", "8GiB", "7.91GiB", "8G"):
        ...     check_budget_text(text)
    """
    if text is not None:
        parse_budget(text)


def check_compile(how: str | None) -> None:
    """Raise `UsageError` for an unknown executor after `--compile`."""
    if how not in (None, "exact", "inductor", "auto"):
        raise UsageError(f"expected --compile exact, inductor or auto, got {how!r}.")


def check_compiled_frontier(how: str | None, *, others: bool) -> None:
    """Raise `UsageError` for what `frontier --compile` cannot do.

    Examples:
        >>> check_compiled_frontier("exact", others=False)
    """
    if how is not None and (others or how not in ("exact", "inductor")):
        raise UsageError(
            f"expected --compile exact or inductor without --dry, --offload and "
            f"--chart, got --compile {how}: plans of compiled blocks are predicted "
            "from blocks that are compiled and run here."
        )


def check_device(device: str | None, *, dry: bool) -> None:
    """Raise before any work if the figures of a device are unknown.

    Examples:
        >>> check_device("h100", dry=True)
    """
    if device is None:
        return
    if not dry:
        raise UsageError(
            f"expected --dry with --device {device}, which is for estimates; add it, "
            "or drop --device to measure where the model is."
        )
    if device != "cpu":
        figures_of(device)
