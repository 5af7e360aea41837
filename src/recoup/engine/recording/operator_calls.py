"""Operator calls as recorded operations: arguments with tensors as references."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recoup.backend.memory.storages import storage_address
from recoup.backend.operators.kernels import Kernel
from recoup.backend.operators.properties import Facts
from recoup.backend.state.trees import tensors
from recoup.engine.lifetime.operations import TapeOperation
from recoup.engine.lifetime.past_contents import Indices
from recoup.engine.lifetime.values import HELD, OUTSIDE
from recoup.engine.recording.tape import Tape

_TORCH_KINDS = {torch.device, torch.dtype, torch.layout, torch.memory_format}
NO_TENSORS = frozenset({bool, float, int, str, type(None)} | _TORCH_KINDS)
"""Argument types that are and contain no tensors. Checked first, because `isinstance`
with Tensor, which torch overloads, is slow."""


def record_call(  # noqa: PLR0912 (written out: every operator asks)
    tape: Tape,
    kernel: Kernel,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    overwritten: Sequence[Tensor] = (),
) -> TapeOperation:
    """Return a call as an operation, its tensors replaced by references.

    Args:
        tape: The tape, which maps tensors to values.
        kernel: The called kernel.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        overwritten: The tensors that it writes without reading them.

    Raises:
        NotImplementedError: One of the tensors has no storage.
    """
    template: list[Any] = list(args)
    places: list[int] = []
    named = tape.named
    is_plain = not overwritten and not tape.tainted
    for position, argument in enumerate(args):
        kind = type(argument)
        if (kind is Tensor or kind is Parameter) and is_plain:
            value = named.get(storage_address(argument))
            # `Tape.reference`, inlined for known values: runs for every operator.
            if value is None or (value.hold is None and value.producer == OUTSIDE):
                template[position] = tape.reference(argument)
            else:
                value.is_spare = False
                born, whole = value.born, value.geometry
                if (
                    value.hold is not None and value.hold.tensor is argument
                    if born is HELD
                    else born is not None
                    and born() is argument
                    and (
                        whole is None
                        or (
                            argument.stride() == whole[1]
                            and argument.storage_offset() == whole[2]
                            and argument.shape == whole[0]
                        )
                    )
                ):
                    template[position] = value
                else:
                    template[position] = tape.viewed(value, argument)
        elif kind in NO_TENSORS:
            continue
        elif kind is list and NO_TENSORS.issuperset(map(type, argument)):
            # A tuple of constants is not tracked by the garbage collector.
            template[position] = tuple(argument)
            continue
        else:
            found = _refer(tape, argument, overwritten)
            if found is argument:
                continue
            template[position] = found
        places.append(position)
    operation = TapeOperation(kernel, template, kwargs, tuple(places))
    if kwargs:
        for name, argument in kwargs.items():
            if type(argument) not in NO_TENSORS:
                found = _refer(tape, argument, overwritten)
                if found is not argument:
                    operation.names = (*operation.names, name)
                    operation.kwargs = {**operation.kwargs, name: found}
    return operation


def _refer(tape: Tape, argument: Any, overwritten: Sequence[Tensor]) -> Any:
    if isinstance(argument, Tensor):
        read = not (overwritten and any(argument is t for t in overwritten))
        return tape.reference(argument, read=read)
    if isinstance(argument, (list, tuple)) and not NO_TENSORS.issuperset(
        map(type, argument)
    ):
        return [
            _refer(tape, element, overwritten)
            if isinstance(element, Tensor)
            else element
            for element in argument
        ]
    return argument


def targets_of(
    facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    found: list[Tensor] = []
    for place in facts.writes:
        if isinstance(place, str):
            target = kwargs.get(place)
        else:
            target = args[place] if place < len(args) else None
        if isinstance(target, Tensor):
            found.append(target)
        elif isinstance(target, (list, tuple)):
            found.extend(tensors(target))
    return found


def indices_of(facts: Facts, args: tuple[Any, ...]) -> Indices | None:
    """Return the indices of the elements of its first argument that an operator writes.

    Returns:
        The indices, or None if it may write to all elements.
    """
    base = facts.name.split(".")[1] if facts.writes == (0,) else ""
    if base in ("index_put_", "_index_put_impl_"):
        return args[1]
    if base in ("index_add_", "index_copy_", "index_fill_") and args[0].dim():
        return [*[None] * (args[1] % args[0].dim()), args[2].reshape(-1)]
    return None


def writes_permuted(tape: Tape, facts: Facts, args: tuple[Any, ...]) -> bool:
    """Return whether an operator writes by index to every position exactly once."""
    target = args[0]
    base = _base(facts)
    if base in _INDEXED_BY_LIST:
        named = [(d, index) for d, index in enumerate(args[1]) if index is not None]
        if len(named) != 1:
            return False
        dim, index = named[0]
    elif base in _INDEXED_ALONG or (base in _SCATTERED and target.dim() == 1):
        dim, index = args[1], args[2]
    else:
        return False
    if not target.dim() or index.dim() != 1 or target.shape[dim] != index.shape[0]:
        return False
    return tape.is_permutation(index)


def replaces(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a write by index does not read the overwritten elements."""
    base = _base(facts)
    if base in _INDEXED_BY_LIST:
        return not (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    return base == "index_copy" or facts.name in _SCATTERED_PLAINLY


def _base(facts: Facts) -> str:
    return facts.name.split(".")[1].rstrip("_")


_INDEXED_BY_LIST = frozenset({"_index_put_impl", "_unsafe_index_put", "index_put"})
_INDEXED_ALONG = frozenset({"index_add", "index_copy"})
_SCATTERED = frozenset({"scatter", "scatter_add"})
_SCATTERED_PLAINLY = frozenset({"aten.scatter_.src", "aten.scatter_.value"})
