"""`measure` one training step as a graph, also dry; `frontier` of its plans."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from recoup.backend.compiler.partitioning import Executor
from recoup.backend.compiler.suspension import suspended_compilation
from recoup.backend.operators.fakes import NEEDS_CONTENTS, FakeMeter, Shadows
from recoup.core.compiled_plan import EXECUTORS, CompiledPlan, CompiledStep
from recoup.core.device_figures import FIGURES, Figures, figures_of
from recoup.core.graph import Graph
from recoup.core.segments import Action
from recoup.errors import RecoupError, UnsupportedError, UsageError
from recoup.fitting.arguments import actions_of
from recoup.fitting.compiled_fit import compiled_frontier, compiled_step
from recoup.measurement.steps.floor import measure_floor
from recoup.measurement.steps.training_step import training_step, untouched
from recoup.measurement.timing.host_cost import recording_seconds
from recoup.measurement.timing.roofline import Roofline, here
from recoup.measurement.tracing.observation import observe
from recoup.planners.planner import check_points
from recoup.planners.planner import frontier as frontier_of
from recoup.planners.solution import Solution


@overload
def measure(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    blocks: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    dry: bool = False,
    compile: Literal[False] = False,
) -> Graph: ...


@overload
def measure(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    blocks: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    compile: Executor,
) -> CompiledStep: ...


def measure(  # noqa: PLR0913 (a step can be described in several ways)
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    blocks: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    dry: bool = False,
    compile: Literal[False] | Executor = False,  # noqa: A002 (torch's own word)
) -> Graph | CompiledStep:
    """Run a step at floor memory, and return its graph.

    The arguments are those of `fit`. The model's state is restored.

    Costs four steps. With `dry=True` nothing is computed and no memory is needed, so it
    works for a model that does not fit, or for a device that is not available, in some
    milliseconds per operator. The model and the batch may be on the meta device. Bytes
    are those of the real step on the model's device (for a model on the meta device, on
    the CPU). Times are estimates from the peak throughput of a device. Use such a graph
    with `plan` and `frontier`; to apply a plan, `fit` the model where it runs.

    Args:
        model: The model.
        batch: Its arguments.
        loss: Function from the output (and the target) to the loss.
        step: Function that runs forward and backward, instead of `batch` and `loss`.
        blocks: The paths of the modules between which the model is cut.
        device: The device whose memory is counted. With `dry=True`, the device to
            estimate times for: h200, h100, a100, rtx4090, or by default this machine's
            CPU.
        dry: Whether to measure without computing the step.
        compile: The executor of the blocks, as for `fit`: with "exact" or "inductor"
            the step with compiled blocks is measured too, at its smallest and at its
            fastest, and the result is a `CompiledStep`. Each kind of block is captured
            once, and one to four of its partitions are compiled.

    Raises:
        UsageError: The arguments describe no step, the device is unknown, or `compile`
            is given together with `dry=True`.
        UnsupportedError: With `dry=True`: the step depends on tensor contents, or has
            recurrent layers whose workspace only their kernels know. With `compile`: no
            block can be captured.

    Examples:
        >>> graph = measure(nn.Linear(4, 4), torch.ones(2, 4), loss=Tensor.sum)
        >>> [operation.name for operation in graph.operations]
        ['aten.addmm.default', 'aten.sum.default', 'aten.ones_like.default']
        >>> with torch.device("meta"):
        ...     model, batch = nn.Linear(40_000, 40_000), torch.empty(64, 40_000)
        >>> graph = measure(model, batch, loss=Tensor.sum, dry=True, device="h100")
        >>> graph.estimated_for, graph.saved_bytes
        ('h100', 0)
    """
    if compile and (compile not in EXECUTORS or dry):
        raise UsageError(
            f"expected compile= one of {EXECUTORS} without dry=True, got "
            f"compile={compile!r} and dry={dry}; compiled blocks are run here."
        )
    if dry:
        return measure_dry(
            model, batch, figures=_figures(device), loss=loss, step=step, names=blocks
        )
    if isinstance(device, str) and device.lower() in FIGURES:
        raise UsageError(
            f"expected dry=True with device={device!r}, which is for estimates, got "
            "dry=False; set it, or name a device of this machine."
        )
    described = training_step(model, batch, loss=loss, step=step, device=device)
    if not compile:
        with untouched(described) as repeated:
            return measure_floor(repeated, names=blocks)
    with suspended_compilation(model), untouched(described) as repeated:
        graph = measure_floor(repeated, names=blocks)
        return compiled_step(repeated, executor=compile, graph=graph, blocks=blocks)


@overload
def frontier(
    measured: Graph | nn.Module,
    batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    points: int = 12,
    allow: Iterable[Action] = (Action.KEEP,),
    progress: Callable[[int, int], None] | None = None,
    compile: Literal[False] = False,
) -> tuple[Solution, ...]: ...


@overload
def frontier(
    measured: nn.Module,
    batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    points: int = 12,
    compile: Executor,
) -> tuple[CompiledPlan, ...]: ...


def frontier(  # noqa: PLR0913 (a step can be described in several ways)
    measured: Graph | nn.Module,
    batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    points: int = 12,
    allow: Iterable[Action] = (Action.KEEP,),
    progress: Callable[[int, int], None] | None = None,
    compile: Literal[False] | Executor = False,  # noqa: A002 (torch's own word)
) -> tuple[Solution, ...] | tuple[CompiledPlan, ...]:
    """Return Pareto-optimal plans from the smallest peak to that of plain training.

    Costs planning for each point, and four steps if a model is given.

    Args:
        measured: A measured step, or a model to measure.
        batch: With a model: its arguments, as for `measure`.
        loss: With a model: the loss function.
        step: With a model: a function that runs forward and backward, instead of
            `batch` and `loss`.
        points: The number of evenly spaced budgets to plan for.
        allow: Actions allowed on a value besides recomputing it, as for `fit`.
        progress: Progress callback with the number of budgets done and in total.
        compile: The executor of the blocks, as for `fit`: with "exact" or "inductor"
            plans of compiled blocks are returned. Requires a model. One option of each
            kind of block is compiled, and the others are predicted.

    Raises:
        UsageError: The arguments describe no step, or a graph is given together with a
            batch or `compile`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
        >>> plans = frontier(model, torch.ones(32, 4), loss=Tensor.sum, points=3)
        >>> peaks = [plan.simulation.peak_bytes for plan in plans]
        >>> peaks == sorted(peaks)
        True
    """
    allowed = actions_of(allow)
    check_points(points)
    if compile:
        if compile not in EXECUTORS or isinstance(measured, Graph):
            raise UsageError(
                f"expected a model and compile= one of {EXECUTORS}, got a "
                f"{type(measured).__name__} and compile={compile!r}."
            )
        described = training_step(measured, batch, loss=loss, step=step)
        with suspended_compilation(measured), untouched(described) as repeated:
            return compiled_frontier(
                repeated,
                executor=compile,
                graph=measure_floor(repeated),
                points=points,
            )
    if not isinstance(measured, Graph):
        measured = measure(measured, batch, loss=loss, step=step)
    elif batch is not None or loss is not None or step is not None:
        raise UsageError(
            "expected a measured graph alone, got a batch, loss or step as well; leave "
            "these out, or give the model instead of the graph."
        )
    return frontier_of(measured, points=points, allow=allowed, progress=progress)


def _figures(device: torch.device | str | None) -> Figures:
    if device is None or str(device) == "cpu":
        return here()
    return figures_of(str(device))


_HOST = torch.device("cpu")


def measure_dry(
    model: nn.Module,
    batch: Any = None,
    *,
    figures: Figures,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    names: Sequence[str] | None = None,
) -> Graph:
    """Return the graph of a step without computing it.

    Runs the step twice on fake stand-ins for the tensors of the model and the batch.
    The model's own tensors are restored afterwards.

    Raises:
        UnsupportedError: The step depends on tensor contents.
    """
    training_step(model, batch, loss=loss, step=step)
    # On a busy accelerator, recording does not add to the time of the step.
    recording = recording_seconds() if figures.name == "cpu" else 0.0
    shadows = Shadows(_HOST)
    given = shadows.of_batch(batch)
    with shadows.instead_of(model), _explained(), shadows.mode:
        stood_in = training_step(model, given, loss=loss, step=step)
        with untouched(stood_in) as repeated:
            graph = observe(
                repeated,
                FakeMeter,
                lambda: Roofline(figures),
                recording_seconds=recording,
                names=names,
            ).graph
    return graph.map_passes(
        lambda each: replace(
            each,
            link_bytes_per_second=figures.link_bytes_per_second,
            estimated_for=figures.name,
        )
    )


@contextmanager
def _explained() -> Generator[None]:
    """Add to errors in the block an explanation about dry measurement."""
    try:
        yield
    except NEEDS_CONTENTS as error:
        asked = getattr(error, "func", None)
        raise UnsupportedError(
            "expected a step that does not depend on tensor contents with dry=True, "
            f"got one that reads them{f' ({asked})' if asked else ''}; leave out "
            "dry=True, on any machine where one step at the least memory fits."
        ) from error
    except RecoupError:
        raise
    except Exception as error:
        error.add_note(
            "This happened in a dry measurement, in which tensors have shapes but no "
            "contents: see whether the step runs without dry=True."
        )
        raise
