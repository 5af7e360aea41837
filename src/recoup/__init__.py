"""Make PyTorch training fit in the memory you have.

The names are imported from `recoup.public` at their first use, so that reports, plans
and the command line start without torch. Everything else is in the parts below.
"""

import importlib
import random
import typing

from recoup.core import version as _version

if typing.TYPE_CHECKING:
    from recoup import checkpointing as checkpointing
    from recoup import errors as errors
    from recoup import loops as loops
    from recoup import precision as precision
    from recoup import results as results
    from recoup import schedules as schedules
    from recoup import tiers as tiers
    from recoup import train as train
    from recoup.public import *  # noqa: F403 (all of them, by design)
    from recoup.public import __all__ as __all__

__version__ = _version.VERSION
_PARTS = (
    "checkpointing",
    "errors",
    "integrations",
    "loops",
    "precision",
    "results",
    "schedules",
    "tiers",
    "train",
)


def __getattr__(name: str) -> typing.Any:
    if name in _PARTS:
        return _imported(name)
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'recoup' has no attribute {name!r}")
    public = _imported("public")
    if name not in ("__all__", *public.__all__):
        raise AttributeError(f"module 'recoup' has no attribute {name!r}{_hint(name)}")
    for each in ("__all__", *public.__all__):
        globals()[each] = getattr(public, each)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS, *__getattr__("__all__")})


def _imported(part: str) -> typing.Any:
    drawn = random.getstate()
    found = importlib.import_module(f"recoup.{part}")
    random.setstate(drawn)  # some packages draw from it at import
    return found


def _hint(name: str) -> str:
    for part in _PARTS:
        if name in getattr(_imported(part), "__all__", ()):
            return f"; import it from recoup.{part}"
    return ""
