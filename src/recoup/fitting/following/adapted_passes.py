"""The applied plan of a step with several passes, or with several models."""

from dataclasses import replace
from typing import Any

from torch import nn

from recoup.core.graph import Graph
from recoup.core.plan import Plan
from recoup.core.segments import Action
from recoup.engine.applied.applied_plan import Applied, Choice, shapes_of
from recoup.engine.applied.pass_order import PassOrder
from recoup.engine.verification.replay_check import Verify
from recoup.fitting.following.adaptation import Adapted


class AdaptedPasses:
    """A plan applied to the modules that a step calls: each pass has its own part.

    Args:
        model: The model, or what contains the models.
        graph: The measured step.
        made: The plan for it.
        allow: What may be done with a value besides recomputing it.
        verify: As for `CheckpointScope`.
        reserved_bytes: Part of the user's budget that the plan's does not contain.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        made: Plan,
        allow: frozenset[Action],
        *,
        verify: Verify,
        reserved_bytes: int = 0,
    ) -> None:
        self.plan = made
        self._model = model
        self._parts = [
            Adapted(
                model,
                each,
                part,
                allow,
                verify=verify,
                reserved_bytes=reserved_bytes,
                attach=False,
            )
            for each, part in zip(graph.passes, made.parts, strict=True)
        ]
        self._order = PassOrder(made)
        self._roots = made.all_roots
        self._applied = Applied(model, self._choose, verify=verify, roots=self._roots)

    def put_on(self, model: nn.Module) -> None:
        """Apply the plan to the model, again after `remove`."""
        self._applied.put_on(model)

    def remove(self) -> None:
        """Take the plan off the model."""
        self._applied.remove()

    def tighten(self) -> bool:
        """Plan anew for less memory; return whether that was possible.

        The passes that take most are planned for a tenth less than they took.
        """
        peaks = [part.plan.peak_bytes for part in self._parts]
        limit = max(peaks) * 9 // 10
        largest = [part for part in self._parts if part.plan.peak_bytes > limit]
        if not all(part.tighten() for part in largest):
            return False
        self._gather()
        return True

    def adopt(self, made: Plan) -> None:
        """Apply another plan for the measured step."""
        for part, plan in zip(self._parts, made.parts, strict=True):
            part.adopt(plan)
        self.plan = made

    def finish_measuring(self) -> None:
        """Warn from now on of memory that only the training loop keeps."""
        for part in self._parts:
            part.finish_measuring()

    def _gather(self) -> None:
        plans = tuple(part.plan for part in self._parts)
        if not self.plan.passes:
            self.plan = plans[0]
            return
        self.plan = replace(
            self.plan,
            passes=plans,
            budget_bytes=max(plan.budget_bytes for plan in plans),
            peak_bytes=max(plan.peak_bytes for plan in plans),
        )

    def _choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Choice:
        whole = self._model
        root = next(n for n in self._roots if whole.get_submodule(n) is model)
        number = self._order.pass_of(root, shapes_of((args, kwargs)))
        return self._parts[number].choose(whole, args, kwargs)
