"""Values outside the range of a number format, by module and operator."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from recoup.backend.operators.dispatch import OperatorMode
from recoup.backend.state.trees import tensors
from recoup.errors import UsageError
from recoup.precision.mixed_precision import FORMATS, check_precision

_EVERYWHERE = "Global"


@dataclass(frozen=True, slots=True)
class RangeRow:
    """The results of one operator of one module, over all its runs.

    Attributes:
        module: The innermost module that ran, by its name in the model.
        operator: The operator.
        in_backward: Whether it ran in backward, on gradients.
        elements: Elements produced.
        overflows: Finite elements too large for the format, and elements that are
            already infinite or NaN.
        underflows: Elements that the format would turn into zero.
        largest: The largest finite absolute value.
        smallest: The smallest absolute value above zero, infinite if there is none.
    """

    module: str
    operator: str
    in_backward: bool
    elements: int
    overflows: int
    underflows: int
    largest: float
    smallest: float


@dataclass(frozen=True, slots=True)
class RangeReport:
    """The values of a step outside the range of a format, in execution order."""

    precision: str
    rows: tuple[RangeRow, ...]

    @property
    def overflowing(self) -> tuple[RangeRow, ...]:
        """The rows with overflows, the first to happen first."""
        return tuple(row for row in self.rows if row.overflows)

    @property
    def underflowing(self) -> tuple[RangeRow, ...]:
        """The rows with underflows, the largest share first."""
        rows = (row for row in self.rows if row.underflows)
        return tuple(sorted(rows, key=lambda row: -row.underflows / row.elements))

    def __str__(self) -> str:
        total = sum(row.elements for row in self.rows)
        over = sum(row.overflows for row in self.rows)
        under = sum(row.underflows for row in self.rows)
        lines = [
            f"{self.precision}: of {total} values {over} overflow and {under} underflow"
        ]
        lines += [
            f"  {row.module or 'outside any module'}, {row.operator}, "
            f"{'backward' if row.in_backward else 'forward'}: {row.overflows} overflow "
            f"(largest {row.largest:.3g}), {row.underflows} underflow "
            f"(smallest {row.smallest:.3g}) of {row.elements}"
            for row in self.rows
            if row.overflows or row.underflows
        ]
        return "\n".join(lines)


class RangeMonitor(OperatorMode):
    """Watch a step and report values outside the range of a format.

    Run a step in float32 inside it to see the effect of float16, or a step in mixed
    precision to find the operator that overflows first. Gradients are not scaled: scale
    the loss as in training to see the effect of the scale.

    Costs: a few passes over every result, and memory for one copy of it; for diagnosis,
    not for every step. It synchronises once, in `report`.

    Args:
        precision: The format: `"fp16"`, `"bf16"` or `"fp32"`.

    Raises:
        UsageError: It is none of these.

    Examples:
        >>> with RangeMonitor("fp16") as monitor:
        ...     y = torch.tensor([1.0, 1e5, 1e-9]) * 1.0
        >>> report = monitor.report()
        >>> [(row.operator, row.overflows, row.underflows) for row in report.rows]
        [('aten.mul.Tensor', 1, 1)]
    """

    def __init__(self, precision: str | torch.dtype = "fp16") -> None:
        super().__init__()
        self._name = check_precision(precision)
        if self._name not in FORMATS:
            raise UsageError(
                f"expected one format, fp16, bf16 or fp32, got {precision!r}."
            )
        self._format = FORMATS[self._name]
        self._tracker = ModuleTracker()
        self._found: dict[tuple[str, str, bool], list[Tensor]] = {}
        self._elements: dict[tuple[str, str, bool], int] = {}

    def __enter__(self) -> Self:
        self._tracker.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tracker.__exit__(*error)

    def report(self) -> RangeReport:
        """Return the statistics so far; synchronises."""
        rows = []
        for key, found in self._found.items():
            module, operator, in_backward = key
            over, under, largest, smallest = (value.item() for value in found)
            rows.append(
                RangeRow(
                    module=module,
                    operator=operator,
                    in_backward=in_backward,
                    elements=self._elements[key],
                    overflows=int(over),
                    underflows=int(under),
                    largest=largest,
                    smallest=smallest,
                )
            )
        return RangeReport(self._name, tuple(rows))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then inspect its results."""
        del types
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            for tensor in tensors(result):
                self._look(str(func), tensor)
        return result

    def _look(self, operator: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or not tensor.numel():
            return
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        tracker: Any = self._tracker
        key = _innermost(tracker.parents), operator, bool(tracker.is_bw)
        seen = _statistics(tensor.detach(), self._format)
        known = self._found.get(key)
        self._elements[key] = self._elements.get(key, 0) + tensor.numel()
        self._found[key] = seen if known is None else _merged(known, seen)


def _statistics(tensor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return overflows, underflows, and the largest and smallest magnitude."""
    size = tensor.abs().double()
    finite, there = size.isfinite(), size > 0
    nothing = torch.zeros((), dtype=size.dtype, device=size.device)
    # Rounded by the format itself: values above its largest become infinite.
    rounded = size.to(dtype)
    return [
        (~rounded.isfinite()).sum(),
        (there & (rounded == 0)).sum(),
        torch.where(finite, size, nothing).amax(),
        torch.where(there & finite, size, torch.inf).amin(),
    ]


def _merged(known: list[Tensor], seen: list[Tensor]) -> list[Tensor]:
    return [
        known[0] + seen[0],
        known[1] + seen[1],
        torch.maximum(known[2], seen[2]),
        torch.minimum(known[3], seen[3]),
    ]


def _innermost(names: Iterable[str]) -> str:
    inside = [name for name in names if name != _EVERYWHERE]
    deepest = max(inside, key=lambda name: (name.count("."), name), default="")
    # The tracker prepends the class of the outermost module.
    return deepest.partition(".")[2] or deepest
