"""PyTorch's own checkpointing tools, applied to the blocks of a model."""

from collections.abc import Callable, Generator, Sequence
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
    model: nn.Module, names: Sequence[str], wrap: Callable[[Forward], Forward]
) -> Generator[None]:
    """Call the named modules through something else while the block runs."""
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            module.__dict__["forward"] = wrap(module.forward)
            stack.callback(module.__dict__.pop, "forward")
        yield


@contextmanager
def plain(model: nn.Module) -> Generator[None]:
    """Leave the model as it is."""
    del model
    yield


@contextmanager
def every_block(model: nn.Module) -> Generator[None]:
    """Put torch's checkpoint around every block."""
    with wrapped(model, block_names(model), _checkpointed):
        yield


@contextmanager
def every_second_block(model: nn.Module) -> Generator[None]:
    """Put torch's checkpoint around every second block."""
    with wrapped(model, block_names(model)[::2], _checkpointed):
        yield


@contextmanager
def selective_blocks(model: nn.Module) -> Generator[None]:
    """Put torch's selective checkpoint around every block, with its own list."""
    with wrapped(model, block_names(model), _selective):
        yield


PEERS: dict[str, Context] = {
    "torch checkpoint, every block": every_block,
    "torch checkpoint, every second block": every_second_block,
    "torch SAC, default list": selective_blocks,
}
"""By the names that tables give them."""


def _checkpointed(forward: Forward) -> Forward:
    return partial(checkpoint, forward, use_reentrant=False)


def _selective(forward: Forward) -> Forward:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    saved = operator in _SAVED
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
