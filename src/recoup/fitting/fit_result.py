"""The result of `fit` with any executor, and the fastest of several."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import nn

from recoup.core.graph import Graph
from recoup.core.units import print_bytes, print_seconds
from recoup.errors import InfeasibleError, UnsupportedError
from recoup.report.findings import Findings
from recoup.report.pages import fragment, page

Found = TypeVar("Found", bound="FitResult")


@dataclass(repr=False, kw_only=True)
class FitResult(ABC):
    """The common part of all results of `fit`; `Fit` and `CompiledFit` extend it.

    Attributes:
        model: The model with the plan applied; several are in a `ModuleList`.
        graph: The measured eager step.
        budget_bytes: The budget.
        plain_peak_bytes: The predicted peak of the plain step.
        plain_seconds: The predicted time of that step; if memory allowed, the measured
            one: with `compile=`, and on a CPU in turns with the plan.
        predicted_peak_bytes: The predicted peak with the plan.
        predicted_seconds: The predicted time of a step with the plan, corrected by the
            steps that `fit` ran.
        measured_peak_bytes: The measured peak of a real step with the plan.
        measured_seconds: The measured time of a real step with the plan.
        reserved_bytes: Bytes reserved for optimizer state that does not exist yet.
        total_seconds: The duration of `fit`.
        rounds: The number of plans tried on a real step.
        contenders: With `compile="auto"`: for each executor the time of its step, or
            why it cannot run it.
    """

    model: nn.Module
    graph: Graph = field(repr=False)
    budget_bytes: int
    plain_peak_bytes: int
    plain_seconds: float
    predicted_peak_bytes: int
    predicted_seconds: float
    measured_peak_bytes: int
    measured_seconds: float
    reserved_bytes: int
    total_seconds: float = 0.0
    rounds: int
    contenders: Mapping[str, str] = field(
        default_factory=dict[str, str], repr=False, kw_only=True
    )

    _COSTS: ClassVar[tuple[str, ...]] = (
        "budget_bytes",
        "floor_bytes",
        "plain_peak_bytes",
        "plain_seconds",
        "predicted_peak_bytes",
        "predicted_seconds",
        "measured_peak_bytes",
        "measured_seconds",
        "total_seconds",
    )

    @abstractmethod
    def remove(self) -> nn.Module:
        """Remove the plan from the model, restoring its state before `fit`."""

    @abstractmethod
    def findings(self, *, title: str = "", points: int = 7) -> Findings:
        """Return the findings for `recoup.report`.

        Args:
            title: The title; by default the class of the model.
            points: The number of other plans to make.
        """

    def numbers(self) -> dict[str, Any]:
        """Return the costs as plain data, for other programs."""
        found = {name: getattr(self, name) for name in self._COSTS}
        if self.contenders:
            found["contenders"] = dict(self.contenders)
        return found

    def write_page(self, path: str | Path, *, title: str = "") -> Path:
        """Write one self-contained HTML page: memory, plans, blocks, baselines."""
        target = Path(path)
        target.write_text(page(self.findings(title=title)), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        return fragment(self.findings(points=0))

    def _compared(self) -> str:
        """Describe the contenders; empty without any."""
        if not self.contenders:
            return ""
        found = ", ".join(f"{name} {said}" for name, said in self.contenders.items())
        return f"; measured: {found}"

    def _memory(self, peak_bytes: int, how: str = "measured") -> str:
        return (
            f"{type(self).__name__} of {type(self.model).__name__}: peak "
            f"{print_bytes(peak_bytes)} ({how}), budget "
            f"{print_bytes(self.budget_bytes)}, plain "
            f"{print_bytes(self.plain_peak_bytes)}"
        )


def fastest(contenders: Mapping[str, Callable[[], Found]]) -> Found:
    """Fit with each contender, remove all but the fastest, and return that one.

    Args:
        contenders: By name, functions that fit, and may leave their plans applied.

    Raises:
        InfeasibleError: None of them fits.
        UnsupportedError: None of them can run the model.
    """
    fits: list[Found] = []
    said: dict[str, str] = {}
    failed: InfeasibleError | UnsupportedError | None = None
    for name, fitted in contenders.items():
        try:
            found = fitted()
        except (InfeasibleError, UnsupportedError) as error:
            failed, said[name] = error, _why(error)
            continue
        fits.append(found)
        said[name] = print_seconds(found.measured_seconds)
    if not fits:
        assert failed is not None, "each contender fits or fails"
        raise failed
    best = min(fits, key=lambda found: found.measured_seconds)
    for other in fits:
        if other is not best:
            other.remove()
    if len(contenders) > 1:
        best.contenders = said
    return best


def _why(error: InfeasibleError | UnsupportedError) -> str:
    if isinstance(error, InfeasibleError):
        return f"needs {print_bytes(error.floor_bytes)}"
    return f"cannot ({str(error).partition('. ')[0]})"
