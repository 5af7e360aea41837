"""The commands of `recoup` and their arguments; torch is imported inside."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from recoup.cli.output_files import (
    as_json,
    check_figure,
    check_writable,
    print_texts,
    print_verdict,
    read_text,
    write_picture,
    write_whole,
)
from recoup.core.device_figures import figures_of
from recoup.core.display import table as table_of
from recoup.core.units import parse_budget, print_bytes, print_seconds
from recoup.core.version import VERSION
from recoup.errors import InfeasibleError, UsageError

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


def check_compiled(how: str | None, others: Mapping[str, object]) -> None:
    """Raise `UsageError` for what `measure` and `frontier` cannot do with `--compile`.

    Args:
        how: The executor.
        others: The options that cannot be given with it, and what was given.

    Examples:
        >>> check_compiled("exact", {"--dry": False, "--budget": None})
    """
    given = [name for name, value in others.items() if value]
    if how is not None and (given or how not in ("exact", "inductor")):
        raise UsageError(
            f"expected --compile exact or inductor without {', '.join(others)}, got "
            f"{' '.join([f'--compile {how}', *given])}: the blocks are compiled and "
            "run here, without a budget."
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


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (as typer calls it)
    if wanted:
        print(f"recoup {VERSION}")
        raise typer.Exit


def options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Make PyTorch training fit in the memory you have."""
    del version


def demo(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 10,
    small: Annotated[
        bool, typer.Option("--small", help="A tiny model: seconds on any machine.")
    ] = False,
    page: PagePath = None,
    json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Train a small GPT plainly and in half the memory, and compare every bit."""
    del debug
    check_writable(page)

    from recoup.cli.demo import demonstrate

    return demonstrate(steps, page, is_small=small, in_json=json)


def fit(  # noqa: PLR0913 (one for each output)
    target: TargetName,
    *,
    budget: BudgetText = None,
    offload: Offload = False,
    page: PagePath = None,
    plan: PlanPath = None,
    findings: FindingsPath = None,
    points: Points = 7,
    compile: CompileText = None,  # noqa: A002 (the option's name)
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Fit a model into a budget: measure, plan, and check on a real step."""
    del debug  # read by `recoup.cli.main`
    check_budget_text(budget)
    check_compile(compile)
    for path in (page, plan, findings):
        check_writable(path)

    from recoup.cli.targets import load_target
    from recoup.cli.work import fit_target, noise
    from recoup.report.findings import to_json
    from recoup.report.pages import page as page_of
    from recoup.report.texts import comparison_text, frontier_text, summary_text

    loaded = load_target(target)
    busy = noise(loaded)
    try:
        fitted, found = fit_target(
            loaded, budget, offload=offload, points=points, compile=compile
        )
    except InfeasibleError as error:
        if page is not None and error.page is not None:
            write_whole(page, error.page())
            print(f"wrote {page}", file=sys.stderr)
        raise
    if page is not None:
        write_whole(page, page_of(found))
    if plan is not None:
        write_whole(plan, fitted.plan.to_json())
    if findings is not None:
        write_whole(findings, to_json(found))
    if json:
        print(as_json({"target": target, **fitted.numbers(), "busy": busy}))
        return
    print_verdict(found)
    front = frontier_text(found) if len(found.plans) > 2 else ""
    rules = comparison_text(found) if found.baselines else ""
    print_texts(summary_text(found), front, rules, loaded.uncounted(), busy)
    for path in (page, plan, findings):
        if path is not None:
            print(f"wrote {path}")


def measure(  # noqa: PLR0913 (one for each question)
    target: TargetName,
    *,
    budget: BudgetText = None,
    dry: Dry = False,
    device: DeviceName = None,
    compile: CompileText = None,  # noqa: A002 (the option's name)
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure one step: where its memory goes, and its smallest possible peak."""
    del debug
    check_budget_text(budget)
    check_device(device, dry=dry)
    check_compiled(compile, {"--dry": dry, "--budget (RECOUP_BUDGET)": budget})

    from recoup.cli.targets import load_target
    from recoup.cli.work import (
        compiled_step_of,
        measure_findings,
        noise,
        step_numbers,
    )
    from recoup.report.compiled_view import compiled_step_text
    from recoup.report.texts import (
        alive_text,
        blocks_text,
        estimate_words,
        timeline_text,
    )
    from recoup.report.timeline import timeline

    loaded = load_target(target, dry=dry, device=device)
    busy = noise(loaded)
    if compile is not None:
        compiled = compiled_step_of(loaded, compile)
        if json:
            print(as_json({"target": target, **compiled.numbers(), "busy": busy}))
        else:
            print_texts(compiled_step_text(compiled), loaded.uncounted(), busy)
        return
    graph, found = measure_findings(loaded, budget)
    numbers, view = step_numbers(graph, found), found.plan
    drawn = timeline(found.step, view)
    if json:
        print(as_json({"target": target, **numbers, "busy": busy}))
        return
    print_verdict(found)
    rows = [
        ["operators of forward", str(numbers["operators"])],
        ["saved for backward", print_bytes(numbers["saved_bytes"])],
        ["plain peak", print_bytes(found.plain_peak_bytes)],
        ["smallest peak", print_bytes(found.floor_bytes)],
        ["as a budget, exactly", f"{found.floor_bytes} B"],
        ["time of a step", print_seconds(numbers["step_seconds"])],
    ]
    if found.budget_bytes:
        rows += [
            ["budget", print_bytes(found.budget_bytes)],
            ["peak with the plan", print_bytes(view.peak_bytes)],
            ["time with the plan", print_seconds(view.seconds)],
        ]
    print_texts(
        table_of([target, ""], rows),
        estimate_words(found.estimated_for),
        loaded.uncounted(),
        f"Memory over the step\n{timeline_text(drawn)}",
        alive_text(drawn),
        blocks_text(found.step, view),
        busy,
    )


def largest_batch(  # noqa: PLR0913 (as `recoup.largest_batch`)
    target: SizedTargetName,
    *,
    budget: BudgetText = None,
    slowdown: Annotated[
        float, typer.Option(min=0, help="Accepted extra time of a step: 0.33 is 33%.")
    ] = 0.33,
    limit: Annotated[int, typer.Option(min=1, help="The largest size.")] = 1 << 16,
    compile: CompileText = None,  # noqa: A002 (the option's name)
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find the largest batch that trains within a budget; checked on a real step."""
    del debug
    check_budget_text(budget)
    check_compile(compile)

    from recoup.cli.targets import load_sized_target
    from recoup.cli.work import largest_batch_of, noise

    make = load_sized_target(target)
    busy = noise(make(1))
    found = largest_batch_of(
        make, budget, slowdown=slowdown, limit=limit, compile=compile
    )
    if json:
        print(as_json({"target": target, **asdict(found), "busy": busy}))
        return
    print_verdict(f"{found}.", "yes")
    print_texts(busy)


def frontier(  # noqa: PLR0913 (one for each output)
    target: TargetName,
    *,
    points: Points = 9,
    offload: Offload = False,
    dry: Dry = False,
    device: DeviceName = None,
    chart: ChartPath = None,
    compile: CompileText = None,  # noqa: A002 (the option's name)
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Plan for many budgets: the fastest time for each amount of memory."""
    del debug
    check_device(device, dry=dry)
    check_figure(chart)
    check_compiled(compile, {"--dry": dry, "--offload": offload, "--chart": chart})

    from recoup.cli.targets import load_target
    from recoup.cli.work import compiled_frontier_of, frontier_findings, noise
    from recoup.report.charts import frontier_chart
    from recoup.report.compiled_view import plans_text
    from recoup.report.texts import estimate_words, frontier_text

    loaded = load_target(target, dry=dry, device=device)
    busy = noise(loaded)
    if compile is not None:
        compiled = compiled_frontier_of(loaded, points, compile)
        if json:
            plans = [
                {"peak_bytes": plan.peak_bytes, "seconds": plan.seconds}
                for plan in compiled
            ]
            extra = {"executor": compile, "busy": busy}
            print(as_json({"target": target, **extra, "plans": plans}))
        else:
            print_texts(plans_text(compiled), loaded.uncounted(), busy)
        return
    found = frontier_findings(loaded, points, offload=offload)
    if chart is not None:
        write_picture(chart, frontier_chart(found))
    if json:
        plans = [
            {"peak_bytes": view.peak_bytes, "seconds": view.seconds}
            for view in found.plans
        ]
        extra = {"estimated_for": found.estimated_for, "busy": busy}
        print(as_json({"target": target, **extra, "plans": plans}))
        return
    print_verdict(found)
    print_texts(
        frontier_text(found),
        estimate_words(found.estimated_for),
        loaded.uncounted(),
        busy,
    )


def compare(
    target: TargetName,
    *,
    budget: Budgets = None,
    offload: Offload = False,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure recoup and PyTorch's own tools on your model: peak, time, gradients."""
    del debug
    for text in budget or ():
        check_budget_text(text)

    from recoup.cli.targets import load_target
    from recoup.cli.work import compare_target, noise
    from recoup.report.texts import benchmark_text, benchmark_verdict

    loaded = load_target(target)
    busy = noise(loaded)
    entries = compare_target(loaded, budget or (), offload=offload)
    if json:
        rows = [asdict(entry) for entry in entries]
        print(as_json({"target": target, "contenders": rows, "busy": busy}))
        return
    how = "Measured here, one after the other in one process: forward and backward."
    print_verdict(benchmark_verdict(entries))
    print_texts(benchmark_text(entries), how, busy)


def table(
    target: TargetName,
    *,
    precision: Annotated[
        str, typer.Option(help="The dtype of mixed precision: bf16, fp16, auto.")
    ] = "auto",
    segment_size: Annotated[
        int | None,
        typer.Option(help="Number of blocks to recompute together; default 1."),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure full and mixed precision, checkpointing, and both: memory and time."""
    del debug

    from recoup.cli.targets import load_target
    from recoup.cli.work import noise, table_target

    loaded = load_target(target)
    busy = noise(loaded)
    found = table_target(loaded, precision, segment_size)
    if json:
        rows = [
            {"name": row.name, "peak_bytes": row.peak_bytes, "seconds": row.seconds}
            for row in found.rows
        ]
        extra = {"precision": found.precision, "busy": busy}
        print(as_json({"target": target, **extra, "rows": rows}))
        return
    how = f"Mixed precision computes in {found.precision}; measured on this machine."
    print_verdict(found.verdict)
    print_texts(str(found), how, busy)


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan.")],
    *,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Explain a plan in words; needs neither torch nor the model."""
    del debug

    from recoup.report.plan_text import plan_numbers, plan_text, read_plan

    plan = read_plan(read_text(path))
    print(as_json(plan_numbers(plan)) if json else plan_text(plan))


def report(  # noqa: PLR0913 (one for each output)
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Findings that `recoup fit --findings` wrote, or MODULE:FUNCTION.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("recoup.html"),
    chart: ChartPath = None,
    memory: MemoryPath = None,
    trace: TracePath = None,
    budget: BudgetText = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write one self-contained HTML page, and optionally its charts as files."""
    del debug
    check_budget_text(budget)
    check_writable(out)
    check_figure(chart)
    check_figure(memory)

    from recoup.report.charts import frontier_chart, memory_chart
    from recoup.report.findings import from_json
    from recoup.report.pages import page
    from recoup.report.traces import check_trace
    from recoup.report.traces import trace as trace_of

    if trace is not None:
        check_trace(trace)
        check_writable(trace)
    busy = ""
    if source.endswith(".json"):
        found = from_json(read_text(Path(source)))
    else:
        from recoup.cli.targets import load_target
        from recoup.cli.work import fit_target, noise

        loaded = load_target(source)
        busy = noise(loaded)
        _, found = fit_target(loaded, budget, offload=False, points=9)
    written = [out]
    write_whole(out, page(found))
    for path, draw in ((chart, frontier_chart), (memory, memory_chart)):
        if path is not None:
            write_picture(path, draw(found))
            written.append(path)
    if trace is not None:
        write_whole(trace, trace_of(found, trace.suffix.lower()))
        written.append(trace)
    if json:
        found_files = list(map(str, written))
        print(as_json({"page": str(out), "written": found_files, "busy": busy}))
        return
    print_verdict(found)
    print_texts(busy)
    for path in written:
        print(f"wrote {path}")


def doctor(*, json: AsJson = False, debug: Debug = False) -> int:
    """Show versions, devices and links, and check that recoup works on them."""
    del debug

    from recoup.cli.examination import examination_text, examination_verdict, examine

    found = examine()
    if json:
        print(as_json(found))
    else:
        print_verdict(examination_verdict(found), "yes" if found["works"] else "no")
        print_texts(examination_text(found))
    return 0 if found["works"] else 1


COMMANDS = (
    demo,
    fit,
    largest_batch,
    measure,
    frontier,
    compare,
    table,
    explain,
    report,
    doctor,
)
