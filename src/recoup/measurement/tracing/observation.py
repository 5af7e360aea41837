"""One observed step: traced while every block is recomputed."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import nn

from recoup.backend.autograd.saved_tensors import is_in_backward, records_gradients
from recoup.backend.memory.ledger import storages_in
from recoup.backend.memory.meters import MemoryMeter
from recoup.backend.operators.timers import Timer
from recoup.backend.state.model_state import listed
from recoup.backend.state.trees import tensors
from recoup.backend.training.sharded_units import unit_paths
from recoup.core.callers import user_stacklevel
from recoup.core.graph import Graph
from recoup.core.restoring import removing, restoring
from recoup.engine.applied.applied_plan import Applied
from recoup.engine.applied.model_blocks import block_names
from recoup.engine.applied.planned_runs import Cuts
from recoup.errors import BudgetWarning, UsageError
from recoup.measurement.steps.training_step import TrainingStep, gradients_followed
from recoup.measurement.tracing.graphs import step_graph, torn_blocks
from recoup.measurement.tracing.trace import Trace
from recoup.measurement.tracing.tracer import StepTracer

_OWN_CHECKPOINTING = (
    "expected a model that keeps its activations, got one that calls {} again in "
    "backward (torch.utils.checkpoint): recoup can only plan the rest, so the smallest "
    "feasible budget is larger and the step slower than need be. Disable the model's "
    "own checkpointing first (gradient_checkpointing=False in the arguments of a "
    "trainer, model.gradient_checkpointing_disable(), "
    "model.set_grad_checkpointing(False))."
)


class Observation(NamedTuple):
    """An observed step.

    Attributes:
        graph: Its graph.
        cuts: The paths of the modules at which it was cut.
        model_calls: The number of calls of the model, or of parts, in all passes.
    """

    graph: Graph
    cuts: tuple[str, ...]
    model_calls: int


def observe(
    step: TrainingStep,
    meter: Callable[[], MemoryMeter],
    timer: Callable[[], Timer],
    *,
    recording_seconds: float = 0.0,
    names: Sequence[str] | None = None,
    resident: Sequence[object] = (),
) -> Observation:
    """Run a step in which every block is recomputed, and return its graph.

    Runs the step once to warm up and once traced, and once more if other cuts are
    needed.

    Warns:
        BudgetWarning: The model has checkpointing of its own, which is active.

    Raises:
        UsageError: A named block does not exist, or the step does not call the model.
    """
    known = {name for name, _ in step.model.named_modules()}
    if isinstance(names, str):
        raise UsageError(f"expected a list of module paths for blocks=, got {names!r}.")
    chosen = tuple(names) if names is not None else called_blocks(step.model)
    for name in chosen:
        if name not in known:
            raise UsageError(
                f"expected paths of modules for blocks=, got {name!r}, which the model "
                "does not have; give names of model.named_modules(), or leave out "
                "blocks= to have them found."
            )
    cuts = cuts_of(step.model, chosen)
    with cut(step, Cuts(cuts)):
        step.begin()
        step.run()
    traces, clock = _trace(step, cuts, resident, meter(), timer())
    if not any(trace.roots for trace in traces):
        raise UsageError(
            f"expected a step that calls this {type(step.model).__name__} with "
            "gradients, got none, so there is nothing to plan; call it in the step, or "
            "give the module that the step calls."
        )
    torn = {name for trace in traces for name in torn_blocks(trace, cuts)}
    if torn:
        cuts = tuple(name for name in cuts if name not in torn)
        traces, clock = _trace(step, cuts, resident, meter(), timer())
    called_again = {name for trace in traces for name in trace.called_again}
    if called_again:
        paths = [name for name, _ in step.model.named_modules() if name in called_again]
        warning = BudgetWarning(_OWN_CHECKPOINTING.format(listed(outermost(paths))))
        warnings.warn(warning, stacklevel=user_stacklevel())
    graph = step_graph(
        traces,
        clock.seconds,
        blocks=cuts,
        units=unit_paths(step.model),
        recording_seconds=recording_seconds,
    )
    return Observation(graph, cuts, sum(trace.model_calls for trace in traces))


def called_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the blocks of a model, or of all models in a container.

    Examples:
        >>> called_blocks(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}))
        ('a', 'b')
    """
    if type(model).forward is not nn.Module.forward:
        return block_names(model)
    # A module that several models share has one name.
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, None] = {}
    for child in model.children():
        for each in called_blocks(child) or ("",):
            found[names[child.get_submodule(each)]] = None
    return tuple(found)


def outermost(names: Iterable[str]) -> list[str]:
    """Return the paths that lie inside no other of them, in order.

    Examples:
        >>> outermost(["a.b", "a.b.c", "a.bc", "a.b.c.d"])
        ['a.b', 'a.bc']
    """
    found = dict.fromkeys(names)
    return [
        name
        for name in found
        if not any(parent in found for parent in _parents_of(name))
    ]


def _parents_of(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def cuts_of(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return the blocks at which to cut a step that has not been traced yet.

    Among n single layers these are about sqrt(n), evenly spaced.
    """
    if any(list(model.get_submodule(name).children()) for name in blocks):
        return tuple(blocks)
    return tuple(blocks[:: max(1, math.isqrt(len(blocks)))])


def _trace(
    step: TrainingStep,
    cuts: tuple[str, ...],
    resident: Sequence[object],
    meter: MemoryMeter,
    timer: Timer,
) -> tuple[list[Trace], Timer]:
    step.begin()
    storages = storages_in((step.resident(), list(resident)))
    with meter:
        meter.track(*step.resident(), *tensors(list(resident)))
        parameters = dict(step.model.named_parameters())
        tracer = StepTracer(meter, timer, storages, parameters=parameters)
        with (
            restoring(tracer.stop),
            restoring(tracer.detach),
            _boundaries_recorded(step.model, tracer),
            gradients_followed(parameters, tracer.add_gradient),
            cut(step, Cuts(cuts, policy=tracer)),
        ):
            tracer.attach()
            step.run()
        traces = tracer.close()
    step.drop_gradients()
    return traces, timer


@contextmanager
def cut(step: TrainingStep, cuts: Cuts) -> Iterator[None]:
    """Cut the step's model in the block."""
    with removing() as handles:
        handles.append(Applied(step.model, cuts, roots=None))
        yield


@contextmanager
def _boundaries_recorded(model: nn.Module, tracer: StepTracer) -> Iterator[None]:
    """Record in the trace where modules are entered and left."""
    # The module that the step itself called, usually the model, until it returns.
    root: nn.Module | None = None

    def record(
        name: str,
        entering: bool,  # noqa: FBT001
        module: nn.Module,
        *passed: object,
    ) -> None:
        nonlocal root
        # A call in backward is a recomputation by torch's own checkpointing.
        is_root = root is None and not (name and is_in_backward())
        if entering and (is_root or root is module):
            root = module
            tracer.call_model(name if records_gradients() else None)
        tracer.reach(name, passed, entering=entering)
        if not entering and module is root:
            root = None

    with removing() as handles:
        add = handles.append
        for name, module in model.named_modules():
            before, after = partial(record, name, True), partial(record, name, False)
            follow = partial(module.register_forward_hook, with_kwargs=True)
            lead = partial(module.register_forward_pre_hook, with_kwargs=True)
            add(lead(before, prepend=True))
            add(follow(after, always_call=True))
        yield
