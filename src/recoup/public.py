"""The names at the top of recoup, each from the module that defines it."""

from recoup.core.graph import Graph
from recoup.core.plan import Plan
from recoup.core.segments import Action
from recoup.engine.applied.applying import apply_plan
from recoup.engine.layers.checkpointer import ActivationCheckpointer
from recoup.engine.layers.layer_plan import CheckpointConfig
from recoup.engine.replay.rerun import rerun
from recoup.engine.scopes.function import CheckpointGroup, checkpoint
from recoup.engine.scopes.marks import keep, recompute
from recoup.engine.scopes.module import checkpoint_module, uncheckpoint_module
from recoup.engine.scopes.policies import KeepCostly, KeepSmall
from recoup.engine.scopes.profiler import CheckpointProfiler
from recoup.engine.scopes.scope import CheckpointScope
from recoup.engine.tiers.device import Device
from recoup.engine.tiers.disk import Disk
from recoup.engine.tiers.eight_bit import EightBit
from recoup.engine.tiers.half import Half
from recoup.engine.tiers.host import Host
from recoup.engine.tiers.packed import Packed
from recoup.fitting.fit import fit
from recoup.fitting.largest_batch import LargestBatch, largest_batch
from recoup.fitting.managing.manager import CheckpointManager
from recoup.fitting.measuring import frontier, measure
from recoup.fitting.meter import Meter
from recoup.loops.gradients import grad_with_checkpointing
from recoup.loops.loop import checkpointed_loop
from recoup.measurement.advice import suggest
from recoup.planners.planner import plan
from recoup.precision.mixed_precision import MixedPrecisionScope
from recoup.precision.scaler import GradientScaler
from recoup.train.settings import TrainerSettings
from recoup.train.trainer import Trainer

__all__ = [
    "Action",
    "ActivationCheckpointer",
    "CheckpointConfig",
    "CheckpointGroup",
    "CheckpointManager",
    "CheckpointProfiler",
    "CheckpointScope",
    "Device",
    "Disk",
    "EightBit",
    "GradientScaler",
    "Graph",
    "Half",
    "Host",
    "KeepCostly",
    "KeepSmall",
    "LargestBatch",
    "Meter",
    "MixedPrecisionScope",
    "Packed",
    "Plan",
    "Trainer",
    "TrainerSettings",
    "apply_plan",
    "checkpoint",
    "checkpoint_module",
    "checkpointed_loop",
    "fit",
    "frontier",
    "grad_with_checkpointing",
    "keep",
    "largest_batch",
    "measure",
    "plan",
    "recompute",
    "rerun",
    "suggest",
    "uncheckpoint_module",
]
