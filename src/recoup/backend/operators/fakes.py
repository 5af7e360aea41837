"""Fake tensors: operators compute their shapes only, without memory."""

import collections
import copy
import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException as _DataDependent
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from recoup.backend.memory.ledger import storages_in
from recoup.backend.memory.meters import StorageMeter
from recoup.backend.memory.storages import has_storage
from recoup.backend.operators.properties import facts_of
from recoup.backend.state.trees import map_leaves, named_tensors
from recoup.core.restoring import refill, restoring
from recoup.errors import UnsupportedError

NEEDS_CONTENTS = (
    _DataDependent,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""Errors of operators whose result depends on tensor contents."""


_WHOLE = (Tensor, nn.Module)
"""Types that are not searched for tensors."""


class _Silence(logging.Filter):
    """Drops torch's log records of operators that fail on fake tensors.

    The error is also raised, and the caller reports it once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open_modes = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        failed = "failed while attempting to run meta" in str(record.msg)
        return not (failed and self.open_modes > 0)


_SILENCE = _Silence()
logging.getLogger(FakeTensorMode.__module__).addFilter(_SILENCE)


class QuietFakeMode(FakeTensorMode):
    """Run operators on fake tensors; errors are raised without also being logged."""

    def __enter__(self) -> Self:
        _SILENCE.open_modes += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _SILENCE.open_modes -= 1
        super().__exit__(*error)


def without_memory() -> AbstractContextManager[object]:
    """Create all tensors in the block as fake tensors, without memory.

    Examples:
        >>> import torch
        >>> with without_memory():
        ...     huge = torch.empty(1 << 40) + 1
        >>> huge.nbytes == 1 << 42
        True
    """
    return QuietFakeMode(allow_non_fake_inputs=True)


class Shadows:
    """Fake stand-ins for tensors, which alias each other as their originals do.

    A stand-in has the shape, strides, offset, dtype and device of its original, and
    shares its storage with stand-ins for the same storage.

    Args:
        device: Device of stand-ins whose originals are on the meta device.

    Examples:
        >>> shadows = Shadows(torch.device("cpu"))
        >>> row = torch.ones(4, 8)
        >>> stand_in = shadows.of(row[1])
        >>> stand_in.shape, stand_in.device, stand_in.storage_offset()
        (torch.Size([8]), device(type='cpu'), 8)
        >>> stand_in.untyped_storage() is shadows.of(row).untyped_storage()
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.mode = QuietFakeMode(allow_non_fake_inputs=True)
        self._device = device
        # Keeps the originals alive, so that their ids are not reused.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor, the same one each time.

        Raises:
            UnsupportedError: The tensor is not backed by one plain storage.
        """
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        if not has_storage(tensor) or isinstance(tensor, FakeTensor):
            raise UnsupportedError(
                f"expected tensors of plain memory with dry=True, got a "
                f"{tensor.layout} {type(tensor).__name__} of {tensor.dtype}; leave out "
                "dry=True to measure a real step."
            )
        kind = tensor.device.type
        device = self._device if kind == "meta" else tensor.device
        shadow: Any = FakeTensor(self.mode, self._outline(tensor), device)
        shadow.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            shadow._is_param = True
        self._known[id(tensor)] = (tensor, shadow)
        return shadow

    def within(self, tree: Any) -> Any:
        """Return a pytree with stand-ins for its tensors."""
        return map_leaves(lambda x: self.of(x) if isinstance(x, Tensor) else x, tree)

    def of_batch(self, batch: Any) -> Any:
        """Return a batch with stand-ins, also for tensors in attributes of objects.

        Such objects are copied; modules in them are not.

        Raises:
            UnsupportedError: An object that holds tensors cannot be copied.
        """

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.of(leaf)
            held = [thing for _, thing in named_tensors(leaf, kinds=_WHOLE)]
            memo: dict[int, Any] = {
                id(thing): self.of(thing) if isinstance(thing, Tensor) else thing
                for thing in held
            }
            if not any(isinstance(thing, Tensor) for thing in held):
                return leaf
            try:
                return copy.deepcopy(leaf, memo)
            except Exception as error:
                raise UnsupportedError(
                    f"expected a batch that can be copied, got a {type(leaf).__name__} "
                    f"that holds tensors and cannot be ({error}); measure it for real: "
                    "leave out dry=True."
                ) from error

        return map_leaves(stand_in, batch)

    @contextmanager
    def instead_of(self, model: nn.Module) -> Iterator[None]:
        """Replace all tensors of a model by stand-ins in the block.

        Afterwards every module has its previous attributes: changes that a step made
        are discarded with the stand-ins.
        """
        before = [(module, dict(module.__dict__)) for module in model.modules()]

        def restore() -> None:
            for module, attributes in before:
                refill(module.__dict__, attributes.items())

        with restoring(restore):
            for module, attributes in before:
                module.__dict__.update(self._attributes(attributes))
            yield

    def _attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return stand-ins for a module's attributes that hold tensors."""
        found: dict[str, Any] = {}
        for name, value in attributes.items():
            if name == "_modules" or not storages_in(value):
                continue
            if isinstance(value, Tensor):
                found[name] = self.of(value)
            elif type(value) in (list, tuple, dict, collections.OrderedDict):
                found[name] = self.within(value)
        return found

    def _outline(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor with the tensor's layout and aliasing."""
        plain = tensor.detach()
        if plain.device.type == "meta":
            return plain
        storage = plain.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None:
            outline = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            known = self._storages[id(storage)] = (storage, outline)
        empty = torch.empty(0, dtype=plain.dtype, device="meta")
        return empty.set_(
            known[1].untyped_storage(),
            plain.storage_offset(),
            plain.shape,
            plain.stride(),
        )


class FakeMeter(StorageMeter):
    """Count the bytes that fake tensors would take.

    Their storages are all on the meta device. Tensors that report the meta device
    themselves are not counted: a replay only needs their shape.
    """

    def __init__(self) -> None:
        super().__init__("meta")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then count what it returned."""
        kwargs = kwargs or {}
        # A fake view of a real tensor has a new storage.
        if makes_no_memory(kwargs) or _only_views(func):
            return func(*args, **kwargs)
        if func in _SIZED_BY_KERNELS:
            raise UnsupportedError(
                f"expected operators that declare what they save with dry=True, got "
                f"{func}, where only the kernel knows; leave out dry=True to measure a "
                "real step."
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def track(self, *things: Tensor | nn.Module) -> None:
        """Count existing tensors, real or fake."""
        for storage in storages_in(things):
            self._ledger.add(storage)

    def _account(self, func: Any, arguments: Any, result: Any) -> None:
        if func in _REUSING:
            args, _ = arguments
            _enlarge(result, _REUSING[func](args))
        super()._account(func, arguments, result)


def _enlarge(result: Tensor, elements: int) -> None:
    """Enlarge a result's storage to the size that its kernel leaves it with."""
    storage = result.untyped_storage()
    storage.resize_(max(storage.nbytes(), elements * result.element_size()))


_REUSING = {
    getattr(torch.ops.aten, name).default: elements
    for elements, names in (
        (
            lambda args: torch.broadcast_shapes(args[0].shape, args[1].shape).numel(),
            "binary_cross_entropy mse_loss smooth_l1_loss soft_margin_loss",
        ),
        (lambda args: args[0].numel(), "col2im im2col"),
    )
    for name in names.split()
}
"""Operators that first compute a larger value in their result's storage, which keeps
that size; with the number of its elements."""

_SIZED_BY_KERNELS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
)
"""Recurrent layers, whose fake kernels return an empty workspace."""


@functools.cache
def _only_views(operator: Any) -> bool:
    # `torch.tensor` fills a tensor below the dispatcher, then calls `lift_fresh`.
    return facts_of(operator).passes and operator is not _SHOWS_NEW


_SHOWS_NEW = torch.ops.aten.lift_fresh.default


def makes_no_memory(kwargs: dict[str, Any]) -> bool:
    """Return whether an operator is called to create a tensor on the meta device.

    Examples:
        >>> makes_no_memory({"device": "meta"}), makes_no_memory({})
        (True, False)
    """
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"
