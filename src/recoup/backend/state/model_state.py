"""The model state that affects what a step saves: modes and trained parameters."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recoup.backend.compiler.recognition import is_sharded
from recoup.backend.memory.ledger import tensor_bytes
from recoup.core.units import print_bytes

_SENSITIVE = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
"""Torch's layers that behave differently in training and evaluation."""

_WITNESSES = 8
"""The number of parameters that are checked for a gradient in every step."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """The state of a model at a call.

    Attributes:
        training: For each module, whether it is in training mode.
        trained: For each parameter, whether it requires a gradient.
        element_bytes: For each parameter, the size of an element.
        autocast: The autocast dtype on the model's device, or None if it is off.
    """

    training: bytes
    trained: bytes
    element_bytes: bytes
    autocast: torch.dtype | None


class StateReader:
    """Reads the state of one model at every call.

    Costs one attribute access per module and two per parameter, without Python function
    calls. Does not keep the model alive.

    Attributes:
        classes: The classes of its modules at the last `read`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.classes: set[type[nn.Module]] = {type(m) for m in model.modules()}
        modules = list(model.named_modules())
        self._names = [name for name, _ in modules]
        self._modules = [weakref.ref(module) for _, module in modules]
        self._owners = [
            (name, weakref.ref(module))
            for name, module in modules
            if module._parameters
        ]
        # FSDP2 puts whole parameters in place of its own while it uses them. Their
        # gradients, which it exchanges, are counted by `HeldGradients`.
        self._foreign = nn.Parameter if any(map(is_sharded, self.classes)) else None
        self._trained = b""
        self._witnesses: list[tuple[weakref.ref[nn.Module], str]] = []
        first = next(model.parameters(), None)
        self._device_type = "cpu" if first is None else first.device.type

    def is_of(self, model: nn.Module) -> bool:
        """Return whether this reads `model`, and all its modules still exist."""
        return self._modules[0]() is model and None not in [
            module() for module in self._modules
        ]

    def read(self) -> ModelState:
        """Return the state now."""
        kind = self._device_type
        modules: list[Any] = [module() for module in self._modules]
        owners: list[Any] = [owner() for _, owner in self._owners]
        parameters: list[Any] = [
            parameter for owner in owners for parameter in owner._parameters.values()
        ]
        trained = bytes([p is not None and p.requires_grad for p in parameters])
        self.classes = {type(module) for module in modules}
        if trained != self._trained:
            self._trained = trained
            self._witnesses = self._choose_witnesses()
        return ModelState(
            bytes([module.training for module in modules]),
            trained,
            bytes([0 if p is None else p.itemsize for p in parameters]),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        )

    def _choose_witnesses(self) -> list[tuple[weakref.ref[nn.Module], str]]:
        """Return a sample of parameters, whose gradients represent the model's.

        The largest trained one of each top-level child, because optimizers and freezing
        usually divide a model by these; at most `_WITNESSES` in all.
        """
        largest: dict[str, tuple[int, weakref.ref[nn.Module], str]] = {}
        for path, owner in self._owners:
            part = path.partition(".")[0]
            module: Any = owner()
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if part not in largest or parameter.numel() > largest[part][0]:
                    largest[part] = (parameter.numel(), owner, name)
        chosen = sorted(largest.values(), key=lambda found: -found[0])[:_WITNESSES]
        return [(owner, name) for _, owner, name in chosen]

    def carries_gradients(self) -> int:
        """Return a bit for each sampled parameter that has a gradient.

        Cheap enough for every step: the sample is small, whatever the model's size.
        """
        found = 0
        for number, (owner, name) in enumerate(self._witnesses):
            module: Any = owner()
            parameter = None if module is None else module._parameters.get(name)
            if (
                parameter is not None
                and parameter.grad is not None
                and type(parameter) is not self._foreign
            ):
                found |= 1 << number
        return found

    def gradient_bytes(self) -> dict[str, int]:
        """Return the bytes of each gradient that exists now, by parameter."""
        found: dict[str, int] = {}
        known: set[int] = set()
        for path, owner in self._owners:
            for name, parameter in _parameters_of(owner()).items():
                if parameter is None or type(parameter) is self._foreign:
                    continue
                gradient = parameter.grad
                if gradient is None or id(parameter) in known:
                    continue
                known.add(id(parameter))
                found[f"{path}.{name}" if path else name] = tensor_bytes(gradient)
        return found

    def trained_bytes(self) -> dict[str, int]:
        """Return the bytes of each parameter that requires a gradient."""
        return {
            f"{path}.{name}" if path else name: tensor_bytes(parameter)
            for path, owner in self._owners
            for name, parameter in _parameters_of(owner()).items()
            if parameter is not None and parameter.requires_grad
        }

    def differences(self, before: ModelState, now: ModelState) -> list[str]:
        """Describe the changes that make a step take more than the measured one."""
        found: list[str] = []
        if before.training != now.training:
            changed = [
                (not isinstance(module(), _SENSITIVE), name or "the model", is_now)
                for name, module, was, is_now in zip(
                    self._names,
                    self._modules,
                    before.training,
                    now.training,
                    strict=False,
                )
                if was != is_now
            ]
            changed.sort(key=lambda change: change[0])
            for mode, wanted in (("training", 1), ("eval", 0)):
                names = [name for _, name, is_now in changed if is_now == wanted]
                if names:
                    found.append(f"{listed(names)} changed to {mode} mode")
        names = self._larger_since(before.trained, now.trained)
        if names:
            found.append(f"{listed(names)} now require a gradient")
        names = self._larger_since(before.element_bytes, now.element_bytes)
        if names:
            found.append(f"{listed(names)} changed to a larger dtype")
        if before.autocast != now.autocast:
            found.append(f"autocast was {before.autocast} and is {now.autocast}")
        return found

    def _larger_since(self, before: bytes, now: bytes) -> list[str]:
        """Return the names of the parameters whose entry has increased."""
        if before == now:
            return []
        names = [
            f"{name}.{own}" if name else own
            for name, owner in self._owners
            for own in _parameters_of(owner())
        ]
        return [
            name
            for name, was, is_now in zip(names, before, now, strict=False)
            if is_now > was
        ]


def _parameters_of(module: nn.Module | None) -> Mapping[str, nn.Parameter | None]:
    return {} if module is None else module._parameters


def evaluation_advice(model: nn.Module) -> str | None:
    """Return the warning for a model that is measured in eval mode, or None.

    Examples:
        >>> evaluation_advice(nn.Dropout()) is None
        True
        >>> evaluation_advice(nn.Sequential(nn.Linear(1, 1), nn.Dropout()).eval())
        'expected a model in training mode, got layers in eval mode that ...'
    """
    if model.training:
        return None
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _SENSITIVE) and not module.training and _acts(module)
    ]
    if not names:
        return None
    return (
        "expected a model in training mode, got layers in eval mode that behave "
        f"differently in training ({listed(names)}); the plan is for the step in eval "
        "mode. Call model.train() before recoup.fit if you train in training mode "
        "(from_pretrained returns a model in eval mode)."
    )


def _acts(module: Any) -> bool:
    """Return whether a layer has an effect in training; `Dropout(0)` has none."""
    return getattr(module, "p", None) != 0


def needs(needed_bytes: int, budget_bytes: int) -> str:
    """Describe what a step needs and what its budget is."""
    return (
        f"it needs about {print_bytes(needed_bytes)}, the budget is "
        f"{print_bytes(budget_bytes)}"
    )


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return some of the names, and the number of the others.

    Examples:
        >>> listed(["a", "b", "c", "d"])
        'a, b, c and 1 more'
    """
    shown = ", ".join(names[:most])
    more = len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown
