"""Roofline times: FLOPs and memory traffic over a device's peak rates."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from recoup.backend.state.trees import tensors
from recoup.core.device_figures import Figures
from recoup.measurement.timing.pace import least_seconds

_PRODUCT = 384
_COPIED_BYTES = 1 << 24
_REPEATS = 5


class Roofline:
    """A timer that runs an operator for its shapes only and estimates its time.

    The estimate is the time of its arithmetic, or of reading its arguments and writing
    its results, whichever is longer. Arithmetic is counted for matrix products,
    convolutions and attention, by torch's formulas. Launch overhead is not included:
    the estimate is for operators that keep a device busy.

    Examples:
        >>> from recoup.core.device_figures import figures_of
        >>> line = Roofline(figures_of("h100"))
        >>> x = torch.empty(1024, 1024)
        >>> _, number = line.run(partial(torch.ops.aten.mm.default, x, x))
        >>> line.seconds(number) == 2 * 1024**3 / 66.9e12
        True
    """

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._seconds: list[float] = []

    def run(self, call: partial[Any]) -> tuple[Any, int]:
        """Run an operator once; return its result and its estimate's number."""
        out = call()
        self._seconds.append(self._estimate(call, out))
        return out, len(self._seconds) - 1

    def again(self, call: partial[Any], number: int) -> int:
        """Return the same number: a second estimate is no better."""
        del call
        return number

    def join(self, number: int, other: int) -> None:
        """Do nothing: equal calls have equal estimates."""

    def seconds(self, number: int) -> float:
        """Return the estimated duration of one call."""
        return self._seconds[number]

    def _estimate(self, call: partial[Any], out: Any) -> float:
        given = tensors((call.args, call.keywords))
        made = tensors(out)
        flops = flops_of(call, out)
        seconds = (
            sum(map(_touched_bytes, given + made)) / self._figures.bytes_per_second
        )
        if flops:
            numbers = [t.element_size() for t in made or given if t.is_floating_point()]
            speed = self._figures.flops_of(max(numbers[:1], default=4))
            seconds = max(seconds, flops / speed)
        return seconds


def flops_of(call: partial[Any], out: Any) -> int:
    """Return the FLOPs of a call as torch counts them, or 0 if it does not.

    Examples:
        >>> x = torch.empty(10, 10)
        >>> flops_of(partial(torch.ops.aten.mm.default, x, x), x)
        2000
        >>> flops_of(partial(torch.ops.aten.exp.default, x), x)
        0
    """
    packet: Any = getattr(call.func, "overloadpacket", None)
    formula = flop_registry.get(_SAME_AS.get(packet, packet))
    if formula is None:
        return 0
    return int(formula(*call.args, **call.keywords, out_val=out))


def here() -> Figures:
    """Return the measured figures of this machine's CPU.

    Multiplies two small matrices and copies 16 MiB, several times each.

    Examples:
        >>> here().name
        'cpu'
    """
    left = torch.ones(_PRODUCT, _PRODUCT, device="cpu")
    source = torch.ones(_COPIED_BYTES // 4, device="cpu")
    target = torch.empty_like(source)
    product_seconds = least_seconds(lambda: left @ left, left.device, _REPEATS)
    copy_seconds = least_seconds(lambda: target.copy_(source), left.device, _REPEATS)
    flops_per_second = 2 * _PRODUCT**3 / product_seconds
    return Figures(
        "cpu",
        memory_bytes=0,
        bytes_per_second=2 * _COPIED_BYTES / copy_seconds,
        flops_per_second=((4, flops_per_second), (8, flops_per_second / 2)),
        link_bytes_per_second=0.0,
        source="measured on this machine",
    )


def _touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's memory, expanded dimensions counted once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


_ATTENTION = "_scaled_dot_product_flash_attention"
_SAME_AS: dict[Any, Any] = {
    getattr(torch.ops.aten, f"{_ATTENTION}_for_cpu{half}"): getattr(
        torch.ops.aten, f"{_ATTENTION}{half}"
    )
    for half in ("", "_backward")
}
"""Operators without a formula, mapped to equivalent ones."""
