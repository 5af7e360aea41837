"""Take the fastest of several fits of one step."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from recoup.core.units import print_bytes, print_seconds
from recoup.errors import InfeasibleError, UnsupportedError
from recoup.fitting.fit_result import FitResult

Found = TypeVar("Found", bound=FitResult)


def fastest(contenders: Mapping[str, Callable[[], Found]]) -> Found:
    """Fit with each contender, remove all but the fastest, and return that one.

    Args:
        contenders: For each name a function that fits, and may leave its plan applied.

    Raises:
        InfeasibleError: None of them fits.
        UnsupportedError: None of them can run the model.
    """
    fits: list[Found] = []
    said: dict[str, str] = {}
    failed: InfeasibleError | UnsupportedError | None = None
    for name, fitted in contenders.items():
        try:
            found = fitted()
        except (InfeasibleError, UnsupportedError) as error:
            failed, said[name] = error, _why(error)
            continue
        fits.append(found)
        said[name] = print_seconds(found.measured_seconds)
    if not fits:
        assert failed is not None, "each contender fits or fails"
        raise failed
    best = min(fits, key=lambda found: found.measured_seconds)
    for other in fits:
        if other is not best:
            other.remove()
    if len(contenders) > 1:
        best.contenders = said
    return best


def _why(error: InfeasibleError | UnsupportedError) -> str:
    if isinstance(error, InfeasibleError):
        return f"needs {print_bytes(error.floor_bytes)}"
    return f"cannot ({str(error).partition('. ')[0]})"
