"""Figures: charts that are saved as SVG or PNG and show themselves in a notebook."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from recoup.errors import UsageError
from recoup.report.charts import frontier_chart, timeline_chart
from recoup.report.findings import Findings, Timeline
from recoup.report.painting import paint_frontier, paint_timeline, png_of

KINDS = (".svg", ".png")


class Figure(ABC):
    """A chart; the last line of a notebook's cell shows it."""

    @abstractmethod
    def svg(self) -> str:
        """Return it as SVG, which can be enlarged and needs nothing else."""

    @abstractmethod
    def png(self) -> bytes:
        """Return it as PNG, drawn with matplotlib.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """

    def save(self, path: str | Path) -> Path:
        """Write it to a file; the ending says in which form.

        Raises:
            UsageError: The ending is none of .svg and .png.
            UnsupportedError: It is to be a PNG, and matplotlib is not installed.

        Examples:
            >>> MemoryFigure(Timeline((), (), 0, 0, 0, 0, "", ())).save("memory.jpg")
            Traceback (most recent call last):
            recoup.errors.UsageError: a figure is saved as .svg or .png: got ...
        """
        target = Path(path)
        target.write_bytes(self.encoded(check_kind(target)))
        return target

    def encoded(self, kind: str) -> bytes:
        """Return what a file of a kind, `.svg` or `.png`, has in it."""
        return self.png() if kind == ".png" else self.svg().encode()

    def _repr_svg_(self) -> str:
        return self.svg()


@dataclass(frozen=True)
class MemoryFigure(Figure):
    """The memory of a step as stacked bands, with its peak.

    Attributes:
        timeline: The memory, as in `findings.plan.timeline`.
        budget_bytes: A line is drawn there; 0: none.
        most_bytes: The top of the scale, to compare figures; 0: what is needed.
    """

    timeline: Timeline
    budget_bytes: int = 0
    most_bytes: int = 0

    def svg(self) -> str:
        """Return it as SVG."""
        return timeline_chart(
            self.timeline, budget_bytes=self.budget_bytes, most_bytes=self.most_bytes
        )

    def png(self) -> bytes:
        """Return it as PNG."""
        return png_of(
            paint_timeline(
                self.timeline,
                budget_bytes=self.budget_bytes,
                most_bytes=self.most_bytes,
            )
        )


@dataclass(frozen=True)
class FrontierFigure(Figure):
    """Time against memory of all plans and of the rules that people use.

    Attributes:
        findings: What was found.
    """

    findings: Findings

    def svg(self) -> str:
        """Return it as SVG."""
        return frontier_chart(self.findings)

    def png(self) -> bytes:
        """Return it as PNG."""
        return png_of(paint_frontier(self.findings))


def memory_figure(findings: Findings) -> MemoryFigure:
    """Return the memory of the plan in force."""
    return MemoryFigure(findings.plan.timeline, findings.budget_bytes)


def check_kind(path: Path) -> str:
    """Return the ending of a figure's file.

    Raises:
        UsageError: It is none of .svg and .png.

    Examples:
        >>> check_kind(Path("memory.PNG"))
        '.png'
    """
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise UsageError(f"a figure is saved as .svg or .png: got {path.name!r}.")
    return kind
