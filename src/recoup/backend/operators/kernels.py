"""Kernels: an operator, its fastest call, and its observed properties."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from recoup.backend.memory.storages import (
    has_contents,
    has_storage,
    storage_address,
    without_repeats,
)
from recoup.backend.operators.fingerprints import fingerprint
from recoup.backend.operators.properties import Facts, facts_of
from recoup.backend.state.trees import tensors
from recoup.core.restoring import restoring

_GENERATED = {
    getattr(torch._C, "_VariableFunctions"): (  # noqa: B009 (no stub names it)
        "_log_softmax",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_softmax",
        "add.Tensor",
        "addmm",
        "bmm",
        "cat",
        "clone",
        "convolution",
        "cudnn_batch_norm",
        "detach",
        "div.Tensor",
        "embedding",
        "mean.dim",
        "mm",
        "mul.Tensor",
        "native_batch_norm",
        "native_dropout",
        "native_group_norm",
        "native_layer_norm",
        "pow.Tensor_Scalar",
        "relu",
        "relu_",
        "rsqrt",
        "sigmoid",
        "sub.Tensor",
        "sum.dim_IntList",
        "t",
        "tanh",
        "transpose.int",
        "unbind.int",
        "unsqueeze",
    ),
    getattr(torch._C, "_nn"): (  # noqa: B009 (no stub names it)
        "gelu",
        "max_pool2d_with_indices",
        "silu",
    ),
    torch._C.TensorBase: ("add_.Tensor", "expand", "mul_.Tensor", "permute", "view"),
}

_BOUND: dict[str, Callable[..., Any]] = {
    f"aten::{name}": getattr(module, name.split(".")[0])
    for module, names in _GENERATED.items()
    for name in names
    if hasattr(module, name.split(".")[0])
}
"""Common operators, with the Python bindings that PyTorch generates for them.

A binding parses its arguments in half the time, but chooses among overloads by their
types. A test shows that no arguments of these operators lead to another overload.
"""


class Kernel:
    """An operator with its facts, of which those used at every call are attributes.

    Attributes:
        operator: The operator.
        facts: Its properties.
        run: The fastest function that calls exactly this operator.
        passes: It only makes views or changes metadata.
        simple: It is a pure function of its arguments, or only allocates memory.
        blank: It only allocates memory, uninitialised.
        quiet: It would be simple if its dropout rate is zero.
        in_place: It only changes the contents of its first argument.
        statistics: Positions of running statistics, if updating them is its only side
            effect and it can run without them.
        training_at: The position of the flag that enables the update, or -1.
        is_unproven: Whether its next call must be checked for undeclared writes.
        reshapes: It changes the metadata of its argument.
        is_watched: It passes, but reshapes, or `DTensor.to_local` may have called it.
        moves: It may copy to another device.
    """

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.run = _fastest(operator)
        self.learn(facts_of(operator))

    def learn(self, facts: Facts) -> None:
        """Replace the facts about the operator."""
        self.facts = facts
        self.passes = facts.passes
        self.blank = facts.blank
        self.simple = facts.simple or facts.blank
        self.in_place = facts.in_place
        self.quiet = facts.simple_without_dropout
        self.reshapes = facts.passes and bool(facts.writes)
        self.is_watched = self.reshapes
        self.moves = facts.name.startswith("aten._to_copy")
        self.statistics = facts.statistics if facts.moves_statistics else ()
        self.training_at = facts.training_at
        self.is_unproven = facts.is_unproven


KERNELS: dict[int, Kernel] = {}
"""Kernels by the operator's id, because hashing an operator is a Python call. A kernel
keeps its operator alive, so that the id is not reused."""


def kernel_of(operator: Any) -> Kernel:
    """Return the operator's kernel.

    Examples:
        >>> kernel_of(torch.ops.aten.view.default).passes
        True
        >>> kernel_of(torch.ops.aten.t.default).run is torch.t
        True
    """
    kernel = KERNELS.get(id(operator))
    if kernel is None:
        kernel = KERNELS[id(operator)] = Kernel(operator)
    return kernel


def _fastest(operator: Any) -> Callable[..., Any]:
    if not isinstance(operator, OpOverload):
        return operator
    return _BOUND.get(operator.name(), operator._op)


_VIEW = kernel_of(torch.ops.aten.view.default)


def watch_unwrapping() -> None:
    """Watch the view that `DTensor.to_local` makes, if DTensors may exist.

    They need a process group; without one, views have no extra cost.
    """
    group = torch.distributed
    _VIEW.is_watched = group.is_available() and group.is_initialized()


class FirstSight:
    """Detects at an operator's first call whether it writes to its arguments.

    Costs a copy of the arguments without a declared write, two passes over each and one
    synchronisation: once per operator of an unknown library and process. A call on
    tensors without contents shows nothing, nor does one whose other arguments share
    memory with those of a declared write, so the next call is checked.
    """

    def __init__(
        self, kernel: Kernel, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._kernel = kernel
        declared = kernel.facts.writes
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        targets = {
            storage_address(tensor)
            for place, argument in named
            if place in declared
            for tensor in tensors(argument)
            if has_storage(tensor)
        }
        others = [
            (place, tensor)
            for place, argument in named
            if place not in declared
            for tensor in tensors(argument)
            if has_storage(tensor)
        ]
        # In memory that the operator declares to write to nothing can be told apart.
        self._suspects = [
            (place, without_repeats(tensor))
            for place, tensor in others
            if storage_address(tensor) not in targets
        ]
        self._sees_all = len(self._suspects) == len(others)
        self._copies: list[Tensor] | None = None

    def begin(self) -> None:
        """Copy the arguments before the operator runs."""
        self._copies = [tensor.detach().clone() for _, tensor in self._suspects]

    def end(self) -> list[Tensor]:
        """Record in the kernel which arguments it wrote to; return those tensors."""
        kernel, copies = self._kernel, self._copies
        known = all(has_contents(tensor) for _, tensor in self._suspects)
        if copies is None or not known:
            return []
        written: list[Tensor] = []
        places = dict.fromkeys(kernel.facts.writes)
        for (place, tensor), copy in zip(self._suspects, copies, strict=True):
            if bool(fingerprint(tensor) != fingerprint(copy)):
                written.append(tensor)
                places[place] = None
        found = replace(
            kernel.facts, is_unproven=not self._sees_all, writes=tuple(places)
        )
        kernel.learn(found)
        return written

    @contextmanager
    def undone(self, written: Sequence[Tensor]) -> Iterator[None]:
        """Restore the tensors' contents from before the call for the block."""
        assert self._copies is not None, "only called after `end`"
        before = {
            id(tensor): copy
            for (_, tensor), copy in zip(self._suspects, self._copies, strict=True)
        }
        after = [tensor.detach().clone() for tensor in written]

        def redo() -> None:
            for tensor, contents in zip(written, after, strict=True):
                tensor.detach().copy_(contents)

        with restoring(redo):
            for tensor in written:
                tensor.detach().copy_(before[id(tensor)])
            yield
