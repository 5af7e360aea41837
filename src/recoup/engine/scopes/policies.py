"""Policies: which outputs a region keeps although it could recompute them."""

import functools
from dataclasses import dataclass
from typing import Protocol

from recoup.engine.tiers.protocol import Tier
from recoup.errors import UsageError


class Policy(Protocol):
    """Decides for each operator's output whether it is kept, and where.

    A policy may also have a method `keeps_input(nbytes)`, called for each external
    activation that backward or a replay needs. It returns the tier to keep it in, or
    None for the region's `store`.
    """

    def keeps(self, operator: str, nbytes: int) -> bool | Tier | None:
        """Return whether to keep an output.

        Args:
            operator: The operator with its overload, such as `aten.mm.default`.
            nbytes: The bytes of the output's storage.

        Returns:
            A tier to keep it there; True to keep it in the region's `store`, by default
            on the device; False or None to recompute it.
        """
        ...


def recomputes_beside(store: Tier | None, policy: Policy | None) -> bool:
    """Return whether a region with this store and policy recomputes anything."""
    check_store(store)
    return store is None or policy is not None


def check_store(store: Tier | None) -> None:
    """Raise unless `store` is a tier or None."""
    if store is not None and not isinstance(store, Tier):
        raise UsageError(
            f"expected a tier as store=, such as Host() or Disk(), got {store!r}."
        )


@dataclass(frozen=True, slots=True)
class KeepCostly:
    """Keep outputs of expensive operators (matrix products, convolutions, attention).

    Pointwise operators, norms and activations are recomputed: their outputs are large
    and cheap. Of the expensive ones, only outputs that backward or a replay needs are
    held once the region has ended.

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
