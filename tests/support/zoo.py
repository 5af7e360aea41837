"""Architectures of transformers and timm at the peak of their own checkpointing.

Each is built from configuration, small, with random weights, in training mode.

`python -m tests.support.zoo LOG` runs all that are not in a log yet, and writes a line
for each: so a run that was interrupted goes on where it was.
"""

import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from recoup.backend.memory.meters import StorageMeter
from recoup.core.plan import locate, plan_for_step
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.measurement.steps.floor import measure_floor
from recoup.measurement.steps.training_step import training_step, untouched
from recoup.measurement.tracing.side_effects import repeatable_blocks
from recoup.planners.repeated_calls import repeatable_calls
from tests.support.architectures import ARCHITECTURES, BOTH, DECODER, ENCODER
from tests.support.architectures import Architecture as Configured
from tests.support.bits import tree_differences
from tests.support.keeping import keepable
from tests.support.twin import seed_generators
from tests.support.variants import differentiable

_SEED = 5
_TOKENS = (4, 48)
_PIXELS = (4, 3, 64, 64)
_BATCHES = (1, 4, 16)
"""By how much a batch is enlarged until checkpointing saves something: below that, the
peak is where the gradients are."""

USED = 0.97
"""The share of the budget that is used in any case, unless nothing else fits."""

BEYOND = 0.1
"""How much more may be recomputed there than any plan must, as a share of forward:
about 3 % of the step."""


@dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        name: Its name in its package.
        package: The package.
        build: Makes the model.
        inputs: Makes what it is called with.
        checkpoint: Switches the model's own checkpointing on.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    checkpoint: Callable[[Any], None]


@dataclass(frozen=True)
class Result:
    """What came of fitting one architecture.

    Attributes:
        plain_bytes: The peak of the plain step.
        budget_bytes: The peak of its own checkpointing.
        peak_bytes: The peak of the fitted step; 0: no plan fits.
        floor_bytes: The smallest budget that can be met, where none fits.
        keepable: What the plan recomputes and could keep in addition, where it leaves
            much of the budget.
        beyond: How much more it recomputes than any plan must, as a share of forward,
            where it leaves much of the budget.
        differences: How gradients and buffers differ from those of the plain step.
    """

    plain_bytes: int
    budget_bytes: int
    peak_bytes: int = 0
    floor_bytes: int = 0
    keepable: tuple[tuple[str, int], ...] = ()
    beyond: float = 0.0
    differences: tuple[str, ...] = ()

    @property
    def used(self) -> float:
        """The share of the budget that is used."""
        return self.peak_bytes / self.budget_bytes

    @property
    def faults(self) -> list[str]:
        """What is not as it should be.

        Examples:
            >>> Result(200, 100, 97).faults
            []
            >>> Result(200, 100, 96).faults, Result(200, 100, 96, beyond=0.2).faults
            ([], ['recomputes too much'])
            >>> Result(200, 100, 96, keepable=(("aten.mm", 3),)).faults
            ["could keep [('aten.mm', 3)]"]
            >>> Result(200, 100, 101).faults, Result(200, 100).faults
            (['over budget'], ['infeasible'])
            >>> Result(200, 100, 99, differences=("w",)).faults
            ['differs: w']
            >>> Result(100, 100, 100).faults
            ['its own checkpointing saves nothing']
        """
        found: list[str] = []
        if self.plain_bytes <= self.budget_bytes:
            found.append("its own checkpointing saves nothing")
        if not self.peak_bytes:
            return [*found, "infeasible"]
        if self.peak_bytes > self.budget_bytes:
            found.append("over budget")
        if self.used < USED:
            # Tensors are lumps: a plan that keeps all it can may leave some room.
            if self.keepable:
                found.append(f"could keep {list(self.keepable)}")
            if self.beyond > BEYOND:
                found.append("recomputes too much")
        found += [f"differs: {each}" for each in self.differences[:3]]
        return found


def loss_of(output: Any) -> Tensor:
    """Return the loss in an output, or a mean of all that can be differentiated."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = dict(output.items()) if hasattr(output, "items") else {"output": output}
    values.pop("past_key_values", None)
    return torch.stack(
        [value.float().square().mean() for value in differentiable(values)]
    ).sum()


def _checkpointed(entry: Entry, copies: int) -> tuple[Any, int, Any, int]:
    """Return inputs, the plain peak and results, and the peak with checkpointing."""
    inputs = _enlarged(entry.inputs(), copies)
    model = _built(entry, inputs)
    plain_bytes, expected = _step(model, inputs)
    model = _built(entry, inputs)
    entry.checkpoint(model)
    budget_bytes, _ = _step(model, inputs)
    return inputs, plain_bytes, expected, budget_bytes


def result_of(entry: Entry) -> Result:
    """Measure an architecture plainly, with its own checkpointing, and fitted."""
    inputs, plain_bytes, expected, budget_bytes = _checkpointed(entry, _BATCHES[0])
    for copies in _BATCHES[1:]:
        if budget_bytes < plain_bytes:
            break
        inputs, plain_bytes, expected, budget_bytes = _checkpointed(entry, copies)
    model = _built(entry, inputs)
    seed_generators(_SEED)
    try:
        _, report = recoup.fit(model, inputs, budget_bytes, loss=loss_of)
    except recoup.errors.InfeasibleError as error:
        return Result(plain_bytes, budget_bytes, floor_bytes=error.floor_bytes)
    peak_bytes, found = _step(model, inputs)
    differences = tuple(tree_differences(expected, found, where=""))
    result = Result(plain_bytes, budget_bytes, peak_bytes, differences=differences)
    if result.used >= USED:
        return result
    return replace(result, keepable=tuple(_keepable(report)), beyond=_beyond(report))


def repeated_differences(entry: Entry) -> tuple[int, list[str]]:
    """Call every block again in backward in which no side effect is seen.

    Returns:
        How many calls are repeated; and how gradients and buffers differ from those of
        the plain step.
    """
    inputs = entry.inputs()
    _, expected = _step(_built(entry, inputs), inputs)
    model = _built(entry, inputs)
    seed_generators(_SEED)
    with untouched(training_step(model, inputs, loss=loss_of)) as step:
        graph = measure_floor(step, names=None, resident=[])
        names = {call.module for each in graph.passes for call in each.calls}
        found = repeatable_blocks(step, sorted(names))
    graph = graph.map_passes(lambda each: replace(each, repeatable=found))
    plans = [
        tuple(Segment(c.start, c.stop, by_call=True) for c in repeatable_calls(each))
        for each in graph.passes
    ]
    recoup.apply_plan(model, plan_for_step(graph, plans))
    _, repeated = _step(model, inputs)
    return sum(map(len, plans)), list(tree_differences(expected, repeated, where=""))


def _enlarged(inputs: dict[str, Tensor], copies: int) -> dict[str, Tensor]:
    return {name: torch.cat([tensor] * copies) for name, tensor in inputs.items()}


def _keepable(report: recoup.results.Fit) -> list[tuple[str, int]]:
    """Return what is recomputed and could be kept, where predictions are right."""
    error_bytes = report.measured_peak_bytes - report.predicted_peak_bytes
    return [
        each
        for graph, plan in zip(report.graph.passes, report.plan.parts, strict=True)
        for each in keepable(
            graph, locate(graph, plan), report.budget_bytes - error_bytes
        )
    ]


def _beyond(report: recoup.results.Fit) -> float:
    """Return what is recomputed beyond the proven bound, as a share of forward.

    All three by the times of single operators. What recording adds is left out: on a
    busy machine its time says nothing.
    """
    assert report.search is not None
    seconds = beyond = 0.0
    for search, plan in zip(report.search.passes, report.plan.parts, strict=True):
        costs = simulate(search.graph, locate(search.graph, plan))
        least = search.bound_seconds(report.budget_bytes)
        seconds += sum(each.seconds for each in search.graph.operations)
        beyond += max(0.0, costs.replay_seconds - least)
    return beyond / seconds


def _built(entry: Entry, inputs: dict[str, Tensor]) -> nn.Module:
    seed_generators(0)
    model = entry.build().train()
    with torch.no_grad():
        model(**inputs)  # some models replace parts of themselves at their first call
    return model


def _step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, dict[str, Any]]:
    """Run a step; return its peak, the gradients and the buffers."""
    seed_generators(_SEED)
    model.zero_grad(set_to_none=True)
    with StorageMeter() as meter:
        meter.track(model, *inputs.values())
        _backward(model, inputs)
        peak_bytes = meter.peak_bytes
    return peak_bytes, {
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
    }


def _backward(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    # The output ends with the call, as it does in `fit`.
    def call() -> Tensor:
        return loss_of(model(**inputs))

    call().backward()


def _configured(architecture: Configured) -> Entry:
    kind = architecture.kind

    def build() -> nn.Module:
        model: Any = architecture.build(dropout=0.1)
        model.config.use_cache = False
        return model

    def inputs() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        if kind in (ENCODER, DECODER, BOTH):
            ids = torch.randint(3, 60, _TOKENS, generator=generator)
            labels = {} if kind is ENCODER else {"labels": ids.clone()}
            return {"input_ids": ids, **labels}
        return kind.inputs(generator)

    return Entry(
        architecture.name,
        "transformers",
        build,
        inputs,
        lambda model: model.gradient_checkpointing_enable(),
    )


_SMALLER: tuple[dict[str, Any], ...] = (
    {"depth": 4},
    {"depths": (2, 2, 2, 2)},
    {},
)
"""Fewer blocks, as some families call it."""


def _image_model(name: str) -> Entry:
    def inputs() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {"x": torch.randn(_PIXELS, generator=generator)}

    def build() -> nn.Module:
        timm = import_module("timm")
        for smaller, size in product(_SMALLER, ({"img_size": _PIXELS[-1]}, {})):
            with suppress(Exception):  # a family that does not know one of these
                model = timm.create_model(name, num_classes=10, **smaller, **size)
                with torch.no_grad():
                    model(**inputs())
                return model
        raise AssertionError(f"{name} cannot be built")

    return Entry(
        name, "timm", build, inputs, lambda model: model.set_grad_checkpointing()
    )


_WITHOUT = """
    albert convnext ctrl flaubert ibert mpnet patchtst regnet resnet squeezebert tapas
    xlm
"""
"""Architectures that have no checkpointing of their own, or whose peak is elsewhere."""

TRANSFORMERS = [
    _configured(architecture)
    for architecture in ARCHITECTURES
    if architecture.name not in _WITHOUT.split()
]
TIMM_NAMES = """
    test_byobnet cait_xxs24_224 convmixer_768_32 test_convnext
    cpubone_nano csatv2 davit_tiny deit_tiny_patch16_224 densenet121 edgenext_x_small
    efficientformerv2_s0 test_efficientnet efficientvim_m1
    efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_s12
    focalnet_tiny_srf gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224
    sam2_hiera_tiny iformer_s inception_next_atto lcnetv2_small levit_384_s8
    lowformer_b0 test_mambaout maxvit_pico_rw_256 caformer_s18 mixer_s16_224
    mobilenetv3_small_050 mobilevit_xxs mvitv2_tiny nest_tiny nextvit_small test_nfnet
    pvt_v2_b0 regnetx_002 repghostnet_050 repvit_m1 res2net50_26w_4s
    resnest26d test_resnet resnetv2_18 rexnet_100 shvit_s1 skresnet18 starnet_s050
    swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m visformer_tiny
    test_vit vit_srelpos_small_patch16_224 vitamin_small_224
    volo_d1_224 ese_vovnet19b_slim_dw xception41 xcit_nano_12_p8_224
"""
TIMM = [_image_model(name) for name in TIMM_NAMES.split()]


def main(log: Path) -> None:
    """Run what is not in the log; write a line for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the packages, when models are built
    import_module("transformers").logging.set_verbosity_error()
    lines = log.read_text().splitlines() if log.exists() else []
    done = {line.split()[0] for line in lines}
    for entry in (*TRANSFORMERS, *TIMM):
        name = f"{entry.package}-{entry.name}"
        if name in done:
            continue
        started = time.perf_counter()
        try:
            found = result_of(entry)
            verdict = "; ".join(found.faults) or "ok"
            text = (
                f"{verdict} | used {found.used:.2%} plain {found.plain_bytes} budget "
                f"{found.budget_bytes} peak {found.peak_bytes} floor "
                f"{found.floor_bytes} beyond {found.beyond:.2%} keepable "
                f"{len(found.keepable)} differences {len(found.differences)}"
            )
        except Exception as error:  # noqa: BLE001 (an outcome like others)
            traceback.print_exc()
            text = f"{type(error).__name__}: {str(error)[:200]!r}"
        with log.open("a") as file:
            file.write(f"{name} {text} {time.perf_counter() - started:.1f} s\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
