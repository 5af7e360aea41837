"""Every public name, from where it is defined."""

from recoup.api.compiled_fit import CompiledFit
from recoup.api.fit import (
    Fit,
    fit,
)
from recoup.api.manager import CheckpointManager
from recoup.api.measuring import (
    frontier,
    measure,
)
from recoup.api.meter import Meter, Reading
from recoup.core.compiled_plan import CompiledPlan
from recoup.core.errors import (
    BudgetWarning,
    CaptureError,
    ChangedTensorError,
    CheckpointIndexError,
    CheckpointLimitError,
    ClearedError,
    InfeasibleError,
    MismatchError,
    MissingCheckpointError,
    PeerError,
    PlanError,
    RecoupError,
    ReplayError,
    ScheduleError,
    SnapshotError,
    TierError,
    UnsupportedError,
    UsageError,
)
from recoup.core.graph import (
    Graph,
)
from recoup.core.plan import (
    Plan,
)
from recoup.core.segments import (
    Action,
)
from recoup.engine.applying import apply_plan
from recoup.engine.function import (
    checkpoint,
    checkpoint_segment,
    checkpoint_segment_flex,
)
from recoup.engine.group import CheckpointGroup
from recoup.engine.layer_plan import CheckpointConfig
from recoup.engine.layers import ActivationCheckpointer
from recoup.engine.marks import (
    adaptive_checkpoint,
    checkpoint_count,
    clear_checkpoint_marks,
    is_checkpoint,
    keep,
    mark_checkpoint,
    recompute,
    unmark_checkpoint,
)
from recoup.engine.module import (
    checkpoint_module,
    is_checkpointed,
    uncheckpoint_module,
)
from recoup.engine.node import CheckpointNode
from recoup.engine.policies import KeepCostly, KeepSmall, Policy
from recoup.engine.profiler import CheckpointProfiler
from recoup.engine.recomputing import is_recomputing
from recoup.engine.rerun import rerun
from recoup.engine.scope import CheckpointScope
from recoup.engine.tiers.account import Usage, tier_usage
from recoup.engine.tiers.device import Device
from recoup.engine.tiers.disk import Disk
from recoup.engine.tiers.eight_bit import EightBit
from recoup.engine.tiers.half import Half
from recoup.engine.tiers.host import Host
from recoup.engine.tiers.packed import Packed
from recoup.engine.tiers.protocol import ExactTier, LossyTier, Stored, Tier
from recoup.loops.gradients import grad, grad_with_checkpointing
from recoup.loops.loop import checkpointed_loop
from recoup.loops.savings import (
    estimate_checkpoint_savings,
    get_memory_savings,
    should_checkpoint,
)
from recoup.measure.advice import Advice, Suggestion, suggest
from recoup.planners.plan import plan
from recoup.precision.ranges import RangeMonitor, RangeReport, RangeRow
from recoup.precision.scaler import GradientScaler
from recoup.precision.scope import MixedPrecisionScope
from recoup.schedules.even import compute_checkpoint_positions
from recoup.train.averaging import ParameterAverage
from recoup.train.comparison import (
    Comparison,
    ComparisonRow,
    compare_configurations,
)
from recoup.train.results import RunResult, StepResult
from recoup.train.settings import TrainerSettings
from recoup.train.trainer import Trainer

__all__ = [
    "Action",
    "ActivationCheckpointer",
    "Advice",
    "BudgetWarning",
    "CaptureError",
    "ChangedTensorError",
    "CheckpointConfig",
    "CheckpointGroup",
    "CheckpointIndexError",
    "CheckpointLimitError",
    "CheckpointManager",
    "CheckpointNode",
    "CheckpointProfiler",
    "CheckpointScope",
    "ClearedError",
    "Comparison",
    "ComparisonRow",
    "CompiledFit",
    "CompiledPlan",
    "Device",
    "Disk",
    "EightBit",
    "ExactTier",
    "Fit",
    "GradientScaler",
    "Graph",
    "Half",
    "Host",
    "InfeasibleError",
    "KeepCostly",
    "KeepSmall",
    "LossyTier",
    "Meter",
    "MismatchError",
    "MissingCheckpointError",
    "MixedPrecisionScope",
    "Packed",
    "ParameterAverage",
    "PeerError",
    "Plan",
    "PlanError",
    "Policy",
    "RangeMonitor",
    "RangeReport",
    "RangeRow",
    "Reading",
    "RecoupError",
    "ReplayError",
    "RunResult",
    "ScheduleError",
    "SnapshotError",
    "StepResult",
    "Stored",
    "Suggestion",
    "Tier",
    "TierError",
    "Trainer",
    "TrainerSettings",
    "UnsupportedError",
    "Usage",
    "UsageError",
    "adaptive_checkpoint",
    "apply_plan",
    "checkpoint",
    "checkpoint_count",
    "checkpoint_module",
    "checkpoint_segment",
    "checkpoint_segment_flex",
    "checkpointed_loop",
    "clear_checkpoint_marks",
    "compare_configurations",
    "compute_checkpoint_positions",
    "estimate_checkpoint_savings",
    "fit",
    "frontier",
    "get_memory_savings",
    "grad",
    "grad_with_checkpointing",
    "is_checkpoint",
    "is_checkpointed",
    "is_recomputing",
    "keep",
    "mark_checkpoint",
    "measure",
    "plan",
    "recompute",
    "rerun",
    "should_checkpoint",
    "suggest",
    "tier_usage",
    "uncheckpoint_module",
    "unmark_checkpoint",
]
