"""The trainer, and its parts that serve any training loop."""

from recoup.train.budgeting.comparison import compare_configurations
from recoup.train.budgeting.recovery import StepRecovery
from recoup.train.saving.averaging import ParameterAverage
from recoup.train.saving.resumable import ResumableRun
from recoup.train.settings import TrainerSettings
from recoup.train.trainer import Trainer

__all__ = [
    "ParameterAverage",
    "ResumableRun",
    "StepRecovery",
    "Trainer",
    "TrainerSettings",
    "compare_configurations",
]
