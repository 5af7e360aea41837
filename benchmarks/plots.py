"""Pictures of results, drawn with matplotlib where it is installed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row

_MARKS = ("s", "D", "^", "v", "P", "X", "*", "<", ">")


def draw_frontiers(rows: Sequence[Row], path: Path) -> Path | None:
    """Draw time against memory, one picture a model, all in one file.

    Returns:
        The path, or None where matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if row.get("step ms") is not None]
    models = list(dict.fromkeys(row["model"] for row in measured))
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(4.5 * len(models), 4), squeeze=False
    )
    for axis, model in zip(axes[0], models, strict=True):
        _draw_model(axis, [row for row in measured if row["model"] == model])
        axis.set_title(model)
        axis.set_xlabel("peak memory, GiB")
    axes[0][0].set_ylabel("step time, ms")
    handles = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _draw_model(axis: Any, rows: Sequence[Row]) -> None:
    ours = sorted(_point(row) for row in rows if _is_ours(row))
    axis.plot(*zip(*ours, strict=True), "o-", label="recoup", zorder=2)
    compiled = sorted(
        _point(row) for row in rows if str(row["contender"]).startswith("torch.compile")
    )
    if compiled:
        axis.plot(*zip(*compiled, strict=True), "x:", label="torch.compile, by budget")
    others = [
        row
        for row in rows
        if not _is_ours(row) and not str(row["contender"]).startswith("torch.compile")
    ]
    for mark, row in zip(_MARKS, others, strict=False):
        gib, ms = _point(row)
        axis.plot([gib], [ms], mark, label=row["contender"], zorder=3)


def _is_ours(row: Mapping[str, Any]) -> bool:
    return str(row["contender"]).startswith("recoup")


def _point(row: Mapping[str, Any]) -> tuple[float, float]:
    return float(row["peak MiB"]) / 1024, float(row["step ms"])
