"""Figures of devices: what their makers say they do at best, to estimate times by."""

from dataclasses import dataclass

from recoup.errors import UsageError


@dataclass(frozen=True, slots=True)
class Figures:
    """The peak throughput of a device.

    Attributes:
        name: Its name.
        memory_bytes: The memory it has; 0: not said.
        bytes_per_second: How fast its memory is read or written.
        flops_per_second: Dense matrix products, by the bytes of a number: 2 for
            bfloat16 and float16, 4 for float32, 8 for float64.
        link_bytes_per_second: How fast it copies to the host, one way; 0: no link.
        source: Where the figures come from.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: tuple[tuple[int, float], ...]
    link_bytes_per_second: float
    source: str

    def flops_of(self, number_bytes: int) -> float:
        """Return the operations per second on numbers of so many bytes.

        Of a size that is not listed, the next larger one's, or the largest one's.

        Examples:
            >>> FIGURES["a100"].flops_of(2) / FIGURES["a100"].flops_of(4)
            16.0
            >>> FIGURES["a100"].flops_of(1) == FIGURES["a100"].flops_of(2)
            True
        """
        for size, flops_per_second in self.flops_per_second:
            if number_bytes <= size:
                return flops_per_second
        return self.flops_per_second[-1][1]


def figures_of(name: str) -> Figures:
    """Return the figures of a device by its name.

    Raises:
        UsageError: It is not in the table.

    Examples:
        >>> figures_of("H100").memory_bytes
        80000000000
        >>> figures_of("abacus")
        Traceback (most recent call last):
        recoup.errors.UsageError: there are no figures of a device 'abacus': ...
    """
    found = FIGURES.get(name.lower())
    if found is None:
        raise UsageError(
            f"there are no figures of a device {name!r}: known are "
            f"{', '.join(FIGURES)}, and cpu for this machine's CPU."
        )
    return found


# Without sparsity. Numbers of 4 bytes are computed as float32, not as TensorFloat-32,
# which is what PyTorch does with matrix products by default. The links
# are PCI Express with 16 lanes, one way.
FIGURES = {
    figures.name: figures
    for figures in (
        Figures(
            "h200",
            memory_bytes=141_000_000_000,
            bytes_per_second=4.8e12,
            flops_per_second=((2, 989.4e12), (4, 66.9e12), (8, 66.9e12)),
            link_bytes_per_second=64e9,
            source="NVIDIA H200 Tensor Core GPU, data sheet, SXM",
        ),
        Figures(
            "h100",
            memory_bytes=80_000_000_000,
            bytes_per_second=3.35e12,
            flops_per_second=((2, 989.4e12), (4, 66.9e12), (8, 66.9e12)),
            link_bytes_per_second=64e9,
            source="NVIDIA H100 Tensor Core GPU Architecture, white paper, SXM5",
        ),
        Figures(
            "a100",
            memory_bytes=80_000_000_000,
            bytes_per_second=2.039e12,
            flops_per_second=((2, 312e12), (4, 19.5e12), (8, 19.5e12)),
            link_bytes_per_second=32e9,
            source="NVIDIA A100 Tensor Core GPU, data sheet, 80 GB SXM",
        ),
        Figures(
            "rtx4090",
            memory_bytes=24_000_000_000,
            bytes_per_second=1.008e12,
            flops_per_second=((2, 165.2e12), (4, 82.6e12), (8, 1.29e12)),
            link_bytes_per_second=32e9,
            source="NVIDIA Ada GPU Architecture, white paper, GeForce RTX 4090",
        ),
    )
}
"""The devices whose figures are known."""
