"""A plan in force that follows the shapes it meets and tightens when memory ran out."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torch import nn

from recoup.backend.trees import tensors
from recoup.core.errors import InfeasibleError
from recoup.core.graph import Graph, Storage
from recoup.core.plan import Plan, plan_for
from recoup.core.segments import Action
from recoup.engine.plans import Applied
from recoup.engine.verification import Verify
from recoup.planners.plan import floor, plan

_STEPS = 8
"""Sizes of batches are told apart in so many steps up to the measured one, and in so
many from it to twice that, and so on."""

_ROUNDING = 1e-9

_TIGHTER = 0.9
"""A budget that was too much for the device is cut to this share of itself."""


class Adapted:
    """A plan in force on a model; shapes other than the measured get their own.

    A batch of another size is planned for by scaling the measured step, once for each
    of a few sizes. Gradients are right whatever the plan.

    Args:
        model: The model.
        graph: The measured step.
        made: The plan for it.
        allow: What may be done with a value besides recomputing it.
        verify: As for `CheckpointScope`.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        made: Plan,
        allow: frozenset[Action],
        *,
        verify: Verify,
    ) -> None:
        self.plan = made
        self._graph = graph
        self._allow = allow
        self._budget_bytes = made.budget_bytes
        self._measured: list[tuple[Hashable, int]] = []
        self._plans: dict[float, Plan] = {1.0: made}
        self._chosen = made
        self._applied = Applied(model, self._choose, verify=verify)

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Put the plan in force for a call of the model that is under way already."""
        self._applied.begin(model, args, kwargs)

    def put_on(self, model: nn.Module) -> None:
        """Put the plan in force on the model, again after `remove`."""
        self._applied.put_on(model)

    def remove(self) -> None:
        """Take the plan off the model."""
        self._applied.remove()

    def tighten(self) -> bool:
        """Plan anew for less memory; say whether that was possible.

        A plan that takes much less than the budget was still too much.
        """
        taken_bytes = self._chosen.peak_bytes or self._budget_bytes
        budget_bytes = int(min(taken_bytes, self._budget_bytes) * _TIGHTER)
        try:
            made = _planned(self._graph, budget_bytes, self._allow)
        except InfeasibleError:
            return False
        self._budget_bytes = budget_bytes
        self.adopt(made)
        return True

    def adopt(self, made: Plan) -> None:
        """Put another plan for the measured step in force."""
        self.plan = self._chosen = made
        self._plans = {1.0: made}

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Return the plan for a call, and remember which it was."""
        self._chosen = self._plan_of(args, kwargs)
        return self._chosen

    def _plan_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Return the plan for a call; the first step's are those that were measured."""
        found = tensors((args, kwargs))
        shapes = tuple(tensor.shape for tensor in found)
        mine = sum(tensor.numel() for tensor in found)
        if len(self._measured) < self.plan.model_calls:
            self._measured.append((shapes, mine))
        elements = max(elements for _, elements in self._measured)
        if not elements or any(shapes == known for known, _ in self._measured):
            return self._plans[1.0]
        ratio = rounded_up(mine / elements)
        made = self._plans.get(ratio)
        if made is None:
            made = self._plans[ratio] = self._plan_for_size(ratio)
        return made

    def _plan_for_size(self, ratio: float) -> Plan:
        scaled = scale(self._graph, ratio)
        try:
            return _planned(scaled, self._budget_bytes, self._allow)
        except InfeasibleError:
            smallest = floor(scaled, allow=self._allow).segments
            return plan_for(scaled, smallest, budget_bytes=self._budget_bytes)


def rounded_up(ratio: float) -> float:
    """Return the size that is planned for, for a batch of some size by the measured.

    They are few, whatever sizes there are: eighths up to the measured one, and above it
    eight from each size to twice that.

    Examples:
        >>> rounded_up(0.01), rounded_up(0.5), rounded_up(0.51), rounded_up(2)
        (0.125, 0.5, 0.625, 2.0)
        >>> len({rounded_up(size / 64) for size in range(64, 64 * 16)})
        33
    """
    if ratio <= 1:
        return math.ceil(_STEPS * ratio) / _STEPS
    return 2.0 ** (math.ceil(_STEPS * math.log2(ratio) - _ROUNDING) / _STEPS)


def scale(graph: Graph, ratio: float) -> Graph:
    """Return the step with activations of another size.

    What does not depend on the batch (parameters, gradients) is taken to be the least
    that is in use at any moment.

    Examples:
        >>> scale(Graph((), 0, (Storage(8, 0, 0),), (), (), (), ()), 0.5).storages[0]
        Storage(bytes=4, born=0, dies=0)
    """
    fixed = min(graph.other_bytes, default=0)
    return replace(
        graph,
        operations=tuple(
            replace(
                operation,
                seconds=operation.seconds * ratio,
                workspace_bytes=int(operation.workspace_bytes * ratio),
            )
            for operation in graph.operations
        ),
        storages=tuple(
            Storage(int(s.bytes * ratio), s.born, s.dies) for s in graph.storages
        ),
        other_bytes=tuple(
            fixed + int((other - fixed) * max(ratio, 1)) for other in graph.other_bytes
        ),
        own_bytes=tuple(int(own * min(ratio, 1)) for own in graph.own_bytes),
        step_seconds=graph.step_seconds * ratio,
    )


def _planned(graph: Graph, budget_bytes: int, allow: frozenset[Action]) -> Plan:
    solution = plan(graph, budget_bytes, allow=allow)
    return plan_for(
        graph,
        solution.segments,
        budget_bytes=budget_bytes,
        peak_bytes=solution.simulation.peak_bytes,
        seconds=solution.simulation.seconds,
    )
