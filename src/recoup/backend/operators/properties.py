"""The properties of an operator that decide whether it may be recomputed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload

from recoup.backend.operators.repeatable import CHOOSING, GATHERING, VARYING

Operator = OpOverload


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of one operator; see docs/design/engine.md.

    Attributes:
        name: The operator's name with its overload, as `aten.add.Tensor`.
        passes: It only makes views or changes metadata: nothing to record.
        opaque: Its outputs are kept, never recomputed.
        may_vary: A second run may give other bits on some devices; see `is_repeatable`
            in `backend/operators/repeatable.py`.
        is_unproven: It belongs to a library whose schemas may omit writes, so its first
            call is checked.
        writes: Arguments it writes to: positions, or names of keywords.
        overwrites: It writes without reading the previous contents.
        makes_more: It returns tensors other than those it writes to.
        random: It draws from a generator.
        may_draw: It belongs to a library whose schemas may not tell that it draws.
        dropout_at: The position of a dropout rate, or -1; it draws only if the rate is
            above zero.
        uninitialised: It returns, or enlarges a tensor by, uninitialised memory.
        asks_gradient_mode: Its kernel returns what backward needs only if gradients are
            enabled.
        ragged: Positions of outputs with parts that the kernel does not write.
        shape_only: It depends on its first argument's shape and dtype, not on its
            contents.
        statistics: Positions of running statistics that it updates and that its outputs
            do not depend on when argument `training_at` is true.
        training_at: The position of the training flag, or -1 for always.
        nullable: Those of the statistics that may be None.
        draws_on_its_own: A rate above zero among its arguments makes it draw from other
            state than a generator: cuDNN keeps the dropout state of recurrent layers in
            a buffer.
        copies: It may copy between devices.
        counts_first: It increments the versions of what it writes to before it runs.
        is_foreach: It writes to lists of tensors. Under a dispatch mode such operators
            bypass the version counters.
    """

    name: str
    passes: bool = False
    opaque: bool = False
    may_vary: bool = False
    is_unproven: bool = False
    writes: tuple[int | str, ...] = ()
    overwrites: bool = False
    makes_more: bool = False
    random: bool = False
    may_draw: bool = False
    dropout_at: int = -1
    uninitialised: bool = False
    asks_gradient_mode: bool = False
    shape_only: bool = False
    ragged: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    training_at: int = -1
    nullable: tuple[int, ...] = ()
    draws_on_its_own: bool = False
    copies: bool = False
    counts_first: bool = False
    is_foreach: bool = False

    @property
    def simple(self) -> bool:
        """Whether it is a pure function of its arguments."""
        return not self.random and self._is_plain

    @property
    def simple_without_dropout(self) -> bool:
        """Whether it is a pure function if its dropout rate is zero."""
        return self.random and self.dropout_at >= 0 and self._is_plain

    @property
    def blank(self) -> bool:
        """Whether it only allocates memory, uninitialised."""
        return self.uninitialised and not (
            self.random or self.writes or self.statistics or self._is_irregular
        )

    @property
    def in_place(self) -> bool:
        """Whether it only reads and changes the contents of its first argument."""
        return self.writes == (0,) and not (
            self.resizes
            or self.makes_more
            or self.overwrites
            or self.random
            or self.copies
            or self.is_foreach
            or self.statistics
            or self._is_irregular
        )

    @property
    def resizes(self) -> bool:
        """Whether it may change the layout of the tensors that it writes to.

        Torch's in-place operators (`aten.*_`) do not, except those that resize. Out
        variants and custom operators may.
        """
        base = self.name.split(".")
        of_torch = base[0] == "aten" and base[1].endswith("_")
        return bool(self.writes) and (not of_torch or self.uninitialised)

    @property
    def moves_statistics(self) -> bool:
        """Whether it is simple except for running statistics that may be None."""
        return (
            bool(self.statistics)
            and self.nullable == self.statistics
            and not (
                self.random or self.writes or self.uninitialised or self._is_irregular
            )
        )

    @property
    def _is_plain(self) -> bool:
        return not (
            self.writes or self.uninitialised or self.statistics or self._is_irregular
        )

    @property
    def _is_irregular(self) -> bool:
        return bool(
            self.passes
            or self.opaque
            or self.may_vary
            or self.is_unproven
            or self.may_draw
            or self.ragged
            or self.asks_gradient_mode
            or self.shape_only
        )


_NAMES: dict[Any, str] = {}


def name_of(operator: Any) -> str:
    """Return the operator's name with its overload, as `aten.add.Tensor`."""
    name = _NAMES.get(operator)
    if name is None:
        name = _NAMES[operator] = str(operator)
    return name


def facts_of(operator: Any) -> Facts:
    """Return what is known about an operator.

    Examples:
        >>> facts_of(torch.ops.aten.mul_.Tensor).writes
        (0,)
        >>> facts_of(torch.ops.aten.view.default).passes
        True
    """
    if isinstance(operator, HigherOrderOperator):
        return Facts(name=name_of(operator), opaque=True)
    schema = operator._schema
    tags = operator.tags
    name = name_of(operator)
    base = schema.name
    library = base.split("::")[0]
    written = _writes(schema) or _hidden_writes(base)
    statistics = _statistics(base, schema)
    is_random = torch.Tag.nondeterministic_seeded in tags or _takes_generator(schema)
    return Facts(
        name=name,
        passes=_passes(operator, written),
        opaque=_is_opaque(base, tags),
        may_vary=base.rstrip("_") in VARYING,
        is_unproven=library not in _KNOWN and _takes_tensors(schema, written),
        writes=written,
        overwrites=base in _OVERWRITING or _is_out(written),
        makes_more=any(returned.alias_info is None for returned in schema.returns),
        random=is_random,
        may_draw=library not in _KNOWN and not is_random,
        dropout_at=_place_of("dropout_p", schema),
        uninitialised=base in _UNINITIALISED or base in _RESIZING,
        asks_gradient_mode=base in _ASKING,
        shape_only=base in _SHAPE_ONLY,
        ragged=_RAGGED.get(base, ()),
        statistics=statistics,
        training_at=_place_of("training", schema),
        nullable=tuple(place for place in statistics if _takes_none(schema, place)),
        draws_on_its_own=base.startswith("aten::_cudnn_rnn"),
        copies=base in _COPYING,
        counts_first=bool(written) and base in OPDEFS,
        is_foreach=bool(written) and base.startswith("aten::_foreach_"),
    )


def crosses_devices(args: tuple[Any, ...], out: Any) -> bool:
    """Return whether an operator copied between devices."""
    if not isinstance(out, Tensor):
        return False
    return any(
        isinstance(argument, Tensor)
        and argument.device != out.device
        and argument.dim() > 0
        for argument in args
    )


def without_contents(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and type that has no memory."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
    )


def draws(facts: Facts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of the operator draws from a generator."""
    if not facts.random or facts.dropout_at < 0:
        return facts.random
    # Left-out arguments have their defaults, and the default rate is zero.
    at = facts.dropout_at
    return (args[at] if at < len(args) else kwargs.get("dropout_p", 0)) > 0


def draws_outside_generators(facts: Facts, args: tuple[Any, ...]) -> bool:
    """Return whether the call draws from state that is not a generator's."""
    return facts.draws_on_its_own and any(
        isinstance(argument, float) and argument > 0 for argument in args
    )


def gives_permutation(facts: Facts, place: int | None) -> bool:
    """Return whether a result is a permutation of the indices of a dimension.

    Args:
        facts: The properties of its operator.
        place: Its position among the results, or None if there is only one.

    Examples:
        >>> gives_permutation(facts_of(torch.ops.aten.sort.stable), 1)
        True
    """
    library, name, *_ = facts.name.split(".")
    return library == "aten" and (name, place) in _PERMUTING


def _takes_none(schema: Any, position: int) -> bool:
    return "Optional" in str(schema.arguments[position].type)


def _writes(schema: Any) -> tuple[int | str, ...]:
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _hidden_writes(base: str) -> tuple[int | str, ...]:
    """Return the arguments with writes that the operator's schema does not declare."""
    library, name = base.split("::")
    # In-place collectives of process groups write to their first argument.
    return (0,) if library == "c10d" and name.endswith("_") else ()


def _takes_tensors(schema: Any, written: tuple[int | str, ...]) -> bool:
    """Return whether some tensor argument has no declared write."""
    return any(
        "Tensor" in str(argument.type)
        and (argument.name if argument.kwarg_only else position) not in written
        for position, argument in enumerate(schema.arguments)
    )


def _is_out(written: tuple[int | str, ...]) -> bool:
    """Return whether it is an out variant."""
    return bool(written) and all(isinstance(place, str) for place in written)


def _passes(operator: OpOverload, written: tuple[int | str, ...]) -> bool:
    if operator._schema.name in _ASKED or operator._schema.name in _UNTOLD_VIEWS:
        return True
    if torch.Tag.inplace_view in operator.tags:
        return operator._schema.name not in _RESIZING
    aliases = any(
        returned.alias_info is not None for returned in operator._schema.returns
    )
    return aliases and not written


def _statistics(base: str, schema: Any) -> tuple[int, ...]:
    if base not in _UPDATING:
        return ()
    names = ("running_mean", "running_var")
    places = (_place_of(name, schema) for name in names)
    return tuple(place for place in places if place >= 0)


def _place_of(name: str, schema: Any) -> int:
    for position, argument in enumerate(schema.arguments):
        if argument.name == name and not argument.kwarg_only:
            return position
    return -1


def _takes_generator(schema: Any) -> bool:
    return any("Generator" in str(argument.type) for argument in schema.arguments)


def _is_opaque(base: str, tags: list[torch.Tag]) -> bool:
    return (
        base in _KEPT
        or base.split("::")[0] in _COLLECTIVES
        # These have equal shapes in a replay. Others with this tag leave parts of
        # their results unwritten (`_ctc_loss`, `linalg_lstsq`), or are unknown.
        or (
            torch.Tag.dynamic_output_shape in tags
            and base not in GATHERING
            and base not in CHOOSING
        )
        or torch.Tag.data_dependent_output in tags
        or any(tag.name == "nondeterministic_bitwise" for tag in tags)
    )


_KEPT = frozenset(
    {
        # cuDNN's recurrent kernels write to it undeclared.
        "aten::_cudnn_init_dropout_state",
        # Draws, and uses a cumulative sum that is nondeterministic on some devices.
        "aten::multinomial",
    }
)

# Several processes take part: running one twice would block, or affect the others.
_COLLECTIVES = frozenset(
    {
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "c10d",
        "c10d_functional",
        "fsdp",
        "symm_mem",
    }
)

# Torch's own libraries: their schemas and `_hidden_writes` declare all writes, and tags
# all draws.
_KNOWN = _COLLECTIVES | {
    "_quantized",
    "aten",
    "mkldnn",
    "mkldnn_prepacked",
    "mkl",
    "onednn",
    "prim",
    "prims",
    "prepacked",
    "profiler",
    "quantized",
    "quantized_decomposed",
    "rngprims",
    "sparse",
}

_UNINITIALISED = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)

_OVERWRITING = frozenset(
    {
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)

_PERMUTING = frozenset({("sort", 1), ("randperm", None)})

_COPYING = frozenset({"aten::_to_copy", "aten::copy_"})

_SHAPE_ONLY = frozenset(
    {
        "aten::empty_like",
        "aten::full_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::new_full",
        "aten::new_ones",
        "aten::new_zeros",
        "aten::ones_like",
        "aten::rand_like",
        "aten::randint_like",
        "aten::randn_like",
        "aten::zeros_like",
    }
)

_ASKING = frozenset({"aten::mkldnn_rnn_layer"})

# The workspaces of oneDNN and cuDNN have padding.
_RAGGED = {"aten::mkldnn_rnn_layer": (3,), "aten::_cudnn_rnn": (3,)}

# The device of a fake tensor is queried through the dispatcher.
_ASKED = frozenset({"prim::device"})

# Views that their schemas do not declare, to hide them from autograd.
_UNTOLD_VIEWS = frozenset({"aten::_unsafe_view"})

_RESIZING = frozenset({"aten::resize_", "aten::resize_as_", "aten::_resize_output_"})

# Operators that update running statistics, most of them undeclared in the schema.
_UPDATING = frozenset(
    {
        "aten::_batch_norm_with_update",
        "aten::_native_batch_norm_legit",
        "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts",
        "aten::batch_norm_update_stats",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::native_batch_norm",
    }
)
