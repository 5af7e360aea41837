"""Tensors without memory, on which operators compute shapes and nothing else."""

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
from recoup.core.restoring import restoring
from recoup.errors import UnsupportedError

NEEDS_CONTENTS = (
    _DataDependent,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""Raised by an operator whose result depends on the contents."""


_WHOLE = (Tensor, nn.Module)
"""Types that are not searched for tensors."""


class _Silence(logging.Filter):
    """Drops what torch logs of an operator that fails on fake tensors.

    It raises the error too, and who runs the step reports it, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open_modes = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is to be shown."""
        failed = "failed while attempting to run meta" in str(record.msg)
        return not (failed and self.open_modes > 0)


_SILENCE = _Silence()
logging.getLogger(FakeTensorMode.__module__).addFilter(_SILENCE)


class QuietFakeMode(FakeTensorMode):
    """Run operators without memory; their errors are raised and not logged as well."""

    def __enter__(self) -> Self:
        _SILENCE.open_modes += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _SILENCE.open_modes -= 1
        super().__exit__(*error)


def without_memory() -> AbstractContextManager[object]:
    """Make every tensor that is made inside the block one without memory.

    Examples:
        >>> import torch
        >>> with without_memory():
        ...     huge = torch.empty(1 << 40) + 1
        >>> huge.nbytes == 1 << 42
        True
    """
    return QuietFakeMode(allow_non_fake_inputs=True)


class Shadows:
    """Stand-ins without memory for tensors, equal ones for equal storages.

    A stand-in has the shape, strides, offset and type of its original, shares its
    storage with those of the same original storage, and says that it is on `device`.

    Args:
        device: Where stand-ins say they are whose originals have no place of their
            own, being on the meta device.

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
        # The originals are kept, so that their identities are not given to others.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor, the same one each time.

        Raises:
            UnsupportedError: The tensor is more than one plain storage.
        """
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        if not has_storage(tensor) or isinstance(tensor, FakeTensor):
            raise UnsupportedError(
                f"a {tensor.layout} {type(tensor).__name__} of {tensor.dtype} cannot "
                "be stood in for by one without memory. Measure it for real: leave "
                "out dry=True."
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
        """Return a structure with stand-ins for the tensors in it."""
        return map_leaves(lambda x: self.of(x) if isinstance(x, Tensor) else x, tree)

    def of_batch(self, batch: Any) -> Any:
        """Return a batch with stand-ins, also for tensors that objects in it hold.

        Such an object is copied; modules in it are not.

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
        """Put stand-ins in the place of all tensors of a model.

        Afterwards every module has the attributes that it had before: what a step has
        added, or put in a buffer, is gone with the stand-ins.
        """
        before = [(module, dict(module.__dict__)) for module in model.modules()]

        def restore() -> None:
            for module, attributes in before:
                module.__dict__.clear()
                module.__dict__.update(attributes)

        with restoring(restore):
            for module, attributes in before:
                module.__dict__.update(self._attributes(attributes))
            yield

    def _attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return those of a module's attributes that stand-ins replace."""
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
        """Return a meta tensor that lies as the tensor does."""
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
    """Count the bytes that tensors without memory would take.

    All their storages are on the meta device; those of tensors that a replay only takes
    the shape from say that they are, and do not count.
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
        # A view of a tensor that has memory is of another storage than that.
        if makes_no_memory(kwargs) or _only_views(func):
            return func(*args, **kwargs)
        if func in _SIZED_BY_KERNELS:
            raise UnsupportedError(
                f"this step cannot be measured dry: how much {func} keeps for backward "
                "only its kernel knows. Measure it for real: leave out dry=True."
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def track(self, *things: Tensor | nn.Module) -> None:
        """Count what existed before, with memory or without."""
        for storage in storages_in(things):
            self._ledger.add(storage)

    def _account(self, func: Any, arguments: Any, result: Any) -> None:
        if func in _REUSING:
            args, _ = arguments
            _enlarge(result, _REUSING[func](args))
        super()._account(func, arguments, result)


def _enlarge(result: Tensor, elements: int) -> None:
    """Give a result the storage that its kernel leaves it with."""
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
"""Operators that compute something larger, or like their argument, where their result
will be: its storage keeps that size."""

_SIZED_BY_KERNELS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
)
"""Recurrent layers: of the workspace that they return, torch says that it is empty."""


@functools.cache
def _only_views(operator: Any) -> bool:
    # `torch.tensor` fills a tensor out of sight and shows it with `lift_fresh`.
    return facts_of(operator).passes and operator is not _SHOWS_NEW


_SHOWS_NEW = torch.ops.aten.lift_fresh.default


def makes_no_memory(kwargs: dict[str, Any]) -> bool:
    """Return whether an operator is asked for a tensor on the meta device.

    Examples:
        >>> makes_no_memory({"device": "meta"}), makes_no_memory({})
        (True, False)
    """
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"
