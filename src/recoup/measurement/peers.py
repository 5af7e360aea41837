"""PyTorch's own checkpointing tools, applied to the blocks of a model."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from recoup.engine.applied.model_blocks import block_names

Forward = Callable[..., Any]
Context = Callable[[nn.Module], AbstractContextManager[Any]]
"""Puts something around the blocks of a model while it is entered."""

COMPUTE_INTENSIVE = (
    "mm addmm bmm convolution upsample_bilinear2d _scaled_mm "
    "_flash_attention_forward _efficient_attention_forward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"
)
"""The operators that torch's own partitioner takes to be dear by default, and the other
kernels of attention."""

_SAVED = {getattr(torch.ops.aten, name).default for name in COMPUTE_INTENSIVE.split()}


@contextmanager
def wrapped(
    model: nn.Module, *, wrap: Callable[[Forward], Forward], step: int = 1
) -> Generator[None]:
    """Call one of so many blocks of a model through something else in the block."""
    with ExitStack() as stack:
        for name in block_names(model)[::step]:
            module = model.get_submodule(name)
            module.__dict__["forward"] = wrap(module.forward)
            stack.callback(module.__dict__.pop, "forward")
        yield


def _checkpointed(forward: Forward) -> Forward:
    return partial(checkpoint, forward, use_reentrant=False)


def _selective(forward: Forward) -> Forward:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    saved = operator in _SAVED
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


PEERS: dict[str, Context] = {
    "torch checkpoint, every block": partial(wrapped, wrap=_checkpointed),
    "torch checkpoint, every second block": partial(
        wrapped, wrap=_checkpointed, step=2
    ),
    "torch SAC, default list": partial(wrapped, wrap=_selective),
}
"""By the names that tables give them."""
