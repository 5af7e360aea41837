"""Recognise functions and modules compiled by torch.compile or sharded by FSDP."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])


def is_compiled(function: Any) -> bool:
    """Return whether a function, or any module it is or belongs to, is compiled.

    A compiled function silently runs uncompiled under a dispatch mode. So it cannot be
    recorded, and is rerun as a whole instead.
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
    """Return the user's function or module, without compilation and partials.

    Examples:
        >>> original_of(len) is len
        True
        >>> module = nn.Tanh()
        >>> original_of(functools.partial(module.__call__)) is module
        True
    """
    function = uncompiled(function)
    if isinstance(function, functools.partial):
        return original_of(function.func)
    return function


def uncompiled(function: Any) -> Any:
    """Return the argument that was given to the compiler, or the function itself."""
    if isinstance(function, MethodType):
        return _original_method(function)
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        inside = getattr(function, name, None)
        if inside is not None:
            return uncompiled(inside)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and _is_of_compiler(function):
        return uncompiled(wrapped)
    return function


def eager(model: nn.Module) -> nn.Module:
    """Return the model as it was before `torch.compile` wrapped it."""
    found = uncompiled(model)
    return found if isinstance(found, nn.Module) else model


def _original_method(method: MethodType) -> Any:
    owner, function = method.__self__, method.__func__
    if isinstance(owner, nn.Module) and function.__module__ == nn.Module.__module__:
        return uncompiled(owner)  # torch's wrapper of any module's call
    inside = uncompiled(function)
    return method if inside is function else MethodType(inside, owner)


def _is_of_compiler(function: Any) -> bool:
    # Its wrappers copy `__module__` from the wrapped callable, but not the globals.
    names: dict[str, Any] = getattr(function, "__globals__", {})
    return names.get("__name__", "").startswith("torch._dynamo")


def sees_operators() -> bool:
    """Return whether a dispatch mode is active, which compiled code would bypass.

    Examples:
        >>> sees_operators()
        False
    """
    return torch._C._len_torch_dispatch_stack() > 0


def leave_uncompiled(function: Hook) -> Hook:
    """Exclude a function and its callees from torch.compile; return the function.

    Otherwise a compiled function called inside a region would compile the recorder, and
    hooks of a compiled model would be compiled with it and open no region. Unlike
    `torch.compiler.disable`, this adds no wrapper, hence no cost per call, and does not
    import the compiler.
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


def is_sharded(kind: type[nn.Module]) -> bool:
    """Return whether a class was created by `fully_shard`."""
    # By name: the class itself is slow to import.
    return kind.__module__.startswith("torch.distributed.fsdp")


def call_slot(module: nn.Module) -> str:
    """Return the attribute that a call of a compiled module runs."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def _is_compiled_module(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(
        part._compiled_call_impl is not None or has_compiled_forward(part)
        for part in module.modules()
    )


def has_compiled_forward(module: nn.Module) -> bool:
    """Return whether a module's `forward` was replaced by a compiled function.

    Also handles the modules that `torch.compile` returns.
    """
    forward = vars(module).get("forward")
    wrapped = vars(module).get("_modules", {}).get("_orig_mod")
    if wrapped is not None:
        return getattr(forward, "__self__", None) is not wrapped
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(
        forward, "_torchdynamo_disable", False
    )
