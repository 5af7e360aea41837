"""Apply a plan to a model, with any executor."""

from typing import Any

from torch import nn

from recoup.core.compiled_plan import CompiledPlan
from recoup.core.plan import Plan
from recoup.engine.applied.applied_plan import Applied
from recoup.engine.applied.compiled_blocks import CompiledBlocks
from recoup.engine.verification.replay_check import Verify, check_verify
from recoup.errors import UsageError


def apply_plan(
    model: nn.Module, plan: Plan | CompiledPlan, *, verify: Verify = "first"
) -> Applied | CompiledBlocks:
    """Apply a plan to a model without measuring.

    Args:
        model: The model that the plan was made for.
        plan: The plan, for example read with `Plan.from_json` or
            `CompiledPlan.from_json`.
        verify: As for `CheckpointScope`; compiled blocks are not verified.

    Returns:
        A handle, whose `remove` removes the plan.

    Raises:
        PlanError: The plan was made for another model.
        UsageError: Another plan is active on the model, or an argument has a wrong
            type.

    Examples:
        >>> import torch
        >>> from recoup.core.plan import Place, Span
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> whole = Span(Place("", 0, True), Place("", 0, False))
        >>> applied = apply_plan(model, Plan((whole,)))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> applied.remove()
    """
    given: Any = plan
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model, got {type(model).__name__}.")
    if not isinstance(given, Plan | CompiledPlan):
        raise UsageError(
            f"expected a plan, got {type(given).__name__}; read one from a file with "
            "Plan.from_json(path.read_text())."
        )
    check_verify(verify)
    if isinstance(plan, CompiledPlan):
        return CompiledBlocks(model, plan)
    return Applied(model, plan, verify=verify)
