"""Results in a notebook: text, and the memory of a step as a small curve."""

from collections.abc import Sequence
from html import escape

from recoup.core.units import print_bytes

_WIDTH, _HEIGHT = 720, 96


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
