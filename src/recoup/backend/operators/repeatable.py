"""Which operator calls are bitwise reproducible on the same inputs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def is_repeatable(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether running a call again gives the same bits.

    It does not if threads write to one place in any order. Many GPU kernels do. On a
    CPU only a few kernels do, with several threads and more elements than one thread
    processes.

    Args:
        name: The operator's name with its overload, as `aten.topk.default`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Examples:
        >>> x, rows = torch.zeros(3), torch.tensor([0, 0])
        >>> args = (x, [rows], torch.ones(2), True)
        >>> is_repeatable("aten.index_put.default", args, {})
        True
    """
    library, base, *_ = name.split(".")
    base = base.rstrip("_")
    if f"{library}::{base}" not in VARYING:
        return True
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    kinds = {tensor.device.type for tensor in given}
    if kinds != {"cpu"}:
        return _is_repeatable_on_accelerator(base, kinds, given, args, kwargs)
    if base not in _RACING_ON_CPU or torch.get_num_threads() == 1:
        return True
    target, indices = args[0], args[1]
    if base == "index_copy":
        indices, values = [None] * args[1] + [args[2]], args[3]
    else:
        values = args[2]
    if isinstance(indices, Tensor):  # of `put`, which indexes the flat target
        return indices.numel() < _GRAIN
    # Masks select each place once; a single value gives the same sum in any order.
    places = [i for i in indices if i is not None and i.dtype not in _MASKS]
    if not places or values.numel() == 1:
        return True
    rows = math.prod(torch.broadcast_shapes(*(place.shape for place in places)))
    indexed = (n for n, i in zip(target.shape, indices, strict=False) if i is not None)
    return rows * target.numel() < _GRAIN * math.prod(indexed)


def _is_repeatable_on_accelerator(
    base: str,
    kinds: set[str],
    given: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    if base == "scatter":
        # A scalar: the order of writes does not matter.
        return not isinstance(args[3], Tensor)
    if base in _ADDING:
        # Sums of integers are exact, in any order.
        made = kwargs.get("dtype") or torch.bool
        return not any(_rounds(d) for d in (made, *(t.dtype for t in given)))
    return base in _ORDERED_ON_CUDA and kinds <= {"cpu", "cuda"}


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# Their shapes may depend on a mask, but they only gather elements of their first
# argument, exactly, and leave no part of their results unwritten.
GATHERING = frozenset({"aten::index", "aten::masked_select"})

# Order among equal elements, counts, indices: all reproducible on a CPU, some on an
# accelerator.
CHOOSING = frozenset(
    {
        "aten::_unique",
        "aten::_unique2",
        "aten::argwhere",
        "aten::bincount",
        "aten::histc",
        "aten::kthvalue",
        "aten::median",
        "aten::mode",
        "aten::nanmedian",
        "aten::nonzero",
        "aten::nonzero_static",
        "aten::one_hot",
        "aten::repeat_interleave",
        "aten::topk",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::unique_dim_consecutive",
    }
)

# Built on stable sorts, prefix sums and comparisons, without races.
_ORDERED_ON_CUDA = frozenset(
    {
        "_unique",
        "_unique2",
        "argwhere",
        "nonzero",
        "nonzero_static",
        "one_hot",
        "repeat_interleave",
        "topk",
        "unique_consecutive",
    }
)

# Only sums make their results vary.
_ADDING = frozenset({"bincount", "cumsum", "histc", "index_add", "scatter_add"})

# Write to one place in any order on accelerators; the documentation of
# torch.use_deterministic_algorithms lists them. Backward operators are included,
# because regions may compute gradients.
_ATOMIC = frozenset(
    {
        "aten::_adaptive_avg_pool2d_backward",
        "aten::_adaptive_avg_pool3d_backward",
        "aten::_ctc_loss_backward",
        "aten::_efficient_attention_backward",
        "aten::_embedding_bag",
        "aten::_embedding_bag_dense_backward",
        "aten::_flash_attention_backward",
        "aten::_index_put_impl",
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_scaled_dot_product_flash_attention_backward",
        "aten::_unsafe_index_put",
        "aten::_upsample_bicubic2d_aa_backward",
        "aten::_upsample_bilinear2d_aa_backward",
        "aten::adaptive_max_pool2d_backward",
        "aten::avg_pool3d_backward",
        "aten::cumsum",
        "aten::fractional_max_pool2d_backward",
        "aten::fractional_max_pool3d_backward",
        "aten::grid_sampler_2d_backward",
        "aten::grid_sampler_3d_backward",
        "aten::index_add",
        "aten::index_copy",
        "aten::index_put",
        "aten::index_reduce",
        "aten::max_pool3d_with_indices_backward",
        "aten::max_unpool2d",
        "aten::max_unpool3d",
        "aten::nll_loss2d_forward",
        "aten::put",
        "aten::reflection_pad1d_backward",
        "aten::reflection_pad2d_backward",
        "aten::reflection_pad3d_backward",
        "aten::replication_pad1d_backward",
        "aten::replication_pad2d_backward",
        "aten::replication_pad3d_backward",
        "aten::scatter",
        "aten::scatter_add",
        "aten::scatter_reduce",
        "aten::segment_reduce",
        "aten::upsample_bicubic2d_backward",
        "aten::upsample_bilinear2d_backward",
        "aten::upsample_linear1d_backward",
        "aten::upsample_trilinear3d_backward",
    }
)

VARYING = _ATOMIC | CHOOSING
"""Operators whose reproducibility depends on the call; see `is_repeatable`."""

# Nondeterministic on a CPU with several threads: additions are atomic, and of two
# writes to one place either may win.
_RACING_ON_CPU = frozenset(
    {"_index_put_impl", "_unsafe_index_put", "index_copy", "index_put", "put"}
)
_GRAIN = 32768  # elements; one thread processes fewer (`at::internal::GRAIN_SIZE`)
_MASKS = frozenset({torch.bool, torch.uint8})
