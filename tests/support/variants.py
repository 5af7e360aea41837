"""The ways an operator of PyTorch's database is put inside a region."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from tests.support.bits import duplicate
from tests.support.twin import Region, Step


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to use an operator, and the operators it makes sense for."""

    name: str
    applies: Callable[[Any], bool]
    build: Callable[[Any, Any], Step]


def alone(op: Any, sample: Any) -> Step:
    """Run the operator as all there is in the region."""

    def step(region: Region) -> dict[str, Any]:
        given = duplicate((sample.input, sample.args, sample.kwargs))
        first, args, kwargs = given
        with region("operator"):
            result = op(first, *args, **kwargs)
        result = sample.output_process_fn_grad(result)
        return first_order(result, given)

    return step


def nested(op: Any, sample: Any) -> Step:
    """Put the operator's region inside a larger one that saves its result.

    Verification is off: this is what every step after the first one runs.
    """

    def step(region: Region) -> dict[str, Any]:
        given = duplicate((sample.input, sample.args, sample.kwargs))
        first, args, kwargs = given
        with region("larger", verify="off"):
            with region("operator", verify="off"):
                result = op(first, *args, **kwargs)
            outputs = _dense(sample.output_process_fn_grad(result))
            weights = [_weight_like(output) for output in outputs]
            pairs = zip(outputs, weights, strict=True)
            result = [output * (weight * weight) for output, weight in pairs]
        return first_order(result, (given, weights))

    return step


def inplace_outside(op: Any, sample: Any) -> Step:
    """Overwrite, inside the region, a tensor made before it."""

    def step(region: Region) -> dict[str, Any]:
        given = duplicate((sample.input, sample.args, sample.kwargs))
        first, args, kwargs = given
        target = first.clone()
        with region("operator"):
            result = op.inplace_variant(target, *args, **kwargs)
        return first_order((result, target), given)

    return step


def inplace_inside(op: Any, sample: Any) -> Step:
    """Overwrite a tensor made inside the region, whose old value was saved."""

    def step(region: Region) -> dict[str, Any]:
        given = duplicate((sample.input, sample.args, sample.kwargs))
        first, args, kwargs = given
        with region("operator"):
            # `square` saves its input, so the value before the write is needed too.
            target = first.clone()
            before = target.clone().square()
            result = op.inplace_variant(target, *args, **kwargs)
            after = result * result
        return first_order((before, result, after), given)

    return step


def out(op: Any, sample: Any) -> Step:
    """Write the result into a buffer of the right shape, and save the buffer."""
    return _out(op, sample, make=torch.empty_like)


def out_resized(op: Any, sample: Any) -> Step:
    """Write the result into an empty buffer that the operator must enlarge."""
    return _out(op, sample, make=lambda t: t.new_empty(0))


def factor(op: Any, sample: Any) -> Step:
    """Use a result that has no gradient as a factor, so that autograd saves it."""

    def step(region: Region) -> dict[str, Any]:
        given = duplicate((sample.input, sample.args, sample.kwargs))
        first, args, kwargs = given
        with region("operator"):
            result = op(first, *args, **kwargs)
            weights, products = _products(result)
        return first_order((result, products), (given, weights))

    return step


def second_order(op: Any, sample: Any) -> Step:
    """Differentiate the gradients once more."""

    def step(region: Region) -> dict[str, Any]:
        given = duplicate((sample.input, sample.args, sample.kwargs))
        first, args, kwargs = given
        with region("operator"):
            result = op(first, *args, **kwargs)
        outputs = differentiable(sample.output_process_fn_grad(result))
        leaves = differentiable(given)
        weights = [w.requires_grad_() for w in fixed_weights(outputs)]
        if not outputs or not leaves:
            return {}
        once = _gradients(outputs, leaves, weights, create_graph=True)
        again = differentiable(once)
        twice = _gradients(again, [*leaves, *weights], fixed_weights(again))
        return {"gradient": once, "second gradient": twice}

    return step


def forward_mode(op: Any, sample: Any) -> Step:
    """Push tangents forward through the region."""

    def step(region: Region) -> dict[str, Any]:
        given = duplicate((sample.input, sample.args, sample.kwargs))
        with forward_ad.dual_level():
            first, args, kwargs = pytree.tree_map_only(Tensor, _dual, given)
            with region("operator"):
                result = op(first, *args, **kwargs)
            parts = [forward_ad.unpack_dual(t) for t in tensors(result)]
        return {
            "output": [part.primal for part in parts],
            "tangent": [part.tangent for part in parts],
        }

    return step


def _has_inplace(op: Any) -> bool:
    return op.supports_inplace_autograd and op.inplace_variant is not None


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("alone", lambda op: op.supports_autograd, alone),
        Variant("nested", lambda op: op.supports_autograd, nested),
        Variant("inplace outside", _has_inplace, inplace_outside),
        Variant("inplace inside", _has_inplace, inplace_inside),
        Variant("out", lambda op: op.supports_out, out),
        Variant("out resized", lambda op: op.supports_out, out_resized),
        Variant("factor", lambda op: not op.supports_autograd, factor),
        Variant("second order", lambda op: op.supports_gradgrad, second_order),
        Variant("forward mode", lambda op: op.supports_forward_ad, forward_mode),
    )
}


def first_order(result: Any, given: Any) -> dict[str, Any]:
    """Collect outputs, gradients, and what the step did to its inputs."""
    outputs = differentiable(result)
    leaves = differentiable(given)
    observed: dict[str, Any] = {"output": records(result)}
    if outputs and leaves:
        gradients = _gradients(outputs, leaves, fixed_weights(outputs))
        observed["gradient"] = gradients
    return observed | {"input afterwards": records(given)}


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def differentiable(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree that require a gradient."""
    return [tensor for tensor in tensors(tree) if tensor.requires_grad]


def fixed_weights(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Make output gradients that are the same each time, and not all alike.

    A generator of their own leaves the global random state alone.
    """
    generator = torch.Generator().manual_seed(20)
    made = []
    for output in outputs:
        dtype = torch.complex128 if output.is_complex() else torch.float64
        weight = torch.randn(output.shape, generator=generator, dtype=dtype)
        made.append(weight.to(device=output.device, dtype=output.dtype))
    return made


def records(tree: Any) -> Any:
    """Copy the tensors of a tree, so that later writes do not change the record."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), tree)


def _gradients(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    # Sparse results are made dense first: a sparse output gradient would have to
    # have the very pattern of the result.
    outputs = [o if o.layout == torch.strided else o.to_dense() for o in outputs]
    return list(
        torch.autograd.grad(
            outputs, leaves, weights, create_graph=create_graph, allow_unused=True
        )
    )


def _products(tree: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Multiply every tensor of a tree by a new leaf, so that autograd saves it."""
    outputs = _dense(tree)
    weights = [_weight_like(output) for output in outputs]
    pairs = zip(outputs, weights, strict=True)
    return weights, [output * weight for output, weight in pairs]


def _weight_like(tensor: Tensor) -> Tensor:
    """Make a leaf of the same shape: its gradient shows every bit of the tensor.

    A single number would not do: its gradient is a sum, in which bits get lost.
    """
    kind = tensor.dtype if tensor.dtype.is_floating_point else torch.float64
    kind = tensor.dtype if tensor.is_complex() else kind
    return torch.full_like(tensor, 0.75, dtype=kind).requires_grad_()


def _dense(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, those of sparse layouts made dense."""
    return [t if t.layout == torch.strided else t.to_dense() for t in tensors(tree)]


def _dual(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    primal = tensor.detach()
    return forward_ad.make_dual(primal, fixed_weights([primal])[0])


def _out(op: Any, sample: Any, *, make: Callable[[Tensor], Tensor]) -> Step:
    def step(region: Region) -> dict[str, Any]:
        given = duplicate((sample.input, sample.args, sample.kwargs))
        first, args, kwargs = given
        with torch.no_grad():
            probe = op(first, *args, **kwargs)
        with region("operator"):
            with torch.no_grad():
                buffers = pytree.tree_map_only(Tensor, make, probe)
                op(first, *args, **kwargs, out=buffers)
            weights, products = _products(buffers)
        return first_order((buffers, products), (given, weights))

    return step
