"""Ways to run a block: plainly, with torch's checkpointing, with recoup."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import recoup
from recoup.backend.operators.dispatch import OperatorMode
from recoup.cli.gpt import Block, RunBlock, run_plain

COSTLY = (
    "mm addmm bmm _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
"""Matrix products and attention, as in torch's own examples of selective policies."""

SAVED = {getattr(torch.ops.aten, name).default for name in COSTLY.split()}


class IdleMode(OperatorMode):
    """See every operator and do nothing about it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        return func(*args, **(kwargs or {}))


def run_watched(block: Block, hidden: Tensor) -> Tensor:
    """Run under a mode and hooks that do nothing: what any tape costs at the least."""
    with IdleMode(), saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return block(hidden)


def run_checkpoint(block: Block, hidden: Tensor) -> Tensor:
    return checkpoint(block, hidden, use_reentrant=False)


def run_selective(policy: Callable[..., Any], block: Block, hidden: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)


def recompute_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def save_costly(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    saved = operator in SAVED
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def run_scope(block: Block, hidden: Tensor) -> Tensor:
    with recoup.CheckpointScope("block"):
        return block(hidden)


def run_scope_keeping_costly(block: Block, hidden: Tensor) -> Tensor:
    with recoup.CheckpointScope("block", policy=recoup.KeepCostly()):
        return block(hidden)


CONTENDERS: dict[str, RunBlock] = {
    "plain": run_plain,
    "idle mode and hooks": run_watched,
    "torch checkpoint": run_checkpoint,
    "torch SAC, recompute all": partial(run_selective, recompute_all),
    "torch SAC, keep costly": partial(run_selective, save_costly),
    "recoup scope": run_scope,
    "recoup scope, keep costly": run_scope_keeping_costly,
}
