"""Runs: one forward of a model by a plan, cuts or segments."""

import itertools
import warnings
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from recoup.backend.autograd.module_hooks import calling_frame
from recoup.backend.autograd.saved_tensors import Pack, Unpack, ambient_hooks
from recoup.core.plan import Held, Place, Plan, Span
from recoup.core.segments import Action
from recoup.engine.applied.offloaded_saves import HOST
from recoup.engine.recording.active import (
    Yielding,
    begin,
    end,
    end_or_leave,
    is_innermost,
    is_open,
)
from recoup.engine.recording.region import Region
from recoup.engine.recording.region_options import Options
from recoup.engine.scopes.policies import Policy
from recoup.engine.tiers.protocol import Tier
from recoup.engine.verification.replay_check import Verify
from recoup.errors import BudgetWarning


class HeldBySpan:
    """The policy of one region of a plan.

    A value is identified by its operator and its index among that operator's values in
    the region, which does not depend on the batch size. If a region makes more values
    of an operator than were measured, as with a data-dependent graph, the additional
    ones are held if most of the known ones are.

    Args:
        held: By operator and index, the values that are held, and how.
        made: For each of these operators, the number of known values.

    Examples:
        >>> policy = HeldBySpan({"aten.mm.default": {1: Action.KEEP}}, {})
        >>> [policy.keeps("aten.mm.default", 64) for _ in range(3)]
        [False, True, False]
        >>> held = {"aten.mm.default": {0: Action.KEEP, 1: Action.KEEP}}
        >>> policy = HeldBySpan(held, {"aten.mm.default": 3})
        >>> [policy.keeps("aten.mm.default", 64) for _ in range(5)]
        [True, True, False, True, True]
    """

    def __init__(
        self, held: Mapping[str, Mapping[int, Action]], made: Mapping[str, int]
    ) -> None:
        self._held = held
        self._made = made
        self._seen: dict[str, int] = {}

    def keeps(self, operator: str, nbytes: int) -> bool | Tier:
        """Return whether the plan holds this value, or the tier that does."""
        del nbytes
        held = self._held.get(operator)
        if held is None:
            return False
        nth = self._seen.get(operator, 0)
        self._seen[operator] = nth + 1
        known = self._made.get(operator)
        if known is not None and nth >= known and 2 * len(held) > known:
            return True
        action = held.get(nth)
        return HOST if action is Action.OFFLOAD else action is Action.KEEP


def table_of(held: Iterable[Held]) -> dict[str, dict[int, Action]]:
    """Return held values by operator and number."""
    table: dict[str, dict[int, Action]] = {}
    for value in held:
        table.setdefault(value.operator, {})[value.nth] = value.action
    return table


_SERIAL = itertools.count()


class _Interval:
    """A span with precomputed data: its policy's table, name and key."""

    def __init__(self, span: Span, parent: "_Interval | None", serial: int) -> None:
        self.span = span
        self.parent = parent
        self.table = table_of(span.held)
        self.made = dict(span.made)
        self.is_repeated = span.by_call
        self.name = span.label
        self.key = ("plan", serial, self.name)


class Script:
    """A plan as a table of the intervals that start at each place."""

    def __init__(self, plan: Plan) -> None:
        self.starts: dict[Place, list[_Interval]] = {}
        self.repeated = {span.start.module for span in plan.spans if span.by_call}
        self._serial = next(_SERIAL)
        self._collect(plan.spans, None)
        self.all_places = frozenset(self.places())

    def places(self) -> set[Place]:
        """Return all places where an interval starts or stops."""
        stops = {s.span.stop for started in self.starts.values() for s in started}
        return stops | set(self.starts)

    def _collect(self, spans: tuple[Span, ...], parent: _Interval | None) -> None:
        for span in spans:
            interval = _Interval(span, parent, self._serial)
            self.starts.setdefault(span.start, []).append(interval)
            self._collect(span.inner, interval)


@dataclass(frozen=True)
class Cuts:
    """Instead of a plan: consecutive regions, cut at the given modules.

    Everything is recomputed except what the policy keeps. Used to measure a model
    before a plan exists.

    Attributes:
        modules: The paths of the modules before and after which to cut.
        policy: Which outputs to keep.
    """

    modules: tuple[str, ...]
    policy: Policy | None = None


class CuttingRun:
    """One forward of a model with `Cuts`."""

    def __init__(self, cuts: Cuts) -> None:
        self._modules = frozenset(cuts.modules)
        self._options = Options(policy=cuts.policy, verify="off", at_once=True)
        self._open: Yielding | None = None
        self._hooks = ambient_hooks()
        self._frame = calling_frame()

    def reach(self, module: str, *, entering: bool) -> None:
        """End one region and begin the next."""
        del entering
        # Modules that only other calls' plans name also have hooks.
        is_cut = self._open is None or module in self._modules
        if not is_cut or _are_foreign(self._hooks):
            return
        if self._open is not None and is_open(self._open):
            if not is_innermost(self._open):
                return
            end(self._open)
        self._open = Yielding(self._frame)
        begin(self._open, "a measured block", self._options, "cut")

    def close(self) -> None:
        """End the last region."""
        if self._open is not None:
            end_or_leave(self._open)


@dataclass(frozen=True)
class Segments:
    """Instead of a plan: every `size` consecutive blocks are one region.

    Attributes:
        modules: The paths of the blocks.
        size: The number of blocks per region.
        options: The options of the regions.
        mark: Identity of these regions for verification; a copy has another one.
    """

    modules: tuple[str, ...]
    size: int
    options: Options
    mark: object = field(default_factory=object, compare=False, repr=False)


class SegmentedRun:
    """One forward of a model with `Segments`.

    Blocks are counted when they are left, so their order does not matter, and some may
    be skipped. A region ends at the latest when all blocks have run equally often.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._open: Yielding | None = None
        self._begun = 0
        self._inside = 0
        self._left = 0
        self._hooks = ambient_hooks()
        self._frame = calling_frame()

    def reach(self, module: str, *, entering: bool) -> None:
        """Begin a region before a block outside one; end it after its last block."""
        if not module or _are_foreign(self._hooks):
            return  # the model itself is no block
        if entering:
            # Retry: an inner region may have been open when the last block ended.
            self._end_full()
            self._begin(module)
            return
        self._inside += 1
        self._left += 1
        self._end_full()

    def close(self) -> None:
        """End the last region."""
        if self._open is not None:
            end_or_leave(self._open)

    def _begin(self, module: str) -> None:
        if self._open is not None and is_open(self._open):
            return
        self._open = Yielding(self._frame)
        self._inside = 0
        key = (self._segments.mark, self._begun)
        self._begun += 1
        begin(self._open, f"segment at {module}", self._segments.options, key)

    def _end_full(self) -> None:
        """End the region if it has all its blocks and no region is open inside it."""
        is_full = self._inside >= self._segments.size
        is_last = self._inside and self._left % len(self._segments.modules) == 0
        if (is_full or is_last) and is_innermost(self._open):
            end(self._open)
            self._inside = 0


class Episode:
    """The calls of a model until backward, on one thread.

    A plan for several calls distinguishes them by order. A new step is detected when
    all regions of the previous calls are dead.

    Args:
        model_calls: The number of calls.

    Attributes:
        calls: The number of entries and exits of each module.
        regions: The regions that calls began so far.
    """

    def __init__(self, model_calls: int = 1) -> None:
        self.model_calls = model_calls
        self.calls: dict[tuple[str, bool], int] = {}
        self.regions: list[weakref.ref[object]] = []
        self._begun = 0

    def takes(self, model_calls: int) -> bool:
        """Count one more call; return False if it begins another episode."""
        is_over = bool(self.regions) and all(ref() is None for ref in self.regions)
        if (
            is_over
            or self._begun == self.model_calls
            or model_calls != self.model_calls
        ):
            return False
        self._begun += 1
        return True


class DueInterval(NamedTuple):
    """A block call that is about to start and that backward repeats.

    Attributes:
        name: Its name in messages and statistics.
        key: Its identity for verification.
        options: The options of a region in its place.
        episode: The episode of model calls that it belongs to.
    """

    name: str
    key: Hashable
    options: Options
    episode: Episode

    def began(self, call: object) -> None:
        """Record that the call runs."""
        if self.episode.model_calls > 1:
            self.episode.regions.append(weakref.ref(call))


class Run:
    """One forward of a model with a plan.

    Attributes:
        order: The places of the plan, in the order reached.
    """

    def __init__(
        self, script: Script, verify: Verify, episode: "Episode | None" = None
    ) -> None:
        self._script = script
        self._verify: Verify = verify
        self._open: list[tuple[_Interval, Yielding]] = []
        self._episode = episode or Episode()
        self._calls = self._episode.calls
        self.order: list[Place] = []
        self._due: _Interval | None = None
        self._hooks = ambient_hooks()
        self._frame = calling_frame()

    def reach(self, module: str, *, entering: bool) -> None:
        """End and begin the intervals that end and begin here.

        Does nothing inside saved-tensor hooks of the model's own code, such as torch's
        checkpointing, which own the tensors there.
        """
        call = self._calls.get((module, entering), 0)
        self._calls[module, entering] = call + 1
        if self._due is not None:
            self._give_up_repeating(self._due)
        if _are_foreign(self._hooks):
            return
        place = Place(module, call, entering)
        if place in self._script.all_places:
            self.order.append(place)
        self._forget_ended()
        if any(interval.span.stop == place for interval, _ in self._open):
            self._end_down_to(place)
        for interval in self._script.starts.get(place, ()):
            self._start(interval)

    def close(self) -> None:
        """End all open intervals."""
        self._due = None
        while self._open:
            end_or_leave(self._open.pop()[1])

    def due_call(self, module: str) -> "DueInterval | None":
        """Return the pending block call of a module, if backward repeats it."""
        due = self._due
        if due is None or due.span.start.module != module:
            return None
        self._due = None
        return DueInterval(due.name, due.key, self._options(None), self._episode)

    def _options(self, policy: Policy | None) -> Options:
        return Options(policy=policy, verify=self._verify, at_once=True)

    def _give_up_repeating(self, interval: _Interval) -> None:
        """Use a region for a block from now on, because its forward was replaced.

        The new forward did not call `due_call`, so this call keeps all activations.
        """
        self._due = None
        interval.is_repeated = False
        warnings.warn(
            BudgetWarning(
                f"the forward of {interval.span.start.module!r} was replaced after the "
                "plan was applied: this call keeps all activations of the block. From "
                "the next call on a region recomputes it. Call fit after the change."
            ),
            stacklevel=2,
        )

    def _end_down_to(self, place: Place) -> None:
        """End the outermost interval that ends here, and all inside it.

        An interval that contains a user's open scope continues.
        """
        last = [interval.span.stop == place for interval, _ in self._open].index(True)
        while len(self._open) > last and is_innermost(self._open[-1][1]):
            end(self._open.pop()[1])

    def _forget_ended(self) -> None:
        """Drop intervals whose regions ended with an enclosing scope."""
        self._open = [item for item in self._open if is_open(item[1])]

    def _start(self, interval: _Interval) -> None:
        around = self._open[-1][0] if self._open else None
        if around is not interval.parent:
            return  # the previous or enclosing interval deviated from the plan
        if interval.is_repeated:
            self._due = interval
            return
        policy = HeldBySpan(interval.table, interval.made) if interval.table else None
        owner = Yielding(self._frame)
        region = begin(owner, interval.name, self._options(policy), interval.key)
        if region is not None and self._episode.model_calls > 1:
            self._episode.regions.append(weakref.ref(region))
        self._open.append((interval, owner))


def _are_foreign(before: tuple[Pack, Unpack] | None) -> bool:
    """Return whether the active hooks are neither recoup's nor `before`."""
    hooks = ambient_hooks()
    if hooks is None or (before is not None and hooks[0] is before[0]):
        return False
    pack = hooks[0]
    ours = isinstance(getattr(pack, "__self__", None), Region)
    return not ours and not getattr(pack, "is_noting", False)
