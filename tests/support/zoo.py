"""Architectures of transformers and timm at the peak of their own checkpointing.

Each is built from configuration, small, with random weights, in training mode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from recoup.backend.memory.meters import StorageMeter
from tests.support.architectures import ARCHITECTURES, BOTH, DECODER, ENCODER
from tests.support.architectures import Architecture as Configured
from tests.support.bits import tree_differences
from tests.support.twin import seed_generators
from tests.support.variants import differentiable

_SEED = 5
_TOKENS = (4, 48)
_PIXELS = (4, 3, 64, 64)


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
        gap: By which share of its time the step could at best be shorter.
        differences: How gradients and buffers differ from those of the plain step.
    """

    plain_bytes: int
    budget_bytes: int
    peak_bytes: int = 0
    floor_bytes: int = 0
    gap: float = 0.0
    differences: tuple[str, ...] = ()

    @property
    def is_tight(self) -> bool:
        """Whether the plain step exceeds the budget."""
        return self.plain_bytes > self.budget_bytes

    @property
    def used(self) -> float:
        """The share of the budget that is used."""
        return self.peak_bytes / self.budget_bytes


def loss_of(output: Any) -> Tensor:
    """Return the loss in an output, or a mean of all that can be differentiated."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = dict(output.items()) if hasattr(output, "items") else {"output": output}
    values.pop("past_key_values", None)
    return torch.stack(
        [value.float().square().mean() for value in differentiable(values)]
    ).sum()


def result_of(entry: Entry) -> Result:
    """Measure an architecture plainly, with its own checkpointing, and fitted."""
    inputs = entry.inputs()
    model = _built(entry, inputs)
    plain_bytes, expected = _step(model, inputs)
    model = _built(entry, inputs)
    entry.checkpoint(model)
    budget_bytes, _ = _step(model, inputs)
    model = _built(entry, inputs)
    seed_generators(_SEED)
    try:
        _, report = recoup.fit(model, inputs, budget_bytes, loss=loss_of)
    except recoup.errors.InfeasibleError as error:
        return Result(plain_bytes, budget_bytes, floor_bytes=error.floor_bytes)
    peak_bytes, found = _step(model, inputs)
    differences = tuple(tree_differences(expected, found, where=""))
    return Result(
        plain_bytes,
        budget_bytes,
        peak_bytes,
        gap=report.gap,
        differences=differences,
    )


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


def _image_model(name: str) -> Entry:
    def build() -> nn.Module:
        timm = import_module("timm")
        sizes = [{"img_size": _PIXELS[-1]}, {}]
        for size in sizes:
            try:
                return timm.create_model(name, num_classes=10, **size)
            except TypeError:
                continue
        raise AssertionError(f"{name} cannot be built")

    def inputs() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {"x": torch.randn(_PIXELS, generator=generator)}

    return Entry(
        name, "timm", build, inputs, lambda model: model.set_grad_checkpointing()
    )


_WITHOUT = """
    albert convnext ctrl flaubert ibert mpnet patchtst regnet resnet squeezebert xlm
"""
"""Architectures that have no checkpointing of their own."""

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
    pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2net50_26w_4s
    resnest26d test_resnet resnetv2_18 rexnet_100 shvit_s1 skresnet18 starnet_s050
    swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m visformer_tiny
    test_vit vit_tiny_r_s16_p8_224 vit_srelpos_small_patch16_224 vitamin_small_224
    volo_d1_224 ese_vovnet19b_slim_dw xception41 xcit_nano_12_p8_224
"""
TIMM = [_image_model(name) for name in TIMM_NAMES.split()]
