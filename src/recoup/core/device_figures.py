"""Peak throughput of devices by their data sheets, to estimate times."""

from dataclasses import dataclass

from recoup.errors import UsageError


@dataclass(frozen=True, slots=True)
class Figures:
    """The peak throughput of a device.

    Attributes:
        name: Its name.
        memory_bytes: The size of its memory; 0: not specified.
        bytes_per_second: The bandwidth of its memory.
        flops_per_second: Dense matrix products, by the bytes of a number: 2 for
            bfloat16 and float16, 4 for float32, 8 for float64.
        link_bytes_per_second: The bandwidth to the host, one way; 0: no link.
        source: The source of the figures.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: tuple[tuple[int, float], ...]
    link_bytes_per_second: float
    source: str

    def flops_of(self, number_bytes: int) -> float:
        """Return the operations per second on numbers of a given size in bytes.

        For an unlisted size, those of the next larger one, or of the largest.

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
        UsageError: The device is not in the table.

    Examples:
        >>> figures_of("H100").memory_bytes
        80000000000
        >>> figures_of("abacus")
        Traceback (most recent call last):
        recoup.errors.UsageError: expected a device with known figures, got 'abacus'...
    """
    found = FIGURES.get(name.lower())
    if found is None:
        raise UsageError(
            f"expected a device with known figures, got {name!r}; known are "
            f"{', '.join(FIGURES)}, and cpu for this machine's CPU."
        )
    return found


# Without sparsity. Numbers of 4 bytes are computed as float32, not as TensorFloat-32:
# the default of PyTorch for matrix products. Links are PCI Express with 16 lanes, one
# way.
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
