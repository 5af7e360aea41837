"""Make PyTorch training fit in the memory there is.

The public names are listed in `recoup.public` and imported at their first use, so that
reports, plans and the command line work without waiting for torch, or without it.
"""

import importlib
import random
import sys
import types
import typing

if typing.TYPE_CHECKING:
    from recoup.public import *  # noqa: F403 (all of them, by design)
    from recoup.public import __all__ as __all__


class _Package(types.ModuleType):
    """A package whose public names are not hidden by subpackages of the same name.

    Importing `recoup.measure.floor` would otherwise put the package `recoup.measure` in
    the place of the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name == "measure" and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> typing.Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'recoup' has no attribute {name!r}")
        drawn = random.getstate()
        public = importlib.import_module("recoup.public")
        random.setstate(drawn)  # some packages draw from it when they are imported
        if name not in ("__all__", *public.__all__):
            raise AttributeError(f"module 'recoup' has no attribute {name!r}")
        for each in ("__all__", *public.__all__):
            super().__setattr__(each, getattr(public, each))
        return vars(self)[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__getattr__("__all__")})


sys.modules[__name__].__class__ = _Package
