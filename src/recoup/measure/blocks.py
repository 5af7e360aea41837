"""Find the blocks of a model: the parts between which it is best cut."""

from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn

from recoup.core.graph import Boundary

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_ALIKE = 3


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that make up a model as its layers.

    These are the members of its lists and sequences that are themselves made of
    modules, however deep they lie: transformer layers, residual blocks. A model that
    has no such lists is cut between its direct parts; one that is a sequence of single
    layers, between these.

    Examples:
        >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> block_names(nn.Sequential(nn.Linear(2, 2), layer(), layer()))
        ('1', '2')
        >>> block_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        ('0', '1')
    """
    found = _blocks("", model)
    if found == [""]:
        composite = [name for name, child in model.named_children() if _parts(child)]
        found = composite or [name for name, _ in _leaves(model)]
    return tuple(found)


def block_boundaries(
    boundaries: Sequence[Boundary], names: Collection[str]
) -> tuple[int, ...]:
    """Return the numbers of the boundaries at which named modules begin and end.

    The first and the last boundary of each call of the model are among them.
    """
    found = {0, len(boundaries) - 1} if boundaries else set[int]()
    for number, boundary in enumerate(boundaries):
        if boundary.module in names:
            found.add(number)
        if number and boundary.model_call != boundaries[number - 1].model_call:
            found |= {number - 1, number}
    return tuple(sorted(found))


def _blocks(name: str, module: nn.Module) -> list[str]:
    if not _repeats(module):
        return [name]
    found: list[str] = []
    for child_name, child in module.named_children():
        if _parts(child):
            found.extend(_blocks(f"{name}.{child_name}" if name else child_name, child))
    return found


def _repeats(module: nn.Module) -> bool:
    """Return whether there are several composite parts of one kind side by side."""
    kinds = Counter(type(child) for child in module.children() if _parts(child))
    if kinds:
        most = max(kinds.values())
        listed = isinstance(module, _CONTAINERS) or _is_list_like(module)
        if most >= (2 if listed else _ALIKE):
            return True
    return any(_repeats(child) for child in module.children())


def _is_list_like(module: nn.Module) -> bool:
    """Return whether all children are of one kind, as in a list of its own class."""
    return len({type(child) for child in module.children()}) == 1


def _parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if n and not _parts(m)]
