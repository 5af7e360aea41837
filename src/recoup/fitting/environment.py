"""The environment of a measurement: versions, device, date."""

import platform
from collections.abc import Iterable
from datetime import UTC, datetime

import torch
from torch import nn

from recoup.backend.memory.ledger import storages_in
from recoup.core.device_figures import figures_of
from recoup.core.units import print_bytes
from recoup.core.version import VERSION


def environment(
    device: torch.device, *, estimated_for: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return names and values of what a measurement depends on.

    Args:
        device: Where it ran.
        estimated_for: The device whose times were estimated, if it did not run.

    Examples:
        >>> [name for name, _ in environment(torch.device("cpu"))]
        ['recoup', 'torch', 'Python', 'system', 'device', 'date']
    """
    return (
        ("recoup", VERSION),
        ("torch", str(torch.__version__)),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("device", _estimate_words(estimated_for) or device_words(device)),
        ("date", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
    )


def device_words(device: torch.device) -> str:
    """Return what a device is, in words.

    Examples:
        >>> device_words(torch.device("cpu"))
        'the CPU'
    """
    if device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        return f"{torch.cuda.get_device_name(device)}, {print_bytes(total_bytes)}"
    return "the CPU" if device.type == "cpu" else str(device)


def _estimate_words(name: str) -> str:
    if not name:
        return ""
    if name == "cpu":
        return "the CPU; times estimated"
    figures = figures_of(name)
    memory = print_bytes(figures.memory_bytes)
    return f"{name}, {memory}, not here; times estimated by its figures"


def resident_bytes(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return names and bytes of what of a model is in memory all the time.

    Each storage counts once, however many parameters share it.

    Examples:
        >>> resident_bytes(nn.Linear(2, 2))
        (('parameters', 24),)
    """
    found: list[tuple[str, int]] = []
    seen: set[int] = set()
    for name, tensors in (
        ("parameters", model.parameters()),
        ("buffers", model.buffers()),
    ):
        total = _bytes_of(tensors, seen)
        if total:
            found.append((name, total))
    return tuple(found)


def _bytes_of(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for storage in storages_in(list(tensors)):
        if id(storage) not in seen:
            seen.add(id(storage))
            total += storage.nbytes()
    return total
