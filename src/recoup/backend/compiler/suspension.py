"""Run what the user has compiled as it was written, for a while.

A compiled module runs uncompiled under a dispatch mode, and a compiler of a whole block
partitions it by its own choice. Blocks that are planned are therefore compiled anew,
and what the user compiled comes back when the plan is removed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from recoup.backend.compiler.recognition import has_compiled_forward, uncompiled

_WRAPPED = "_orig_mod"


class SuspendedCompilation:
    """Compiled parts of a model that run as they were written, until `restore`.

    `module.compile()`, `torch.compile(module)` in place of a module, and a compiled
    function in place of a module's `forward` are suspended. Compiled functions that the
    model calls are not: they do not belong to it.
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
        """Compile again what was compiled."""
        for module, name, found in self._replaced:
            vars(module)[name] = found
        self._replaced = []


@contextmanager
def suspended_compilation(model: nn.Module) -> Iterator[None]:
    """Run the compiled parts of a model as they were written, inside a block."""
    suspended = SuspendedCompilation(model)
    try:
        yield
    finally:
        suspended.restore()


def written_path(model: nn.Module, path: str) -> str:
    """Return the path of the module that the user wrote, behind `torch.compile`.

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
