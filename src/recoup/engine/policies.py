"""Policies: which outputs a region keeps although it could recompute them."""

import functools
from dataclasses import dataclass
from typing import Protocol


class Policy(Protocol):
    """Decides for each operator's output whether it is kept."""

    def keeps(self, operator: str, nbytes: int) -> bool:
        """Return whether to keep an output.

        Args:
            operator: The operator with its overload, as `aten.mm.default`.
            nbytes: The bytes of the output's storage.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeepCostly:
    """Keep what is dear to compute (matrix products, convolutions, attention).

    Pointwise operators, norms and activations are recomputed: their outputs are
    large and cheap. Of the outputs named, only those that backward or a replay needs
    are held once the region has ended.

    Examples:
        >>> KeepCostly().keeps("aten.mm.default", 4096)
        True
        >>> KeepCostly().keeps("aten.gelu.default", 4096)
        False
    """

    def keeps(self, operator: str, nbytes: int) -> bool:
        """Return whether the operator is a matrix product, convolution or attention."""
        del nbytes
        return _is_costly(operator)


@dataclass(frozen=True, slots=True)
class KeepSmall:
    """Keep outputs of at most `threshold_bytes`; recompute larger ones.

    Examples:
        >>> KeepSmall(10 * 1024).keeps("aten.mm.default", 10 * 1024)
        True
        >>> KeepSmall(10 * 1024).keeps("aten.mm.default", 10 * 1024 + 1)
        False
    """

    threshold_bytes: int

    def keeps(self, operator: str, nbytes: int) -> bool:
        """Return whether the output is small enough to keep."""
        del operator
        return nbytes <= self.threshold_bytes


@functools.cache
def _is_costly(operator: str) -> bool:
    return operator.split(".")[1] in _COSTLY


_COSTLY = frozenset(
    {
        "_convolution",
        "_cudnn_rnn",
        "_efficient_attention_forward",
        "_flash_attention_forward",
        "_grouped_mm",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_mm",
        "addbmm",
        "addmm",
        "baddbmm",
        "bmm",
        "convolution",
        "linear",
        "mkldnn_rnn_layer",
        "mm",
    }
)
