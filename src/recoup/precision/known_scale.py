"""The scale as the host knows it, so that the device need not be asked or corrected."""

import ctypes
import math
from dataclasses import dataclass


@dataclass(slots=True)
class KnownScale:
    """A scale and its count of good steps, moved as torch moves them on the device.

    Attributes:
        scale: The scale, a number of 32 bits.
        good_steps: Steps without overflow since it last changed.

    Examples:
        >>> known = KnownScale(8.0)
        >>> known.update(overflowed=True, growth=2.0, backoff=0.5, interval=1)
        >>> known.scale
        4.0
    """

    scale: float
    good_steps: int = 0

    def update(
        self, *, overflowed: bool, growth: float, backoff: float, interval: int
    ) -> None:
        """Move as `torch._amp_update_scale_` does, rounding included."""
        if overflowed:
            self.scale = _rounded(self.scale * backoff)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == interval:
            grown = _rounded(self.scale * growth)
            # As on the device: a scale that would leave the range stays.
            if math.isfinite(grown):
                self.scale = grown
            self.good_steps = 0


def _rounded(number: float) -> float:
    return ctypes.c_float(number).value
