"""The hooks of modules, and what torch does not tell them."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def forward_pre_hooks(module: nn.Module) -> Iterable[Callable[..., Any]]:
    """Return what is called before the module's forward, in order.

    Examples:
        >>> layer = nn.Identity()
        >>> _ = layer.register_forward_pre_hook(print)
        >>> list(forward_pre_hooks(layer))
        [<built-in function print>]
    """
    return module._forward_pre_hooks.values()


def keywords_of_call() -> dict[str, Any]:
    """Return the keyword arguments of the call whose hook asks, from the hook itself.

    A hook for all modules is told the positional ones alone: there is no
    `with_kwargs` for it. They are taken from the frame that calls it.

    Examples:
        >>> from torch.nn.modules.module import register_module_forward_pre_hook
        >>> layer, found = nn.Linear(1, 1), []
        >>> handle = register_module_forward_pre_hook(
        ...     lambda module, args: found.append(keywords_of_call())
        ... )
        >>> import torch
        >>> _ = layer(input=torch.ones(1))
        >>> handle.remove()
        >>> found
        [{'input': tensor([1.])}]
    """
    found = sys._getframe(2).f_locals.get("kwargs")
    return dict(found) if isinstance(found, dict) else {}
