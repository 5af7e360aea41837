"""Find the blocks of a model, between which it is cut."""

from collections import Counter
from collections.abc import Hashable, Sequence

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_ALIKE = 3


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of a model's blocks.

    These are the members of its lists and sequences, at any depth, that have
    submodules: transformer layers, residual blocks. Without such lists, the model's
    composite children are the blocks; in a sequence of single layers, the layers are.

    Examples:
        >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> block_names(nn.Sequential(nn.Linear(2, 2), layer(), layer()))
        ('1', '2')
        >>> block_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        ('0', '1')
    """
    found = _blocks("", model)
    if found == [""]:
        composite = [name for name, child in model.named_children() if has_parts(child)]
        found = composite or [name for name, _ in _leaves(model)]
    return tuple(found)


def repeated_names(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the blocks that occur several times by kind, or all if none does.

    Single ones are a stem, an embedding or a head.

    Examples:
        >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> model = nn.Sequential(nn.LSTM(2, 2), layer(), layer())
        >>> repeated_names(model, ("0", "1", "2"))
        ('1', '2')
    """
    kinds = {name: _kind(model, name) for name in names}
    counts = Counter(kinds.values())
    repeated = tuple(name for name, kind in kinds.items() if counts[kind] > 1)
    return repeated or tuple(names)


def outer_names(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the outer list members that contain blocks, or the block if in no list.

    Examples:
        >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> stage = lambda: nn.Sequential(block(), block())
        >>> outer_names(nn.Sequential(stage(), stage()), ("0.0", "0.1", "1.0"))
        ('0', '1')
    """
    found = dict.fromkeys(_outer_name(model, name) for name in names)
    return tuple(
        name
        for name in found
        if not any(name.startswith(f"{other}.") for other in found)
    )


def _outer_name(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    while path:
        around = path.rpartition(".")[0]
        if isinstance(model.get_submodule(around), _CONTAINERS) and not isinstance(
            model.get_submodule(path), nn.ModuleList | nn.ModuleDict
        ):
            return path
        path = around
    return name


def segment_names(model: nn.Module) -> tuple[str, ...]:
    """Return the blocks that segments consist of: the repeated ones, each once.

    If a model has no larger blocks, single layers count: a row of them is worth a
    region, though one is not.

    Examples:
        >>> segment_names(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))))
        ('0', '1', '2')
    """
    names = block_names(model)
    composite = [name for name in names if has_parts(model.get_submodule(name))]
    first: dict[nn.Module, str] = {}
    for name in repeated_names(model, composite or names):
        first.setdefault(model.get_submodule(name), name)
    return tuple(first.values())


def has_parts(module: nn.Module) -> bool:
    """Return whether a module has submodules."""
    return any(True for _ in module.children())


def _blocks(name: str, module: nn.Module, *, is_member: bool = False) -> list[str]:
    """Return the blocks in a module, or the module itself if nothing in it repeats.

    Inside a list member only lists count: the projections of an attention layer, which
    adapters such as LoRA turn into composite modules, are no blocks.
    """
    if not _repeats(module, lists_only=is_member):
        return [name]
    found: list[str] = []
    members = is_member or isinstance(module, _CONTAINERS) or _is_list_like(module)
    for child_name, child in module.named_children():
        if has_parts(child):
            path = f"{name}.{child_name}" if name else child_name
            found.extend(_blocks(path, child, is_member=members))
    return found


def _repeats(module: nn.Module, *, lists_only: bool) -> bool:
    """Return whether some module inside has several composite children of one type."""
    kinds = Counter(type(child) for child in module.children() if has_parts(child))
    if kinds:
        most = max(kinds.values())
        if isinstance(module, _CONTAINERS) and most >= 2:
            return True
        listed = _is_list_like(module)
        if not lists_only and most >= (2 if listed else _ALIKE):
            return True
    return any(_repeats(child, lists_only=lists_only) for child in module.children())


def _is_list_like(module: nn.Module) -> bool:
    """Return whether all children have one type, as in a custom list class."""
    return len({type(child) for child in module.children()}) == 1


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if n and not has_parts(m)]


def _kind(model: nn.Module, name: str) -> Hashable:
    """Return a key that is equal for blocks of one kind.

    That is their class. Containers in one list are of one kind; other containers, such
    as a stem and a head, only if their children have equal types.
    """
    block = model.get_submodule(name)
    if type(block) not in _CONTAINERS:
        return type(block)
    around = name.rpartition(".")[0]
    if type(model.get_submodule(around)) in _CONTAINERS:
        return around
    return around, *map(type, block.children())
