"""Suspend the user's compiled modules and functions, and restore them later.

A compiled module runs uncompiled under a dispatch mode, and the user's compiler chooses
its own partition. So planned blocks are recompiled, and the user's compilation is
restored when the plan is removed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from recoup.backend.compiler.recognition import has_compiled_forward, uncompiled

_WRAPPED = "_orig_mod"


class SuspendedCompilation:
    """Compiled parts of a model that run uncompiled until `restore`.

    Covers `module.compile()`, `torch.compile(module)` in place of a module, and a
    compiled function in place of a module's `forward`. Compiled functions that the
    model calls are not suspended: they do not belong to it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        for module in model.modules():
            if module._compiled_call_impl is not None:
                self._note(module, "_compiled_call_impl")
            if has_compiled_forward(module):
                self._note(module, "forward")
        for module, name, found in self._replaced:
            del vars(module)[name]
            if name == "forward":
                written = _written(module, found)
                if written != getattr(module, name, None):
                    vars(module)[name] = written

    def _note(self, module: nn.Module, name: str) -> None:
        self._replaced.append((module, name, vars(module)[name]))

    def restore(self) -> None:
        """Restore the compiled modules and functions."""
        for module, name, found in self._replaced:
            vars(module)[name] = found
        self._replaced = []


@contextmanager
def suspended_compilation(model: nn.Module) -> Iterator[None]:
    """Run the compiled parts of a model uncompiled in the block."""
    suspended = SuspendedCompilation(model)
    try:
        yield
    finally:
        suspended.restore()


def written_path(model: nn.Module, path: str) -> str:
    """Return the path of the user's module, inside `torch.compile`'s wrappers.

    Examples:
        >>> written_path(nn.Sequential(nn.Tanh()), "0")
        '0'
    """
    module = model.get_submodule(path)
    while _WRAPPED in vars(module).get("_modules", {}):
        path = f"{path}.{_WRAPPED}" if path else _WRAPPED
        module = model.get_submodule(path)
    return path


def _written(module: nn.Module, found: Any) -> Any:
    wrapped = vars(module).get("_modules", {}).get(_WRAPPED)
    return uncompiled(found) if wrapped is None else wrapped.__call__
