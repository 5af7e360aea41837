"""An examination of this machine: versions, devices, and whether recoup works."""

import importlib.metadata
from typing import Any

import torch

from recoup.backend.memory.streams import link_bytes_per_second
from recoup.core.display import table
from recoup.core.units import print_bytes
from recoup.engine.scopes.function import checkpoint
from recoup.fitting.collected_findings import device_words, environment

_OPTIONAL = ("numpy", "scipy", "jax", "autograd", "tensorboard", "transformers")


def examine() -> dict[str, Any]:
    """Return the findings; `works` is whether gradients were bitwise equal.

    Copies a little memory over each link and runs one small region on each device.
    """
    devices = [_examine_device(device) for device in _devices()]
    return {
        "environment": dict(environment(torch.device("cpu"))),
        "packages": {name: _version(name) for name in _OPTIONAL},
        "devices": devices,
        "works": all(device["gradients_equal"] for device in devices),
    }


def examination_verdict(found: dict[str, Any]) -> str:
    """Return whether recoup works here, and on which devices it does not.

    Examples:
        >>> devices = [{"name": "cpu", "gradients_equal": False}]
        >>> examination_verdict({"devices": devices})
        'recoup does not work on cpu: gradients differ from the plain run.'
    """
    names = {
        equal: [d["name"] for d in found["devices"] if d["gradients_equal"] == equal]
        for equal in (True, False)
    }
    if bad := ", ".join(names[False]):
        return f"recoup does not work on {bad}: gradients differ from the plain run."
    return (
        f"recoup works here: gradients are bitwise equal on {', '.join(names[True])}."
    )


def examination_text(found: dict[str, Any]) -> str:
    """Return an examination as text."""
    rows = {**found["environment"]}
    del rows["device"]
    packages = {k: v or "not installed" for k, v in found["packages"].items()}
    return "\n".join(
        [
            table(["what", "found"], [[k, v] for k, v in (rows | packages).items()]),
            "",
            table(
                ["device", "name", "link to the host", "recoup works"],
                [
                    [
                        device["name"],
                        device["words"],
                        _link_words(device["link_bytes_per_second"]),
                        "yes" if device["gradients_equal"] else "no",
                    ]
                    for device in found["devices"]
                ],
            ),
        ]
    )


def gradients_equal(device: torch.device) -> bool:
    """Return whether a region on a device gives bitwise the plain gradients.

    Examples:
        >>> gradients_equal(torch.device("cpu"))
        True
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(32, 32, generator=generator, device="cpu").to(device)
    found: list[torch.Tensor] = []
    for inside in (False, True):
        x = start.clone().requires_grad_()
        out = checkpoint(_function, x) if inside else _function(x)
        found += torch.autograd.grad(out, x)
    return torch.equal(*found)


def _function(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).tanh().exp().sin().sum()


def _devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        count = torch.accelerator.device_count()
        found += [torch.device(accelerator.type, n) for n in range(count)]
    return found


def _examine_device(device: torch.device) -> dict[str, Any]:
    return {
        "name": str(device),
        "words": device_words(device),
        "link_bytes_per_second": link_bytes_per_second(device),
        "gradients_equal": gradients_equal(device),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _link_words(bytes_per_second: float) -> str:
    return f"{print_bytes(int(bytes_per_second))}/s" if bytes_per_second else "-"
