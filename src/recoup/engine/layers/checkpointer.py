"""Keep an activation every few layers; recompute the others from these."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from torch import Tensor

from recoup.backend.autograd.autocast import AutocastState, autocast_as, autocast_states
from recoup.backend.compiler.recognition import is_compiled, original_of
from recoup.backend.memory.storages import alias
from recoup.backend.state.rng import devices_in_use
from recoup.backend.state.snapshots import Generators, buffers_restored
from recoup.backend.state.trees import bytes_in, leaves, map_leaves
from recoup.core.restoring import restoring
from recoup.engine.layers.layer_plan import (
    CheckpointConfig,
    check_layer,
    choose,
    interval_of,
    place_of,
    too_many,
)
from recoup.engine.lifetime.values import Hold
from recoup.engine.recording.region_options import Options
from recoup.engine.replay.rerun import rerun
from recoup.engine.scopes.function import call_in_region
from recoup.engine.tiers.protocol import Tier
from recoup.errors import CheckpointIndexError, MissingCheckpointError, UsageError


@dataclass(frozen=True, slots=True)
class LayerMoment:
    """A snapshot of Python's, NumPy's and torch's generators, and of autocast.

    Takes some thirty kilobytes and thirty microseconds.

    Examples:
        >>> import torch
        >>> moment = LayerMoment.now()
        >>> first = torch.rand(3)
        >>> with moment.again():
        ...     second = torch.rand(3)
        >>> torch.equal(first, second), torch.equal(first, torch.rand(3))
        (True, False)
    """

    generators: Generators
    autocast: tuple[AutocastState, ...]

    @classmethod
    def now(cls) -> Self:
        """Return a snapshot of the current state."""
        devices = devices_in_use()
        kinds = {device.type for device in devices}
        return cls(Generators(devices), autocast_states(kinds))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the block in this state, then restore the generators."""
        now = Generators(self.generators.devices)
        with restoring(now.restore), autocast_as(self.autocast):
            self.generators.restore()
            yield


@contextmanager
def leaving_no_trace(
    function: Callable[..., Any], moment: LayerMoment | None
) -> Iterator[None]:
    """Run the block in an earlier generator state; restore generators and buffers.

    The buffers are those of modules that the function refers to. They start with their
    current contents: earlier ones are not kept.

    Args:
        function: The function that the block calls.
        moment: The state of its earlier call; by default the current state.
    """
    functions = (function, original_of(function))
    with buffers_restored(*functions), (moment or LayerMoment.now()).again():
        yield


class KeptActivation:
    """One kept activation.

    Args:
        layer: Its layer.
        position: Its position among the layers of a forward, if it is from one.
        activation: The activation: a pytree of tensors or arrays.
        tier: The tier that keeps it, if not unchanged on its device.
        moment: The state at the start of the next layer, if it is from a forward.
    """

    def __init__(
        self,
        layer: int,
        position: int | None,
        activation: Any,
        tier: Tier | None,
        *,
        moment: LayerMoment | None = None,
    ) -> None:
        self.layer = layer
        self.position = position
        self.moment = moment
        self._holds = map_leaves(partial(_held, tier), activation)

    @property
    def stored_bytes(self) -> int:
        """The bytes it takes in its tier."""
        return sum(
            leaf.stored_bytes if isinstance(leaf, Hold) else bytes_in(leaf)
            for leaf in leaves(self._holds)
        )

    def activation(self) -> Any:
        """Return it without a graph."""
        return map_leaves(_fetched, self._holds)

    def position_in(self, layers: Sequence[int], end: int) -> int:
        """Return its position among layers, at `end` or before, or -1."""
        position = self.position
        if position is None:
            return last_place(layers, self.layer, end + 1)
        fits = position <= end and layers[position] == self.layer
        return position if fits else -1


class Table:
    """The kept activations, and the bytes of the others.

    Attributes:
        entries: By position in the forward, or by layer if saved with `save`; oldest
            first.
        input: The input of the forward.
        limit: The highest layer so far, plus one.
        saved_bytes: The bytes of activations that are not kept.
        skipped_bytes: The bytes of checkpoints beyond `max_checkpoints`.
    """

    def __init__(self) -> None:
        self.entries: dict[object, KeptActivation] = {}
        self.input: KeptActivation | None = None
        self.limit = 0
        self.saved_bytes = 0
        self.skipped_bytes = 0

    def clone(self) -> Self:
        """Return a copy with the same entries."""
        other = copy(self)
        other.entries = dict(self.entries)
        return other

    def keep(self, key: object, entry: KeptActivation) -> None:
        """Add an entry."""
        self.entries[key] = entry
        self.limit = max(self.limit, entry.layer + 1)

    def find(self, layer: int) -> KeptActivation | None:
        """Return the last entry of a layer."""
        found = [entry for entry in self.entries.values() if entry.layer == layer]
        return found[-1] if found else None

    def discard(self, layer: int) -> bool:
        """Remove the entries of a layer; return whether there were any."""
        found = [key for key, entry in self.entries.items() if entry.layer == layer]
        for key in found:
            del self.entries[key]
        return bool(found)

    def nearest(
        self, layers: Sequence[int], end: int
    ) -> tuple[int, KeptActivation | None]:
        """Return the last kept position up to `end`, and its entry."""
        start, nearest = -1, self.input
        for entry in self.entries.values():
            position = entry.position_in(layers, end)
            if position >= 0 and position >= start:
                start, nearest = position, entry
        return start, nearest


def last_place(layers: Sequence[int], layer: int, end: int) -> int:
    """Return the last position of a layer before `end`, or -1.

    Examples:
        >>> last_place([0, 1, 0, 1], 0, 2), last_place([0, 1, 0, 1], 0, 4)
        (0, 2)
    """
    places = [place for place in range(end) if layers[place] == layer]
    return places[-1] if places else -1


def _held(tier: Tier | None, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    hold = Hold(alias(leaf))
    hold.assign(tier)
    hold.store(claims=0)
    return hold


def _fetched(leaf: Any) -> Any:
    if not isinstance(leaf, Hold):
        return leaf
    return leaf.fetch("a checkpoint").detach()


LayerFunction = Callable[[Any, int], Any]
"""Function that computes a layer from the activation and the layer's index."""


class ActivationCheckpointer:
    """Keep the activations of some layers; recompute the others from these.

    `checkpointed_forward` runs layers in sequence. It is differentiable: between
    forward and backward only the input and the checkpoints are alive, and backward
    recomputes each interval between two checkpoints once. Gradients are bitwise those
    of the plain run, unless `use_mixed_precision` rounds the checkpoints.

    `get` returns a checkpoint, and `recompute_from_checkpoint` recomputes any other
    activation. Each forward begins with an empty table; graphs of earlier forwards keep
    what they need.

    Costs: the table holds the checkpoints of the last forward until `clear`, each with
    the states of the random generators, some thirty kilobytes.

    Args:
        config: Which layers to keep, how many, and how.

    Raises:
        UsageError: The argument is no configuration.

    Examples:
        >>> import torch
        >>> config = CheckpointConfig(checkpoint_every_n_layers=3, max_checkpoints=10)
        >>> checkpointer = ActivationCheckpointer(config)
        >>> output = checkpointer.checkpointed_forward(
        ...     torch.tensor([1.0, 2.0, 3.0]),
        ...     range(6),
        ...     lambda activation, layer: activation * 1.1 + 0.01 * layer,
        ... )
        >>> checkpointer.num_checkpoints()
        2
        >>> checkpointer.memory_stored_bytes(), checkpointer.memory_saved_bytes()
        (24, 48)
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        if config is not None and not isinstance(config, CheckpointConfig):
            raise UsageError(f"expected a CheckpointConfig, got {config!r}.")
        self._config = CheckpointConfig() if config is None else config
        self._layer_count: int | None = None
        self._chosen: dict[int, bool] = {}
        self._table = Table()

    @property
    def config(self) -> CheckpointConfig:
        """The configuration."""
        return self._config

    def clone(self) -> Self:
        """Return a copy with the same configuration and checkpoints."""
        other = copy(self)
        other._table = self._table.clone()  # noqa: SLF001 (one of its own kind)
        return other

    def save(self, layer: int, activation: Any) -> None:
        """Keep the activation of a layer, replacing an earlier one.

        Args:
            layer: The layer's index.
            activation: A tensor, or a pytree with tensors. It is held by reference;
                `get` detects later in-place changes.

        Raises:
            CheckpointLimitError: There are `max_checkpoints` already, and
                `on_overflow` neither evicts nor skips.
        """
        layer = check_layer(layer)
        table, config = self._table, self._config
        is_known = table.find(layer) is not None
        if not is_known and self.num_checkpoints() >= config.max_checkpoints:
            if config.on_overflow == "skip":
                table.skipped_bytes += bytes_in(activation)
                return
            if config.on_overflow != "evict_oldest" or not table.entries:
                raise too_many(config, layer)
            del table.entries[next(iter(table.entries))]
        entry = KeptActivation(layer, None, activation, place_of(config))
        table.discard(layer)
        table.keep(("layer", layer), entry)

    def get(self, layer: int) -> Any:
        """Return the kept activation of a layer, without a graph.

        Raises:
            CheckpointIndexError: The index is above all layers seen so far.
            MissingCheckpointError: The layer was not kept.
            ChangedTensorError: The activation was changed in place since.
        """
        layer, limit = check_layer(layer), self._table.limit
        if layer >= limit:
            raise CheckpointIndexError(
                layer, limit, context="ActivationCheckpointer.get"
            )
        entry = self._table.find(layer)
        if entry is None:
            raise MissingCheckpointError(f"No checkpoint stored for layer {layer}")
        return entry.activation()

    def clear(self) -> None:
        """Drop all checkpoints and reset the counters."""
        self._table = Table()

    def memory_saved_bytes(self) -> int:
        """Return the bytes of the activations that the last forward did not keep."""
        return self._table.saved_bytes

    def memory_stored_bytes(self) -> int:
        """Return the bytes that the checkpoints take in their tier."""
        return sum(entry.stored_bytes for entry in self._table.entries.values())

    def skipped_bytes(self) -> int:
        """Return the bytes of checkpoints skipped beyond `max_checkpoints`."""
        return self._table.skipped_bytes

    def num_checkpoints(self) -> int:
        """Return the number of checkpoints, without the input."""
        return len(self._table.entries)

    def is_checkpoint_layer(self, layer: int) -> bool:
        """Return whether the activation of a layer is kept.

        For a layer of the last forward, the answer is what that forward kept, which
        also depends on `max_checkpoints` and `on_overflow`. Others follow the interval:
        layers 0, n, 2n, ….

        Raises:
            UsageError: The interval is `"sqrt"`, and no forward has run yet, so the
                number of layers is unknown.
        """
        layer = check_layer(layer)
        if layer in self._chosen:
            return self._chosen[layer]
        count = self._layer_count
        if self._config.checkpoint_every_n_layers == "sqrt" and count is None:
            raise UsageError(
                "expected a forward before this with checkpoint_every_n_layers='sqrt', "
                "got none; run forward first, which counts the layers."
            )
        interval = interval_of(self._config, count or 0)
        return interval > 0 and layer % interval == 0

    def checkpointed_forward(
        self, activation: Any, layers: Sequence[int], function: LayerFunction
    ) -> Any:
        """Run the layers on an input and return the last activation.

        Args:
            activation: The input: a tensor, or a pytree with tensors.
            layers: The layers in order; a layer may occur more than once.
            function: Function called as `function(activation, layer)` for each.

        Raises:
            CheckpointLimitError: There are too many checkpoint layers and
                `on_overflow` is `"error"`; no layer has run.
        """
        layers = [check_layer(layer) for layer in layers]
        kept, skipped = choose(self._config, layers)
        self.clear()
        self._layer_count = len(layers)
        self._chosen = dict.fromkeys(layers, False)
        self._chosen.update((layers[position], True) for position in kept)
        table, sizes = Table(), []
        table.input = KeptActivation(-1, -1, activation, None, moment=LayerMoment.now())
        start = 0
        for position in [*kept, len(layers) - 1]:
            if start <= position:
                interval = layers[start : position + 1]
                activation = self._run(function, sizes, activation, interval)
                start = position + 1
            if position in kept:
                entry = KeptActivation(
                    layers[position],
                    position,
                    activation,
                    place_of(self._config),
                    moment=LayerMoment.now(),
                )
                table.keep(position, entry)
        table.limit = max(layers, default=-1) + 1
        table.skipped_bytes = sum(sizes[position] for position in skipped)
        left_out = set(range(len(layers))).difference(kept, skipped)
        table.saved_bytes = sum(sizes[position] for position in left_out)
        self._table = table
        return activation

    def recompute_from_checkpoint(
        self, target: int, layers: Sequence[int], function: LayerFunction
    ) -> Any:
        """Return the activation of a layer, recomputed from the nearest checkpoint.

        The layers run again with the random numbers and the autocast of the forward.
        Afterwards the random generators are restored, and so are the buffers of the
        modules that the function reaches: through its variables, `partial` arguments,
        bound object, and containers in these.

        The layers' other inputs must be unchanged. A layer whose result depends on a
        buffer that its forward updates, such as spectral normalisation, starts from the
        current buffer; batch normalisation in training does not depend on its
        statistics. From an activation stored by `save`, random numbers are drawn from
        the current state.

        Args:
            target: The layer; its last occurrence if it occurs more than once.
            layers: The layers of the forward, in order.
            function: The function of the forward.

        Raises:
            UsageError: The target is not among the layers.
            MissingCheckpointError: Nothing is kept, not even the input.
            ChangedTensorError: The checkpoint was changed in place since.
        """
        target = check_layer(target)
        layers = [check_layer(layer) for layer in layers]
        if target not in layers:
            raise UsageError(
                f"layer {target} is not among the layers given, {layers}: only what "
                "the forward computes can be recomputed."
            )
        end = last_place(layers, target, len(layers))
        start, nearest = self._table.nearest(layers, end)
        if nearest is None:
            raise MissingCheckpointError(
                f"No checkpoint found before layer {target} for recomputation"
            )
        interval = layers[start + 1 : end + 1]
        with leaving_no_trace(function, nearest.moment):
            return _run_interval(function, [], nearest.activation(), interval)

    def _run(
        self,
        function: LayerFunction,
        sizes: list[int],
        activation: Any,
        interval: Sequence[int],
    ) -> Any:
        """Run the layers between two checkpoints, to be recomputed in backward."""
        run = partial(_run_interval, function, sizes)
        if is_compiled(function):
            return rerun(run, activation, interval)
        options = Options(store=place_of(self._config))
        name = f"layers {interval[0]} to {interval[-1]}"
        return call_in_region(name, options, run, activation, interval)


def _run_interval(
    function: LayerFunction, sizes: list[int], activation: Any, interval: Sequence[int]
) -> Any:
    for layer in interval:
        activation = function(activation, layer)
        sizes.append(bytes_in(activation))
    return activation
