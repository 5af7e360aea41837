"""Units of FSDP2: modules whose parameters `fully_shard` gathers together."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from recoup.backend.compiler.recognition import is_sharded
from recoup.errors import UnsupportedError


def unit_of(model: nn.Module, path: str) -> nn.Module | None:
    """Return the innermost unit around a submodule, which may be itself; None: none.

    Examples:
        >>> unit_of(nn.Sequential(nn.Linear(1, 1)), "0")
    """
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:count]))
        if is_sharded(type(module)):
            return module
    return None


def unit_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the units inside a model, which are gathered one at a time.

    Examples:
        >>> unit_paths(nn.Sequential(nn.Linear(1, 1)))
        ()
    """
    named = model.named_modules()
    return tuple(name for name, m in named if name and is_sharded(type(m)))


def has_units_inside(block: nn.Module) -> bool:
    """Return whether parts of a block are gathered by themselves.

    Examples:
        >>> has_units_inside(nn.Linear(1, 1))
        False
    """
    return bool(unit_paths(block))


@contextmanager
def gathered(unit: Any, block: nn.Module) -> Generator[None]:
    """Have the whole parameters of a block, outside of its hooks.

    Gathering waits for all processes that share the unit. A unit must have run in a
    step of its model before.

    Args:
        unit: The unit; None: the parameters are whole anyway.
        block: The block in it.

    Raises:
        UnsupportedError: The parameters of the block are also distributed otherwise.
    """
    if unit is None:
        yield
        return
    unit.unshard()
    try:
        if any(hasattr(parameter, "device_mesh") for parameter in block.parameters()):
            raise UnsupportedError(
                "expected parameters that fully_shard alone distributes for compile=, "
                f"got some of a {type(block).__name__} that are distributed in another "
                "way too (tensor parallel). Use compile=False."
            )
        yield
    finally:
        unit.reshard()


def local_part(tensor: Any) -> Tensor:
    """Return this process's part of a distributed tensor, or a plain tensor itself."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
    return found
