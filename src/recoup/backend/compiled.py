"""Recognise functions and modules that torch.compile has compiled."""

import functools
from typing import Any

from torch import nn


def is_compiled(function: Any) -> bool:
    """Return whether a function, or any module it is or belongs to, is compiled.

    A compiled function that is called under a dispatch mode runs uncompiled, silently.
    So it cannot be recorded; it is run again instead.
    """
    if isinstance(function, functools.partial):
        return is_compiled(function.func) or any(
            map(_is_compiled_module, function.args)
        )
    if isinstance(function, nn.Module):
        return _is_compiled_module(function)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and _is_compiled_module(owner):
        return True
    return hasattr(function, "_torchdynamo_orig_callable")


def call_slot(module: nn.Module) -> str:
    """Return the attribute through which calling a compiled module goes."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def _is_compiled_module(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(
        hasattr(part, "_orig_mod") or part._compiled_call_impl is not None
        for part in module.modules()
    )
