"""The result types of recoup's calls."""

from recoup.core.compiled_plan import CompiledPlan, CompiledStep, MeasuredKind
from recoup.core.graph import Graph
from recoup.core.plan import Plan
from recoup.engine.tiers.account import Usage
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Fit
from recoup.fitting.meter import Reading
from recoup.measurement.advice import Advice, Suggestion
from recoup.precision.ranges import RangeReport, RangeRow
from recoup.train.budgeting.comparison import Comparison, ComparisonRow
from recoup.train.run_results import RunResult, StepResult

__all__ = [
    "Advice",
    "Comparison",
    "ComparisonRow",
    "CompiledFit",
    "CompiledPlan",
    "CompiledStep",
    "Fit",
    "Graph",
    "MeasuredKind",
    "Plan",
    "RangeReport",
    "RangeRow",
    "Reading",
    "RunResult",
    "StepResult",
    "Suggestion",
    "Usage",
]
