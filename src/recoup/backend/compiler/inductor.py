"""The partitioner as a picklable Inductor pass.

A separate module, because importing Inductor takes a second and only
`compile="inductor"` needs it.
"""

import time
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from recoup.backend.compiler.partitioning import Partitioner


class InductorPartitioner(CustomPartitionerFn):
    """Passes joint graphs to a `Partitioner`."""

    def __init__(self, partitioner: Partitioner) -> None:
        self._partitioner = partitioner
        # Cached graphs are not partitioned again: a probe must miss the cache.
        self._nonce = time.time_ns() if partitioner.is_probe else 0

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Return forward and backward."""
        return self._partitioner(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Return the partitioner's identity, for the compiler's caches."""
        return f"{self._partitioner.key()} {self._nonce}"
