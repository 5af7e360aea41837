"""Checkpoint by hand: scopes, functions, modules, groups, marks, policies."""

from recoup.engine.replay.recomputing import is_recomputing
from recoup.engine.replay.rerun import rerun
from recoup.engine.scopes.checkpoint_node import CheckpointNode
from recoup.engine.scopes.function import (
    CheckpointGroup,
    checkpoint,
    checkpoint_segment,
    checkpoint_segment_flex,
)
from recoup.engine.scopes.marks import (
    adaptive_checkpoint,
    checkpoint_count,
    clear_checkpoint_marks,
    is_checkpoint,
    keep,
    mark_checkpoint,
    recompute,
    unmark_checkpoint,
)
from recoup.engine.scopes.module import (
    checkpoint_module,
    is_checkpointed,
    uncheckpoint_module,
)
from recoup.engine.scopes.policies import KeepCostly, KeepSmall, Policy
from recoup.engine.scopes.profiler import CheckpointProfiler
from recoup.engine.scopes.scope import CheckpointScope
from recoup.fitting.managing.manager import CheckpointManager

__all__ = [
    "CheckpointGroup",
    "CheckpointManager",
    "CheckpointNode",
    "CheckpointProfiler",
    "CheckpointScope",
    "KeepCostly",
    "KeepSmall",
    "Policy",
    "adaptive_checkpoint",
    "checkpoint",
    "checkpoint_count",
    "checkpoint_module",
    "checkpoint_segment",
    "checkpoint_segment_flex",
    "clear_checkpoint_marks",
    "is_checkpoint",
    "is_checkpointed",
    "is_recomputing",
    "keep",
    "mark_checkpoint",
    "recompute",
    "rerun",
    "uncheckpoint_module",
    "unmark_checkpoint",
]
