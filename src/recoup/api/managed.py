"""Models that a manager chooses for, and a step that calls them while it runs."""

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup.api.situations import CallKind, Situation
from recoup.backend.graph import at_end_of_backward
from recoup.backend.trees import tensors
from recoup.core.plan import Plan
from recoup.engine.blocks import block_names
from recoup.engine.plans import Applied, Choice
from recoup.engine.runs import Cuts
from recoup.measure.live import LiveStep
from recoup.measure.observation import cuts_of
from recoup.measure.training import device_of

_FEW = 8
"""Up to so many single layers are recomputed as one."""


class Owner(Protocol):
    """Chooses what is recomputed in the calls of a model."""

    def begin_call(
        self,
        managed: "Managed",
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Choice:
        """Return what is recomputed in a call that begins now, and who watches it."""
        ...

    def end_call(self, output: object) -> None:
        """Wait for the backward of the call that returns this."""
        ...


class Managed:
    """A model that a manager chooses for. It is not kept alive.

    Copies of the model keep what was chosen last, and have no manager.
    """

    def __init__(self, model: nn.Module, owner: Owner) -> None:
        self.key = key_of(model)
        self.name = type(model).__name__
        self.device = device_of(model)
        self.cuts = _cuts_of(model)
        self.last: Plan | Cuts | None = None
        self._owner: Callable[[], Owner | None] = weakref.ref(owner)
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.applied = Applied(model, self.choose)
        MANAGED[model] = self

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: neither models nor managers, which have locks."""
        return {**vars(self), "_owner": _nobody, "model": _nobody}

    @property
    def owner(self) -> Owner | None:
        """Who chooses for the model, while it exists."""
        return self._owner()

    def kind_of(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallKind:
        """Return what the memory of a call depends on."""
        given = tensors((args, kwargs))
        kind = self.device.type
        is_cast = torch.is_autocast_enabled(kind)
        mode = (
            hash(tuple(module.training for module in model.modules())),
            hash(tuple(p.requires_grad for p in model.parameters())),
            tuple(tensor.requires_grad for tensor in given),
            torch.get_autocast_dtype(kind) if is_cast else None,
        )
        return CallKind(self.key, mode, tuple(tuple(t.shape) for t in given))

    def leave_out(self, torn: set[str], number: int) -> None:
        """Cut no more at places that were found no good in a call."""
        self.cuts = tuple(n for n in self.cuts if f"{number}.{n}" not in torn)

    def remove(self) -> None:
        """Take everything off the model."""
        self.applied.remove()
        model = self.model()
        if model is not None and MANAGED.get(model) is self:
            del MANAGED[model]

    def choose(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Choice:
        """Return what is recomputed in a call that begins now, and who watches it."""
        owner = self.owner
        if owner is None:
            return self.last, None
        return owner.begin_call(self, model, args, kwargs)

    def begin(self) -> None:
        """Nothing more to note: the call was chosen for just now."""

    def end(self, output: object, order: object) -> None:
        """Let the manager wait for the backward of the call."""
        del order
        owner = self.owner
        if owner is not None:
            owner.end_call(output)

    def cancel(self) -> None:
        """Tell the manager that the call was interrupted."""
        self.end(None, None)


class RunningStep:
    """A step that runs: the calls so far, and how far their backward is.

    Attributes:
        key: What its kind is looked up by, besides shapes.
        place: The key, and the kind of the step before it.
        situation: The kind; None: it is being observed, or cannot be.
        left_bytes: What the steps before it have left in memory.
        budget_bytes: What it may add to memory.
        planned_bytes: What it adds by its plan.
        is_other: It makes other calls than its kind.
    """

    def __init__(
        self,
        key: object,
        place: object,
        situation: Situation | None,
        left_bytes: int,
    ) -> None:
        self.key, self.place, self.situation = key, place, situation
        self.left_bytes = left_bytes
        self.budget_bytes = self.planned_bytes = 0
        self.is_other = False
        self.watch: LiveStep | None = None
        self.calls: list[CallKind] = []
        self.managed: list[Managed] = []
        self.has_backward = False
        self._open: set[int] = set()
        self._reached: set[int] = set()
        self._running: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether its backward has run, or can run no more."""
        return self.has_backward or (self._running is None and not self._open)

    @property
    def open_calls(self) -> set[int]:
        """The calls whose backward is still to come."""
        return self._open - self._reached

    def begin(self, kind: CallKind, managed: "Managed") -> int:
        """Register a call; return its number."""
        self.calls.append(kind)
        self.managed.append(managed)
        self._running = len(self.calls) - 1
        return self._running

    def wait_for(self, output: object) -> None:
        """Wait for the backward of the call that has returned this."""
        number, self._running = self._running, None
        if self.watch is not None:
            self.watch.returned()
        if number is None:
            return
        nodes = [t.grad_fn for t in tensors(output) if t.grad_fn is not None]
        if nodes:
            self._open.add(number)
            mark = _Mark(self, number)
            for node in nodes:
                node.register_hook(mark)

    def reached(self, number: int) -> None:
        """Record that backward arrives at a call."""
        self._reached.add(number)
        if not self.has_backward:
            self.has_backward = True
        watch = self.watch
        if watch is not None:
            at_end_of_backward(watch.backward_ended)

    def dropped(self, number: int) -> None:
        """Record that the graph of a call was freed."""
        self._open.discard(number)


class _Mark:
    """Hangs on the graph of a call; tells the step when backward arrives there."""

    def __init__(self, step: RunningStep, number: int) -> None:
        self._step, self._number = step, number
        weakref.finalize(self, step.dropped, number).atexit = False

    def __call__(self, *gradients: object) -> None:
        del gradients
        self._step.reached(self._number)


_KEYS = itertools.count()

MANAGED: weakref.WeakKeyDictionary[nn.Module, Managed] = weakref.WeakKeyDictionary()
"""The models that managers choose for."""


def key_of(model: nn.Module) -> object:
    """Return what tells a model from others: itself, unless it has no state.

    A loss that a loop makes anew in each step is always the same one.
    """
    if any(True for _ in model.parameters()) or any(True for _ in model.buffers()):
        return next(_KEYS)
    return type(model), repr(model)


def gradients_of(managed: Mapping[object, Managed]) -> list[Tensor]:
    """Return the gradients that the parameters of models have now."""
    models = (each.model() for each in tuple(managed.values()))
    parameters = (p for model in models if model for p in model.parameters())
    return [p.grad for p in parameters if p.grad is not None]


def _cuts_of(model: nn.Module) -> tuple[str, ...]:
    """Return where the calls of a model are cut while they are observed.

    A few single layers are recomputed as one: each alone would hold all it saves.
    """
    blocks = block_names(model)
    has_parts = any(any(model.get_submodule(b).children()) for b in blocks)
    return cuts_of(model, blocks) if has_parts or len(blocks) > _FEW else ()


def _nobody() -> None:
    """Stand for a weak reference to what a copy does not have."""
