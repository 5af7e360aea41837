"""Results as text: tables for a terminal; for a notebook HTML with a small curve."""

from collections.abc import Sequence
from html import escape

from recoup.core.units import print_bytes

WIDTH = 80
"""The minimum number of columns of a terminal."""

_LEAST_NAME = 16
_WIDTH, _HEIGHT = 720, 96


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, ruled: bool = True
) -> str:
    """Return rows in columns; all but the first column are right-aligned.

    Long cells of the first column are shortened if the table is too wide.

    Examples:
        >>> print(table(["block", "saved"], [["h.0", "12 B"], ["h.10", "1 B"]]))
        block  saved
        -----  -----
        h.0     12 B
        h.10     1 B
    """
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    if over > 0:
        widths[0] = max(min(_LEAST_NAME, widths[0]), widths[0] - over)
    rules = [["-" * width for width in widths]] * ruled
    lines: list[str] = []
    for name, *cells in (headings, *rules, *rows):
        padded = [c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)]
        first = _shortened(name, widths[0]).ljust(widths[0])
        lines.append("  ".join([first, *padded]).rstrip())
    return "\n".join(lines)


def _shortened(cell: str, width: int) -> str:
    """Return a cell that fits; three dots replace its middle."""
    if len(cell) <= width:
        return cell
    head = (width - 3) // 2
    return f"{cell[:head]}...{cell[len(cell) - (width - 3 - head) :]}"


def as_html(text: str, bytes_at: Sequence[int] = ()) -> str:
    """Return text as HTML, with a curve of the bytes in use at each moment.

    Examples:
        >>> as_html("a < b")
        '<pre style="white-space:pre-wrap">a &lt; b</pre>'
        >>> "peak 2 KiB" in as_html("", (1024, 2048, 512))
        True
    """
    pre = f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'
    peak_bytes = max(bytes_at, default=0)
    if not peak_bytes:
        return pre
    wide = _WIDTH / len(bytes_at)
    corners = "".join(
        f"V{_HEIGHT * (1 - nbytes / peak_bytes):.1f}H{(n + 1) * wide:.1f}"
        for n, nbytes in enumerate(bytes_at)
    )
    label = f"Memory over the step: peak {print_bytes(peak_bytes)}"
    return (
        f'{pre}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{label}" style="max-width:{_WIDTH}px"><title>{label}</title>'
        f'<path d="M0 {_HEIGHT}{corners}V{_HEIGHT}Z" fill="#3b6fb6"/></svg>'
    )
