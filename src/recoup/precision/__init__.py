"""Mixed precision: autocast, loss scaling, and values outside a format's range.

Works with any loop; the trainer only calls it.
"""

from recoup.precision.mixed_precision import MixedPrecisionScope
from recoup.precision.ranges import RangeMonitor
from recoup.precision.scaler import GradientScaler

__all__ = ["GradientScaler", "MixedPrecisionScope", "RangeMonitor"]
