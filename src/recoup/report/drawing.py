"""Drawing: scales, ticks and the elements of a chart, as SVG text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

_COLOURS = {
    "paper": "#ffffff",
    "ink": "#1d2733",
    "quiet": "#66727f",
    "line": "#d5dbe1",
    "accent": "#c2410c",
    "fixed": "#9aa5b1",
    "running": "#2a9d8f",
    "replay": "#e9864a",
    "held": "#3b6fb6",
}


def colour(name: str) -> str:
    """Return a colour that a page may redefine and a file by itself has.

    Examples:
        >>> colour("ink")
        'var(--ink, #1d2733)'
    """
    return f"var(--{name}, {_COLOURS[name]})"


def plain_colour(name: str) -> str:
    """Return a colour as a file by itself has it.

    Examples:
        >>> plain_colour("ink")
        '#1d2733'
    """
    return _COLOURS[name]


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight map from numbers to places on the paper.

    Attributes:
        low: The number at the start.
        high: The number at the end.
        start: Where the start is.
        end: Where the end is.
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, number: float) -> float:
        """Return where a number is.

        Examples:
            >>> Scale(0, 10, 100, 0).at(5)
            50.0
        """
        spread = self.high - self.low
        share = (number - self.low) / spread if spread else 0.0
        return round(self.start + share * (self.end - self.start), 1)


def ticks(low: float, high: float, *, base: int = 10, count: int = 5) -> list[float]:
    """Return round numbers between two numbers, about as many as asked for.

    Args:
        low: The least.
        high: The most.
        base: Round in powers of this: 10, or 2 for bytes.
        count: About how many.

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


def element(
    name: str, inner: Iterable[str] | str = (), **attributes: str | float
) -> str:
    """Return an element; an underscore in the name of an attribute is a hyphen.

    What is inside is taken as it is, what attributes say is escaped.

    Examples:
        >>> element("line", x1=0, stroke_width=2)
        '<line x1="0" stroke-width="2"/>'
        >>> element("a", "x", href='"')
        '<a href="&quot;">x</a>'
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(f"{value}")}"'
        for key, value in attributes.items()
    )
    body = inner if isinstance(inner, str) else "".join(inner)
    return f"<{name}{said}>{body}</{name}>" if body else f"<{name}{said}/>"


def text(words: str, x: float, y: float, **attributes: str | float) -> str:
    """Return a line of text, escaped.

    Examples:
        >>> text("<b>", 1, 2)
        '<text x="1" y="2">&lt;b&gt;</text>'
    """
    return element("text", escape(words), x=x, y=y, **attributes)


def picture(inner: Iterable[str], *, width: int, height: int, label: str) -> str:
    """Return a drawing that scales with the page and says what it shows.

    Examples:
        >>> picture([], width=1, height=1, label="nothing").count("<svg")
        1
    """
    return element(
        "svg",
        [element("title", escape(label)), *inner],
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        role="img",
        font_family="system-ui, sans-serif",
        font_size=12,
        fill=colour("ink"),
        style=f"background: {colour('paper')}; width: 100%; height: auto",
    )
