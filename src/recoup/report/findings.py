"""Findings: all data of a report, immutable, and as a JSON file."""

from dataclasses import dataclass, field

from recoup.core.readings import DataFile, Signed
from recoup.errors import UsageError

CATEGORIES = ("fixed", "held", "running", "recomputed", "workspace")
"""The purpose of bytes: in every step, saved for backward, temporaries of forward,
recomputed for backward, temporaries of recomputing."""


@dataclass(frozen=True, slots=True)
class Part:
    """The operators of one module in one block of forward.

    Attributes:
        block: The block.
        module: The path of the innermost module; empty: the model itself.
        operators: The number of operators that forward runs in it.
        seconds: Their time.
        saved_bytes: Bytes that plain autograd saves of the values made in it.
    """

    block: str
    module: str
    operators: int
    seconds: float
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """One operator of forward or backward.

    Attributes:
        operator: Its name, as an index into `Step.operators`. In backward: the operator
            of forward whose saved result is needed next.
        part: The part of forward with that operator, as an index into `Step.parts`.
        other_bytes: Memory that no plan changes; negative where fewer bytes were
            measured than the tensors account for.
        seconds: Its time; in backward an equal share of the total.
    """

    operator: int
    part: int
    other_bytes: Signed
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """A training step as measured, the same for every plan.

    Attributes:
        operators: The names of operators.
        parts: The modules of each block, in the order of forward.
        moments: The operators of forward and backward, in order.
        phases: Forward and backward of each pass: a name and the first moment.
        resident: Names and bytes of memory in use during the whole step.
        reserved_bytes: Memory to keep free, for example for an optimizer's state.
    """

    operators: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    moments: tuple[Moment, ...] = ()
    phases: tuple[tuple[str, int], ...] = ()
    resident: tuple[tuple[str, int], ...] = ()
    reserved_bytes: int = 0

    def __repr__(self) -> str:
        return f"Step({len(self.moments)} moments, {len(self.parts)} parts)"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes that a plan has in memory during an interval.

    Attributes:
        category: The purpose, as an index into `CATEGORIES`.
        part: Their producer, as an index into `Step.parts`; -1: none in this step.
        maker: The moment whose operator made them; -1: unknown, or before the step.
        bytes: The number of bytes.
        first: The first moment at which they are in use.
        last: The last one.
    """

    category: int
    part: Signed
    maker: Signed
    bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RecomputedOperator:
    """Operators of forward that backward recomputes.

    Attributes:
        moment: The moment before which they run.
        part: The part of forward with the first of them.
        operators: Their number.
        seconds: Their time.
    """

    moment: int
    part: int
    operators: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PartCost:
    """The costs of a plan in one part of the step.

    Attributes:
        kept_bytes: Bytes that stay on the device, of those that plain autograd saves.
        offloaded_bytes: Bytes of these on the host; the rest is recomputed.
        replay_seconds: The time of recomputing.
    """

    kept_bytes: int
    offloaded_bytes: int
    replay_seconds: float


@dataclass(frozen=True, slots=True)
class BlockRow:
    """The effect of a plan on one block, or on several that it treats the same.

    Attributes:
        name: The block.
        operators: The number of operators that forward runs in it.
        seconds: Their time.
        saved_bytes: Bytes that plain autograd saves of the values made in it.
        kept_bytes: Bytes of these that stay on the device.
        offloaded_bytes: Bytes of these on the host.
        replay_seconds: The time of recomputing.
    """

    name: str
    operators: int
    seconds: float
    saved_bytes: int
    kept_bytes: int
    offloaded_bytes: int
    replay_seconds: float

    @property
    def recomputed_bytes(self) -> int:
        """Saved bytes that are neither kept nor on the host."""
        return self.saved_bytes - self.kept_bytes - self.offloaded_bytes

    @property
    def action(self) -> str:
        """The action, in a word or two.

        Examples:
            >>> BlockRow("h.0", 9, 0.1, 100, 100, 0, 0.0).action
            'keep'
            >>> BlockRow("h.0", 9, 0.1, 100, 30, 0, 0.1).action
            'recompute 70%'
        """
        if not self.saved_bytes:
            return "nothing saved"
        parts = [
            (name, amount)
            for name, amount in (
                ("recompute", self.recomputed_bytes),
                ("offload", self.offloaded_bytes),
            )
            if amount
        ]
        if not parts:
            return "keep"
        if len(parts) == 1 and parts[0][1] == self.saved_bytes:
            return parts[0][0]
        return ", ".join(
            f"{name} {amount / self.saved_bytes:.0%}" for name, amount in parts
        )


@dataclass(frozen=True, slots=True)
class PlanView:
    """One plan, with its predicted costs.

    Attributes:
        name: Its name.
        peak_bytes: Its peak.
        seconds: The time of a step.
        host_bytes: Bytes on the host between forward and backward.
        peak_moment: The first moment of the peak.
        peak_place: The position of the peak in the step, in words.
        allocations: Memory in use, without the part that no plan changes.
        reruns: Recomputed operators by moment.
        costs: Its costs in each of `Step.parts`.
        plan: The plan as JSON text, to apply it; empty: not known.
    """

    name: str
    peak_bytes: int
    seconds: float
    host_bytes: int
    peak_moment: int
    peak_place: str
    allocations: tuple[Allocation, ...] = field(repr=False)
    reruns: tuple[RecomputedOperator, ...] = field(repr=False)
    costs: tuple[PartCost, ...] = field(repr=False)
    plan: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A common checkpointing rule, on the same step.

    Attributes:
        name: The rule.
        peak_bytes: Its predicted peak.
        seconds: The predicted time of a step.
    """

    name: str
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """The measured cost of one contender.

    Attributes:
        name: The contender.
        peak_bytes: The peak of a step; None: no step ran.
        seconds: The minimum time over some steps; None: no step ran.
        difference: The maximum difference of its gradients to the first contender's,
            relative to the largest entry; 0.0 if they are bitwise equal. None: there
            are none to compare.
        failure: Why no step ran; empty: one did.
    """

    name: str
    peak_bytes: int | None = None
    seconds: float | None = None
    difference: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Findings:
    """All data about one step, its plans, and the chosen one.

    Attributes:
        title: The name of the measured step.
        budget_bytes: The budget; 0: none was given.
        plain_peak_bytes: The predicted peak of the plain step.
        plain_seconds: The predicted time of the plain step.
        floor_bytes: The smallest budget that can be met.
        measured_peak_bytes: The peak of a real step with the chosen plan; 0: none ran.
        measured_seconds: Its time; 0: none ran.
        step: The step.
        plans: The plans from the smallest peak to the largest.
        chosen: The number of the active one.
        baselines: Known rules on the same step.
        environment: Names and values: versions, device, date.
        checks: The verified properties, and how.
        estimated_for: The device that times were estimated for; empty: measured.
    """

    title: str
    budget_bytes: int
    plain_peak_bytes: int
    plain_seconds: float
    floor_bytes: int
    measured_peak_bytes: int
    measured_seconds: float
    step: Step
    plans: tuple[PlanView, ...]
    chosen: int
    baselines: tuple[Baseline, ...]
    environment: tuple[tuple[str, str], ...]
    checks: tuple[tuple[str, str], ...] = ()
    estimated_for: str = ""

    def __repr__(self) -> str:
        from recoup.report.texts import verdict

        return f"Findings({self.title}, {len(self.plans)} plans. {verdict(self)})"

    def _repr_html_(self) -> str:
        from recoup.report.pages import fragment

        return fragment(self)

    @property
    def plan(self) -> PlanView:
        """The active plan."""
        return self.plans[self.chosen]


FINDINGS = DataFile(
    "recoup findings",
    2,
    "file of findings",
    UsageError,
    "Make a new one with `recoup fit ... --findings FILE`.",
)


def to_json(findings: Findings) -> str:
    """Return findings as JSON text; rows of one kind are written as columns."""
    return FINDINGS.write(findings, by_columns=True, separators=(",", ":"))


def from_json(text: str) -> Findings:
    """Return the findings that a JSON text describes; nothing in it is executed.

    Raises:
        UsageError: The text is not from `to_json`, or has another version.

    Examples:
        >>> from_json("[]")
        Traceback (most recent call last):
        recoup.errors.UsageError: this is not a file of findings: expected ...
    """
    found = FINDINGS.read(text, Findings)
    if not 0 <= found.chosen < len(found.plans):
        raise FINDINGS.damaged("chosen", found.chosen)
    _check_numbers(found)
    return found


def _check_numbers(found: Findings) -> None:
    """Raise unless all numbers refer to existing items."""
    step = found.step
    count, parts, names = len(step.moments), len(step.parts), len(step.operators)
    for moment in step.moments:
        if moment.operator >= names or moment.part >= max(parts, 1):
            raise FINDINGS.damaged("a moment", moment)
    for name, first in step.phases:
        if first > count:
            raise FINDINGS.damaged(name, first)
    for view in found.plans:
        if len(view.costs) != parts:
            raise FINDINGS.damaged("costs", len(view.costs))
        if view.peak_moment >= max(count, 1):
            raise FINDINGS.damaged("peak_moment", view.peak_moment)
        for each in view.allocations:
            in_order = each.first <= each.last < count and each.maker < count
            if not in_order or each.category >= len(CATEGORIES) or each.part >= parts:
                raise FINDINGS.damaged("an allocation", each)
        for rerun in view.reruns:
            if rerun.moment >= count or rerun.part >= parts:
                raise FINDINGS.damaged("a rerun", rerun)
