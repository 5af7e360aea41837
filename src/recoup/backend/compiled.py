"""Recognise functions and modules that torch.compile has compiled."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])


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


def original_of(function: Any) -> Any:
    """Return the function that was compiled, or the function itself.

    Examples:
        >>> original_of(len) is len
        True
    """
    if isinstance(function, functools.partial):
        return original_of(function.func)
    module = getattr(function, "_orig_mod", None)
    if module is not None:
        return module
    return getattr(function, "_torchdynamo_orig_callable", function)


def leave_uncompiled(function: Hook) -> Hook:
    """Keep torch.compile from tracing a function, and all it calls; return it.

    A compiled function that is called inside a region would otherwise make it compile
    the recorder, and hooks of a model that is compiled would be taken for a part of the
    model, and open no region. Unlike `torch.compiler.disable`, this wraps nothing and
    so costs nothing per call, and it does not import the compiler.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "recoup's own code is not compiled"
    frames: Any = getattr(torch._C, "_dynamo").eval_frame  # noqa: B009 (no stub)
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(
        marked.__code__, frames._FrameExecStrategy(skip, skip)
    )
    return function


def call_slot(module: nn.Module) -> str:
    """Return the attribute through which calling a compiled module goes."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def _is_compiled_module(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(
        hasattr(part, "_orig_mod") or part._compiled_call_impl is not None
        for part in module.modules()
    )
