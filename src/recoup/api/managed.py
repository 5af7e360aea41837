"""A model that a manager chose for: measured at its first call, and told apart."""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup.api.adaptation import Adapted
from recoup.api.together import Part, Way, before_bytes, ways_of
from recoup.backend.compiled import leave_uncompiled
from recoup.backend.trees import map_leaves, tensors
from recoup.core.graph import Graph
from recoup.core.plan import Plan, plan_for
from recoup.core.segments import Action
from recoup.engine.plans import Choice
from recoup.measure.floor import measure_floor
from recoup.measure.training import TrainingStep, untouched

KEEP = frozenset({Action.KEEP})
"""What managers do with values besides recomputing them."""


class Owner(Protocol):
    """Is told of the calls of a model that record gradients."""

    def called(self, managed: "Managed") -> None:
        """Take note of a call that begins; its plan is chosen afterwards."""
        ...

    def returned(self, managed: "Managed", output: object) -> None:
        """Take note of what it returned."""
        ...


class Managed(Adapted):
    """A plan in force on a model, made anew when its manager says so.

    The model is not kept alive. Copies of it keep their plan, and have no manager.

    Args:
        model: The model.
        graph: A step of it, as it was measured.
        way: What is recomputed.
        budget_bytes: What a step may add to memory.
        is_alone: The plan was made for all of the budget.
        owner: Is told of calls.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        way: Way,
        *,
        budget_bytes: int,
        is_alone: bool,
        owner: Owner,
    ) -> None:
        made = _plan(graph, way, budget_bytes)
        # The manager itself says what does not fit.
        super().__init__(model, graph, made, KEEP, verify="first", warns=False)
        self._owner = weakref.ref(owner)
        self.model_name = type(model).__name__
        self.measured = graph
        self.way = way
        self.is_alone = is_alone
        self.left_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self._ways: tuple[Way, ...] = ()
        self._model = weakref.ref(model)
        self._handle = model.register_forward_hook(self._returned)
        _MANAGED[model] = self

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: neither models nor managers, which have locks."""
        nobody = {"_owner": _nobody, "_model": _nobody, "_handle": None}
        return {**super().__getstate__(), **nobody}

    @property
    def owner(self) -> Owner | None:
        """Who chose for the model, while it exists."""
        return self._owner()

    @property
    def is_alive(self) -> bool:
        """Whether anybody still refers to the model."""
        return self._model() is not None

    @property
    def part(self) -> Part:
        """What the model takes as it is run now."""
        return Part((self.way,), self.left_bytes)

    @property
    def flexible_part(self) -> Part:
        """What it takes in all the ways that are known; they are looked for once."""
        if not self._ways:
            self._ways = ways_of(self.measured, KEEP)
        return Part(self._ways, self.left_bytes)

    def run_so(self, way: Way, graph: Graph, *, budget_bytes: int) -> None:
        """Run in another way from the next call on.

        Args:
            way: What is recomputed.
            graph: The measured step with what else is in memory beside it, for calls
                of other sizes.
            budget_bytes: What a step may add to memory.
        """
        self.way = way
        self.is_alone = graph is self.measured
        made = _plan(self.measured, way, budget_bytes)
        self._graph, self._budget_bytes = graph, made.budget_bytes
        self.adopt(made)

    def remove(self) -> None:
        """Take the plan off the model."""
        super().remove()
        self._handle.remove()
        model = self._model()
        if model is not None and _MANAGED.get(model) is self:
            del _MANAGED[model]

    def choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Choice:
        """Return the plan for a call, and tell the manager of it."""
        owner = self.owner
        if owner is not None:
            owner.called(self)
        return super().choose(model, args, kwargs)

    @leave_uncompiled
    def _returned(self, model: nn.Module, args: Any, output: object) -> None:
        del model, args
        owner = self.owner
        if owner is not None:
            owner.returned(self, output)


_MANAGED: weakref.WeakKeyDictionary[nn.Module, Managed] = weakref.WeakKeyDictionary()
"""What was chosen for models, by all managers."""


def managed_in(model: nn.Module) -> list[Managed]:
    """Return what managers have in force on a model and on its parts."""
    found = (_MANAGED.get(module) for module in model.modules())
    return [managed for managed in found if managed is not None]


def managed_for(model: nn.Module) -> Managed | None:
    """Return what a manager has in force on the model itself."""
    return _MANAGED.get(model)


def _nobody() -> None:
    """Stand for a weak reference to what a copy does not have."""


def measured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """Return the graph of a step of the model on these arguments, left as they are."""
    described = _step(model, args, kwargs)
    with torch.enable_grad(), untouched(described) as repeated:
        return measure_floor(repeated)


def _plan(graph: Graph, way: Way, budget_bytes: int) -> Plan:
    whole = before_bytes(graph) + budget_bytes
    return plan_for(graph, way.segments, budget_bytes=whole)


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TrainingStep:
    # Cut off from what computed them: backward would go on there, and free its graph.
    args, kwargs = map_leaves(_cut_off, (args, kwargs))
    given = tensors((args, kwargs))

    def run() -> None:
        output = model(*args, **kwargs)
        floats = [t for t in tensors(output) if t.requires_grad]
        if floats:
            torch.autograd.backward(floats, [torch.ones_like(t) for t in floats])

    found = [*model.parameters(), *given]
    device = found[0].device if found else torch.device("cpu")
    return TrainingStep(model, run, given, device)


def _cut_off(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
