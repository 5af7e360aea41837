"""Run a step plain and inside a region, and say bit by bit how the two differ.

A *step* is a function that is given a region factory, does its work, opens the
regions it wants through the factory, and returns what it observed by name. The
plain twin is the same step with a factory whose regions do nothing.
"""

import contextlib
import math
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

Region = Callable[..., contextlib.AbstractContextManager[Any]]
Step = Callable[[Region], Mapping[str, Any]]
Kind = Literal["equal", "wrong", "crashed", "refused", "excluded"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything one run of a step left behind."""

    values: dict[str, Any]
    generator_states: list[Tensor]
    warnings: frozenset[tuple[str, str]]
    leftovers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of comparing a step with its twin.

    `refused` is an error of ours where an error is an allowed answer; `excluded`
    means that the plain twin itself gives nothing to compare with.
    """

    kind: Kind
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "crashed")


class IdleMode(TorchDispatchMode):
    """See every operator and do nothing about it.

    PyTorch itself chooses other formulas while any dispatch mode is active (the
    forward-mode derivatives of the normalisations, `out=` of some composites).
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def idle(*_: object, **__: object) -> contextlib.AbstractContextManager[Any]:
    """Make a region that only watches: what PyTorch does under any dispatch mode."""
    return IdleMode()


def plain(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    """Make a region that does nothing: the plain twin's."""
    return contextlib.nullcontext()


def judge(
    step: Step,
    region: Region,
    *,
    seed: int = 0,
    refusals: tuple[type[BaseException], ...] = (),
) -> Verdict:
    """Run a step plain and with regions, and compare what they left behind.

    Args:
        step: The work; it must make or copy its own inputs each time.
        region: Makes the regions under test.
        seed: Both runs start from it.
        refusals: Exceptions that are an allowed answer of the region.
    """
    try:
        expected = observe(step, plain, seed=seed)
    except Exception as error:  # noqa: BLE001: whatever the plain run raises excludes the case
        return Verdict("excluded", f"plain run raises {_last_line(error)}")
    try:
        actual = observe(step, region, seed=seed)
    except refusals as error:
        return Verdict("refused", _last_line(error))
    except Exception as error:  # noqa: BLE001: any other exception is the finding
        return Verdict("crashed", _last_line(error))
    found = differences(expected, actual)
    if not found:
        return Verdict("equal")
    if not _is_repeatable(step, expected, seed=seed):
        return Verdict("excluded", "plain run is not repeatable")
    if _idle_mode_explains(step, actual, seed=seed):
        return Verdict("excluded", "PyTorch answers so under an idle dispatch mode")
    return Verdict("wrong", "; ".join(found))


def compare(step: Step, region: Region, *, seed: int = 0) -> list[str]:
    """List how a step with regions differs from its plain twin; empty when equal.

    Unlike `judge` it lets every exception through.
    """
    expected = observe(step, plain, seed=seed)
    return differences(expected, observe(step, region, seed=seed))


def observe(step: Step, region: Region, *, seed: int) -> Observed:
    """Run a step from a seed and record its results, random state and warnings."""
    torch.manual_seed(seed)
    random.seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        # PyTorch's samples provoke many warnings. The region may raise none besides.
        warnings.simplefilter("always")
        values = dict(step(region))
    return Observed(
        values=values,
        generator_states=generator_states(),
        warnings=frozenset((w.category.__name__, str(w.message)) for w in caught),
        leftovers=tuple(leftovers()),
    )


def generator_states() -> list[Tensor]:
    """Return the state of every default generator in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def leftovers() -> Iterator[str]:
    """Name the global state that a finished region should have taken back."""
    if modes := _get_current_dispatch_mode_stack():
        yield f"dispatch modes still active: {modes}"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        yield "saved-tensor hooks still active"
    if not torch.is_grad_enabled():
        yield "gradients still disabled"


def differences(expected: Observed, actual: Observed) -> list[str]:
    """List in words what differs between two runs; empty when all bits are equal."""
    found = list(tree_differences(expected.values, actual.values, where=""))
    found += tree_differences(
        expected.generator_states, actual.generator_states, where="generator state "
    )
    found += [
        f"warning not given by the plain run: {category}: {message}"
        for category, message in sorted(actual.warnings - expected.warnings)
    ]
    if actual.leftovers != expected.leftovers:
        found += [f"left behind: {name}" for name in actual.leftovers]
    return found


def tree_differences(expected: Any, actual: Any, *, where: str) -> Iterator[str]:
    """Compare two trees of tensors and plain values bit by bit."""
    expected_leaves, expected_shape = pytree.tree_flatten_with_path(expected)
    actual_leaves, actual_shape = pytree.tree_flatten_with_path(actual)
    if expected_shape != actual_shape:
        yield f"{where}structure {actual_shape} instead of {expected_shape}"
        return
    for (path, left), (_, right) in zip(expected_leaves, actual_leaves, strict=True):
        name = where + pytree.keystr(path)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            yield from tensor_differences(left, right, name=name)
        elif not _same_object(left, right):
            yield f"{name}: {right!r} instead of {left!r}"


def tensor_differences(expected: Tensor, actual: Tensor, *, name: str) -> Iterator[str]:
    """Compare two tensors: kind, geometry, and every bit."""
    for attribute in ("dtype", "layout", "device", "shape", "requires_grad"):
        left, right = getattr(expected, attribute), getattr(actual, attribute)
        if left != right:
            yield f"{name}: {attribute} {right} instead of {left}"
            if attribute != "requires_grad":
                return
    with torch.no_grad():
        left_parts, right_parts = dense_parts(expected), dense_parts(actual)
        for part, left in left_parts.items():
            yield from _dense_differences(left, right_parts[part], name=name + part)


def dense_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Split a tensor of any layout into the dense tensors that define it."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return {
            f" component {i}": part for i, part in enumerate(tensor.unbind())
        }
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return {" indices": tensor.indices(), " values": tensor.values()}
    if tensor.layout in _COMPRESSED:
        # The parts are views that still ask their sparse base for strides: copy them.
        names = (*_COMPRESSED[tensor.layout], "values")
        return {f" {name}": getattr(tensor, name)().clone() for name in names}
    if tensor.layout != torch.strided:
        return {"": tensor.to_dense()}
    return {"": tensor}


def bits(tensor: Tensor) -> Tensor:
    """View a dense tensor as integers: NaN equals itself, 0 differs from -0."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def duplicate(tree: Any) -> Any:
    """Copy every tensor of a tree as a new leaf of the autograd graph.

    Geometry (strides and offset) and sharing of memory between the tensors stay
    as they are, which `Tensor.clone` does not promise.
    """
    return pytree.tree_map_only(Tensor, _Duplicator().copy, tree)


@dataclass(slots=True)
class _Duplicator:
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.tensors:
            made = self._copy_data(tensor).requires_grad_(tensor.requires_grad)
            self.tensors[id(tensor)] = made
        return self.tensors[id(tensor)]

    def _copy_data(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if type(source) is not Tensor or source.layout != torch.strided:
            return source.clone()
        storage = source.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage.clone()
        made = torch.empty(0, dtype=source.dtype, device=source.device)
        made.set_(
            self.storages[storage._cdata],
            source.storage_offset(),
            source.size(),
            source.stride(),
        )
        made = torch.conj(made) if source.is_conj() else made
        return torch._neg_view(made) if source.is_neg() else made


def _is_repeatable(step: Step, expected: Observed, *, seed: int) -> bool:
    """Run the plain step again, over memory filled with other garbage each time.

    Some kernels of PyTorch read memory that they never wrote; what they find there
    is often the same twice in a row.
    """
    for garbage in range(8):
        for size_bytes in (8, 16, 24, 32, 64, 128, 256, 512, 1024, 4096):
            blocks = [torch.full((size_bytes,), garbage).byte() for _ in range(8)]
            del blocks
        if differences(expected, observe(step, plain, seed=seed)):
            return False
    return True


def _idle_mode_explains(step: Step, actual: Observed, *, seed: int) -> bool:
    """Whether an idle dispatch mode gives, bit by bit, what the region gave."""
    try:
        watched = observe(step, idle, seed=seed)
    except Exception:  # noqa: BLE001: no answer explains nothing
        return False
    return not differences(watched, actual)


def _dense_differences(expected: Tensor, actual: Tensor, *, name: str) -> Iterator[str]:
    if expected.shape != actual.shape:
        yield f"{name}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        return
    if _strides(expected) != _strides(actual):
        yield f"{name}: strides {actual.stride()} instead of {expected.stride()}"
    left, right = bits(expected), bits(actual)
    if torch.equal(left, right):
        return
    unequal = left != right
    where = tuple(int(i) for i in unequal.nonzero()[0])[: expected.dim()]
    yield (
        f"{name}: {int(unequal.sum())} of {unequal.numel()} elements differ, the first "
        f"at {where}: {actual[where].item()!r} instead of {expected[where].item()!r}"
    )


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides that mean something: those of dimensions longer than one."""
    if tensor.numel() == 0:
        return []
    sizes = zip(tensor.stride(), tensor.size(), strict=True)
    return [stride for stride, size in sizes if size > 1]


def _same_object(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and bool(left == right)


def _last_line(error: BaseException) -> str:
    """Return the exception in one line, with the place in our code that raised it."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "recoup" in f.filename]
    place = f" at {frames[-1].name}:{frames[-1].lineno}" if frames else ""
    return text[:300] + place
