"""PyTorch's own module database as the judge of the engine."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.bits import duplicate
from tests.support.operators import Case, database_module, run_case
from tests.support.twin import Region, Step, seed_generators
from tests.support.variants import differentiable, fixed_weights, records

DTYPES = (torch.float64, torch.float32)
STEPS = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """How to build a module, and what to call it with."""

    build: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """A module class with its samples."""

    name: str
    samples: Callable[[torch.dtype, bool], list[Sample]]


def module_subjects() -> list[Subject]:
    """Return every module of PyTorch's database, and those it lacks."""
    infos = database_module("common_modules").module_db
    return [*(_from_database(info) for info in infos), *MISSING]


def module_cases(
    subject: Subject,
    region: Region,
    *,
    dtypes: Iterable[torch.dtype] = DTYPES,
    limit: int | None = None,
) -> Iterator[Case]:
    """Judge one module, training and evaluating, over two steps each."""
    for dtype in dtypes:
        for training in (True, False):
            for index, sample in enumerate(subject.samples(dtype, training)[:limit]):
                mode = "train" if training else "eval"
                yield run_case(
                    subject.name,
                    dtype,
                    f"sample {index}, {mode}",
                    step=module_step(sample, dtype=dtype, training=training),
                    region=region,
                )


def module_step(sample: Sample, *, dtype: torch.dtype, training: bool) -> Step:
    """Build a module, run it twice in the same scope, and differentiate it."""

    def step(region: Region) -> dict[str, Any]:
        module = sample.build().to(dtype).train(training)
        observed = {}
        scope = region("module")
        for number in range(STEPS):
            args, kwargs = duplicate((sample.args, sample.kwargs))
            with scope:
                result = module(*args, **kwargs)
            leaves = [*differentiable((args, kwargs)), *module.parameters()]
            observed[f"step {number}"] = {
                "output": records(result),
                "gradient": _gradients(result, leaves),
                "input afterwards": records((args, kwargs)),
                "buffer": {k: v.clone() for k, v in module.named_buffers()},
            }
        return observed

    return step


def _gradients(result: Any, leaves: list[Tensor]) -> list[Tensor | None]:
    outputs = differentiable(result)
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if not outputs or not leaves:
        return []
    weights = fixed_weights(outputs)
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))


def _from_database(info: Any) -> Subject:
    def samples(dtype: torch.dtype, training: bool) -> list[Sample]:  # noqa: FBT001
        seed_generators(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=training
            )
        return [_sample(info.module_cls, each) for each in given]

    return Subject(info.formatted_name, samples)


def _sample(module_class: type[nn.Module], given: Any) -> Sample:
    construct, forward = given.constructor_input, given.forward_input

    def build() -> nn.Module:
        # A copy: a module may keep, and write to, what it was built with.
        args, kwargs = duplicate((construct.args, construct.kwargs))
        return module_class(*args, **kwargs)

    return Sample(build, tuple(forward.args), dict(forward.kwargs))


def _missing(module_class: type[nn.Module], *args: Any, shape: list[int]) -> Subject:
    def samples(dtype: torch.dtype, training: bool) -> list[Sample]:  # noqa: FBT001
        generator = torch.Generator().manual_seed(0)
        tensor = torch.randn(shape, generator=generator, dtype=dtype)
        return [Sample(lambda: module_class(*args), (tensor.requires_grad_(),))]

    return Subject(f"nn_{module_class.__name__}", samples)


MISSING = [
    _missing(nn.AlphaDropout, 0.3, shape=[4, 5]),
    _missing(nn.ChannelShuffle, 2, shape=[1, 4, 2, 2]),
    _missing(nn.Dropout, 0.3, shape=[4, 5]),
    _missing(nn.Dropout1d, 0.3, shape=[4, 5, 2]),
    _missing(nn.Dropout2d, 0.3, shape=[2, 4, 3, 3]),
    _missing(nn.Dropout3d, 0.3, shape=[2, 4, 3, 3, 3]),
    _missing(nn.FeatureAlphaDropout, 0.3, shape=[2, 4, 3, 3]),
    _missing(nn.Fold, (4, 5), (2, 2), shape=[1, 12, 12]),
    _missing(nn.LazyBatchNorm1d, shape=[4, 5]),
    _missing(nn.LazyBatchNorm2d, shape=[2, 4, 3, 3]),
    _missing(nn.LazyBatchNorm3d, shape=[2, 4, 3, 3, 3]),
    _missing(nn.LazyInstanceNorm1d, shape=[2, 4, 5]),
    _missing(nn.LazyInstanceNorm2d, shape=[2, 4, 3, 3]),
    _missing(nn.LazyInstanceNorm3d, shape=[2, 4, 3, 3, 3]),
    _missing(nn.LazyLinear, 3, shape=[4, 5]),
    _missing(nn.PixelShuffle, 2, shape=[1, 4, 2, 2]),
    _missing(nn.PixelUnshuffle, 2, shape=[1, 1, 4, 4]),
    _missing(nn.RReLU, shape=[4, 5]),
    _missing(nn.Unfold, (2, 2), shape=[1, 3, 4, 5]),
    _missing(nn.Upsample, (6, 7), shape=[1, 2, 3, 4]),
]
