"""Plans for compiled blocks: what each captured graph saves, as plain data."""

import json
from dataclasses import asdict, dataclass
from typing import Any, cast

from recoup.core.display import as_html
from recoup.core.units import print_bytes, print_seconds
from recoup.errors import PlanError

FORMAT = "recoup compiled plan"
FORMAT_VERSION = 1

EXECUTORS = ("exact", "inductor")
"""Who runs captured blocks: eager kernels, or Inductor's."""


@dataclass(frozen=True, slots=True)
class BlockPartition:
    """How one block of a model runs.

    Attributes:
        module: The path of the block.
        kind: Blocks of one kind share compiled code.
        digest: The joint graph that was captured; empty: the block is not compiled, and
            a region recomputes all of it.
        saves: The nodes of that graph that are saved for backward, besides inputs.
        saved_bytes: The bytes of these nodes when they were measured.
        held_bytes: Bytes held between the block's forward and backward, measured.
    """

    module: str
    kind: int
    digest: str
    saves: tuple[str, ...]
    saved_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class CompiledPlan:
    """What the blocks of a model save for backward, and who runs them.

    Attributes:
        executor: "exact" or "inductor".
        blocks: The blocks that are not run as they were written.
        model: The model it was made for, as a digest of its modules; empty: any.
        budget_bytes: The budget it was made for; 0: none.
        peak_bytes: The predicted peak.
        seconds: The predicted time of a step.

    Examples:
        >>> block = BlockPartition("h.0", 0, "ab12", ("addmm",), 64, 64)
        >>> plan = CompiledPlan("exact", (block,))
        >>> CompiledPlan.from_json(plan.to_json()) == plan
        True
    """

    executor: str
    blocks: tuple[BlockPartition, ...]
    model: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        budget = print_bytes(self.budget_bytes) if self.budget_bytes else "none"
        return (
            f"CompiledPlan({len(self.blocks)} blocks, {self.executor}: budget "
            f"{budget}, predicted peak {print_bytes(self.peak_bytes)}, step "
            f"{print_seconds(self.seconds)})"
        )

    def _repr_html_(self) -> str:
        return as_html(repr(self))

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        data = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CompiledPlan":
        """Return the plan that a JSON text describes; nothing in it is executed.

        Raises:
            PlanError: The text is no such plan, or is of another version.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise PlanError(
                f"expected a compiled plan as JSON, got: {error}."
            ) from error
        if not isinstance(data, dict):
            raise PlanError(f"expected a compiled plan, got {type(data).__name__}.")
        fields = cast("dict[str, Any]", data)
        if (fields.get("format"), fields.get("version")) != (FORMAT, FORMAT_VERSION):
            raise PlanError(
                f"expected a {FORMAT!r} of version {FORMAT_VERSION}, got "
                f"{fields.get('format')!r} of version {fields.get('version')!r}; make "
                "it anew with recoup.fit."
            )
        if fields.get("executor") not in EXECUTORS:
            raise PlanError(
                f"expected an executor of {EXECUTORS}, got {fields.get('executor')!r}."
            )
        return cls(
            executor=_read(fields, "executor", str),
            blocks=tuple(map(_read_block, _read(fields, "blocks", list))),
            model=_read(fields, "model", str),
            budget_bytes=_read(fields, "budget_bytes", int),
            peak_bytes=_read(fields, "peak_bytes", int),
            seconds=float(_read(fields, "seconds", (int, float))),
        )


def _read_block(data: Any) -> BlockPartition:
    if not isinstance(data, dict):
        raise PlanError(f"expected a block of a plan, got {type(data).__name__}.")
    fields = cast("dict[str, Any]", data)
    saves = _read(fields, "saves", list)
    if not all(isinstance(name, str) for name in saves):
        raise PlanError("expected names of nodes in a block's saves.")
    return BlockPartition(
        module=_read(fields, "module", str),
        kind=_read(fields, "kind", int),
        digest=_read(fields, "digest", str),
        saves=tuple(saves),
        saved_bytes=_read(fields, "saved_bytes", int),
        held_bytes=_read(fields, "held_bytes", int),
    )


def _read(fields: dict[str, Any], name: str, kind: Any) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PlanError(
            f"expected {name!r} in a compiled plan, got {value!r:.40}; make it anew "
            "with recoup.fit."
        )
    return value
