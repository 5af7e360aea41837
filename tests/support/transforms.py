"""The transforms of `torch.func`, with a region inside them and around them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, func
from torch.utils import _pytree as pytree

from tests.support.bits import duplicate
from tests.support.operators import Case, dense_samples, run_case
from tests.support.twin import Region, Step, plain
from tests.support.variants import differentiable, fixed_weights, tensors

Function = Callable[..., Any]
Transform = Callable[[Function, Sequence[Tensor]], Any]

# A jacobian has as many rows as the function has outputs: keep to small samples.
MOST_ELEMENTS = 300


def total(function: Function) -> Function:
    """Make a real scalar of a function's outputs."""

    def scalar(*inputs: Tensor) -> Tensor:
        outputs = function(*inputs)
        weights = fixed_weights(outputs)
        terms = [(o * w).sum() for o, w in zip(outputs, weights, strict=True)]
        return torch.stack([t.real if t.is_complex() else t for t in terms]).sum()

    return scalar


def grad(function: Function, inputs: Sequence[Tensor]) -> Any:
    return func.grad(total(function), argnums=tuple(range(len(inputs))))(*inputs)


def vjp(function: Function, inputs: Sequence[Tensor]) -> Any:
    outputs, pull = func.vjp(function, *inputs)[:2]
    return outputs, pull(fixed_weights(outputs))


def jvp(function: Function, inputs: Sequence[Tensor]) -> Any:
    return func.jvp(function, tuple(inputs), tuple(fixed_weights(inputs)))


def vmap(function: Function, inputs: Sequence[Tensor]) -> Any:
    batches = [torch.stack([tensor, tensor * 0.5]) for tensor in inputs]
    return func.vmap(function, randomness="different")(*batches)


def jacrev(function: Function, inputs: Sequence[Tensor]) -> Any:
    return func.jacrev(function, argnums=tuple(range(len(inputs))))(*inputs)


TRANSFORMS: dict[str, Transform] = {
    "grad": grad,
    "vjp": vjp,
    "jvp": jvp,
    "vmap": vmap,
    "jacrev": jacrev,
}


def inside(
    op: Any, sample: Any, transform: Transform, *, differentiate: bool = False
) -> Step:
    """Open the region inside the transformed function."""

    def step(region: Region) -> dict[str, Any]:
        function, inputs = _function(op, sample, region, differentiate=differentiate)
        return _results(transform(function, inputs), inputs)

    return step


def around(
    op: Any, sample: Any, transform: Transform, *, differentiate: bool = False
) -> Step:
    """Open the region around the transform."""

    def step(region: Region) -> dict[str, Any]:
        function, inputs = _function(op, sample, plain, differentiate=differentiate)
        with region("transform"):
            values = transform(function, inputs)
        return _results(values, inputs)

    return step


PLACES = {"inside": inside, "around": around}


def transform_cases(
    op: Any,
    region: Region,
    *,
    refusals: tuple[type[BaseException], ...],
    device: str = "cpu",
) -> Iterator[Case]:
    """Judge one operator under every transform, on its first small sample.

    A right answer is equal to the plain one; an exception of `refusals` is allowed.
    """
    sample = _small_sample(op, device) if op.supports_autograd else None
    if sample is None:
        return
    for name, transform in TRANSFORMS.items():
        for place, build in PLACES.items():
            for differentiate in (False, True):
                then = ", then backward" if differentiate else ""
                yield run_case(
                    op.formatted_name,
                    torch.float64,
                    f"region {place} {name}{then}",
                    step=build(op, sample, transform, differentiate=differentiate),
                    region=region,
                    refusals=refusals,
                )


def _small_sample(op: Any, device: str) -> Any | None:
    if torch.float64 not in op.supported_dtypes(device):
        return None
    for sample in dense_samples(op, torch.float64, device, 10):
        given = tensors((sample.input, sample.args, sample.kwargs))
        inputs = [tensor for tensor in given if tensor.requires_grad]
        if inputs and sum(tensor.numel() for tensor in given) <= MOST_ELEMENTS:
            return sample
    return None


def _function(
    op: Any, sample: Any, region: Region, *, differentiate: bool
) -> tuple[Function, list[Tensor]]:
    """Make the operator a function of its differentiable inputs alone."""
    given = duplicate((sample.input, sample.args, sample.kwargs))
    leaves, shape = pytree.tree_flatten(given)
    inputs = differentiable(given)
    places = [i for i, leaf in enumerate(leaves) if any(leaf is t for t in inputs)]
    arguments = [leaves[place] for place in places]

    def function(*replacements: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for place, replacement in zip(places, replacements, strict=True):
            filled[place] = replacement
        first, args, kwargs = pytree.tree_unflatten(filled, shape)
        with region("function"):
            result = op(first, *args, **kwargs)
        result = sample.output_process_fn_grad(result)
        floating = [t for t in tensors(result) if _has_gradient(t)]
        return [t if t.layout == torch.strided else t.to_dense() for t in floating]

    return function, arguments if differentiate else [t.detach() for t in arguments]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _results(values: Any, inputs: Sequence[Tensor]) -> dict[str, Any]:
    results = {"value": pytree.tree_map_only(Tensor, Tensor.detach, values)}
    outputs, leaves = differentiable(values), differentiable(inputs)
    if outputs and leaves:
        results["gradient"] = torch.autograd.grad(
            outputs, leaves, fixed_weights(outputs), allow_unused=True
        )
    return results
