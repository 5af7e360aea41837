"""Drawing: a picture is a list of shapes; SVG and PNG are two encodings of it."""

import importlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from recoup.errors import UnsupportedError, UsageError

COLOURS = {
    "paper": "#ffffff",
    "ink": "#1d2733",
    "quiet": "#66727f",
    "line": "#d5dbe1",
    "accent": "#c2410c",
    "fixed": "#9aa5b1",
    "running": "#2a9d8f",
    "recomputed": "#e9864a",
    "workspace": "#f2b98c",
    "held": "#3b6fb6",
}
"""Colours by name; a page redefines them for dark screens."""

_DOTS_PER_UNIT = 2
_FONT_SIZE = 12

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: Points
    colour: str
    width: float = 1
    dashes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Area:
    """A filled shape; pointing at it shows its label."""

    points: Points
    colour: str
    opacity: float
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A dot or an open square; pointing at it shows its label."""

    x: float
    y: float
    radius: float
    colour: str
    label: str
    is_square: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text."""

    words: str
    x: float
    y: float
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = "ink"
    size: float = _FONT_SIZE
    is_bold: bool = False


Shape = Line | Area | Mark | Words


@dataclass(frozen=True)
class Picture:
    """A chart; notebooks show it as the last expression of a cell.

    Attributes:
        shapes: The shapes, bottom first; y grows downwards.
        width: The width.
        height: The height.
        label: A description in words.
    """

    shapes: tuple[Shape, ...] = field(repr=False)
    width: int
    height: int
    label: str

    def svg(self) -> str:
        """Return it as self-contained, scalable SVG."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} '
            f'{self.height}" role="img" font-family="system-ui, sans-serif" '
            f'font-size="{_FONT_SIZE}" fill="{_css("ink")}" style="background: '
            f'{_css("paper")}; width: 100%; height: auto">'
            f"<title>{escape(self.label)}</title>"
            f"{''.join(map(_svg, self.shapes))}</svg>"
        )

    def png(self) -> bytes:
        """Return it as PNG, drawn with matplotlib."""
        stream = io.BytesIO()
        self.figure().savefig(stream, format="png", dpi=100 * _DOTS_PER_UNIT)
        return stream.getvalue()

    def figure(self) -> Any:
        """Return it as a matplotlib figure."""
        # Not through pyplot, which keeps figures and chooses a window for them.
        size = (self.width / 100, self.height / 100)
        figure = check_painter().Figure(figsize=size, facecolor=COLOURS["paper"])
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width))
        axes.set(ylim=(self.height, 0))
        axes.axis("off")
        for shape in self.shapes:
            _paint(axes, shape)
        return figure

    def encoded(self, kind: str) -> bytes:
        """Return the content of a file of a kind, `.svg` or `.png`."""
        return self.png() if kind == ".png" else self.svg().encode()

    def save(self, path: str | Path) -> Path:
        """Write it to a file; the suffix selects the format.

        Raises:
            UsageError: The suffix is neither .svg nor .png.
            UnsupportedError: The file is a PNG, and matplotlib is not installed.

        Examples:
            >>> Picture((), 1, 1, "nothing").save("memory.jpg")
            Traceback (most recent call last):
            recoup.errors.UsageError: expected a file name ending in .svg or ...
        """
        target = Path(path)
        target.write_bytes(self.encoded(check_kind(target)))
        return target

    def _repr_svg_(self) -> str:
        return self.svg()


def check_kind(path: Path) -> str:
    """Return the suffix of a picture's file.

    Examples:
        >>> check_kind(Path("memory.PNG"))
        '.png'
    """
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise UsageError(
            f"expected a file name ending in .svg or .png, got {path.name!r}."
        )
    return kind


def check_painter() -> Any:
    """Return matplotlib's module of figures."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(
            "expected matplotlib for a PNG, got none; install it with "
            "pip install recoup[png], or save the picture as .svg."
        ) from error


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from numbers to positions.

    Attributes:
        low: The number at the start.
        high: The number at the end.
        start: The position of the start.
        end: The position of the end.
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, number: float) -> float:
        """Return the position of a number.

        Examples:
            >>> Scale(0, 10, 100, 0).at(5)
            50.0
        """
        spread = self.high - self.low
        share = (number - self.low) / spread if spread else 0.0
        return round(self.start + share * (self.end - self.start), 1)


def ticks(low: float, high: float, *, base: int = 10, count: int = 5) -> list[float]:
    """Return about `count` round numbers between two numbers.

    Round in powers of `base`: 10, or 2 for bytes.

    Examples:
        >>> ticks(0, 10)
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        >>> ticks(0, 1000, base=2)
        [0.0, 256.0, 512.0, 768.0]
    """
    spread = high - low
    if not spread > 0:
        return [low]
    rough = spread / count
    power = float(base) ** math.floor(math.log(rough, base))
    factors = (1, 2, 5, 10) if base == 10 else (1, 2)
    step = next((f * power for f in factors if f * power >= rough), power * base)
    first = math.ceil(low / step)
    last = math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def _css(colour: str) -> str:
    """Return a colour that a page may redefine, with a default."""
    return f"var(--{colour}, {COLOURS[colour]})"


def _svg(shape: Shape) -> str:
    match shape:
        case Line(points, colour, width, dashes):
            dashed = f' stroke-dasharray="{dashes[0]} {dashes[1]}"' if dashes else ""
            return (
                f'<polyline points="{_places(points)}" fill="none" '
                f'stroke="{_css(colour)}" stroke-width="{width}"{dashed}/>'
            )
        case Area(points, colour, opacity, label):
            return (
                f'<polygon points="{_places(points)}" fill="{_css(colour)}" '
                f'fill-opacity="{opacity}"><title>{escape(label)}</title></polygon>'
            )
        case Mark(x, y, radius, colour, label):
            title = f"<title>{escape(label)}</title>"
            form, fill, edge = f'circle cx="{x}" cy="{y}" r="{radius}"', colour, "paper"
            if shape.is_square:
                corner, side = f'x="{x - radius:g}" y="{y - radius:g}"', 2 * radius
                form = f'rect {corner} width="{side:g}" height="{side:g}"'
                fill, edge = "paper", colour
            return (
                f'<{form} fill="{_css(fill)}" stroke="{_css(edge)}" stroke-width="1.5">'
                f"{title}</{form.split()[0]}>"
            )
        case Words(words, x, y):
            bold = ' font-weight="bold"' if shape.is_bold else ""
            return (
                f'<text x="{x:g}" y="{y:g}" text-anchor="{shape.anchor}" '
                f'font-size="{shape.size}" fill="{_css(shape.colour)}"{bold}>'
                f"{escape(words)}</text>"
            )


def _places(points: Points) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def _paint(axes: Any, shape: Shape) -> None:
    """Draw a shape on matplotlib axes in the units of the picture."""
    per_unit = 72 / 100
    match shape:
        case Line(points, colour, width, dashes):
            style = (0, dashes) if dashes else "-"
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[colour],
                linewidth=width * per_unit,
                linestyle=style,
            )
        case Area(points, colour, opacity, label):
            xs, ys = zip(*points, strict=True) if points else ((), ())
            axes.fill(
                xs, ys, color=COLOURS[colour], alpha=opacity, linewidth=0, label=label
            )
        case Mark(x, y, radius, colour, label):
            axes.plot(
                [x],
                [y],
                "s" if shape.is_square else "o",
                markersize=2 * radius * per_unit,
                markerfacecolor=COLOURS["paper" if shape.is_square else colour],
                markeredgecolor=COLOURS[colour if shape.is_square else "paper"],
                label=label,
            )
        case Words(words, x, y):
            axes.text(
                x,
                y,
                words.replace("$", r"\$"),
                fontsize=shape.size * per_unit,
                color=COLOURS[shape.colour],
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                va="baseline",
                weight="bold" if shape.is_bold else "normal",
            )
