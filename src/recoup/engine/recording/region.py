"""Regions: an interval of forward whose saved tensors are forgotten and replayed."""

import threading
from collections.abc import Callable, Generator, Hashable, Mapping
from functools import partial
from time import perf_counter
from typing import NoReturn

from torch import Tensor

from recoup.backend.autograd.hook_stacks import Footing
from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    current_backward,
    follow_backward,
    is_in_backward,
    push_hooks,
)
from recoup.backend.autograd.wrappers import Wrapped, is_wrapper
from recoup.backend.compiler.recognition import leave_uncompiled
from recoup.backend.memory.storages import alias, has_storage, storage_address
from recoup.engine.lifetime.handover import (
    Collector,
    apart,
    copy_small,
    hand_over,
    is_handing_over,
    is_watched_from_around,
    mark_of,
    part_holds,
    role_around,
)
from recoup.engine.lifetime.placement import placement_of
from recoup.engine.lifetime.values import (
    OUTSIDE,
    Hold,
    Layout,
    TapeValue,
    forget_tensors,
    number,
)
from recoup.engine.recording.observers import Listener, Tracer, tell
from recoup.engine.recording.recorder import Recorder
from recoup.engine.recording.region_counts import Counted
from recoup.engine.recording.region_options import Options
from recoup.engine.recording.tape import Tape
from recoup.engine.replay.nested_replays import Request, run_nested
from recoup.engine.replay.program import Live, Program, derived_from_lossy
from recoup.engine.replay.program_choice import choice_for, program_at_once, program_for
from recoup.engine.replay.recomputing import SECONDS, count_replay_seconds
from recoup.engine.replay.replay_cache import ReplayCache, Saved, Uses, wanted_of
from recoup.engine.tiers.protocol import Tier
from recoup.engine.verification.replay_check import check_for, take_note
from recoup.errors import ClearedError

STATE_BYTES = 1 << 20
"""Tensors from outside that a region writes to and then needs as they were after the
write are copied up to this size: they are counters and running statistics, which the
next region will write again. Larger ones are held by reference and checked."""


_LOOK_EVERY = 256
"""The number of saved tensors after which a region checks that its call still runs."""


class Region(Counted):
    """One run of a scope, a function or a module under recoup's control.

    Between `open` and `close` it records. From then on it lives as long as autograd
    holds a tensor that was saved in it.

    Args:
        name: What error messages and statistics call it.
        options: How saved tensors are treated.
        key: What tells this region from others, for verification at first use.

    Attributes:
        listeners: Called with every tensor that autograd saves in it.
        tracer: Gives the saved-tensor hooks that are used instead of its own.
        around: The regions around it, if these are to keep what it keeps.
        recall: The values that the last backward through it has recomputed.
        collector: Collects what autograd saves in it, if it runs in the second call of
            a function that is called again.
    """

    # Defaults of rarely used attributes: set on a region only if they differ.
    tracer: "Tracer[Region] | None" = None
    collector: Collector | None = None
    _is_forgotten = False
    _is_handed_over = False
    _mark = -1
    _traced: Pack | None = None
    _roots: list[TapeValue] | None = None
    _program: Program | None = None
    _uses: Uses | None = None
    _watched = -1
    _stores = False
    _packs = _LOOK_EVERY

    def __init__(self, name: str, options: Options, key: Hashable) -> None:
        check = check_for(options.verify, key)
        self.name = name
        self.options = options
        self.listeners: tuple[Listener, ...] = ()
        self.around: tuple[Region, ...] = ()
        watch = check.watch if check else None
        self.tape = Tape(placement_of(options.policy, options.store), watch)
        self._key = key
        self._check = check
        self._kept: dict[int, Hold] = {}  # by identity
        self._late: Mapping[TapeValue, Hold] = {}
        self.recall: ReplayCache | None = None
        self._cleared = False
        self._lock = threading.RLock()

    def open(self, close_if_left: Callable[[], bool] | None = None) -> None:
        """Start recording on this thread.

        What closes it if it was left by an interrupt, and says so, is asked now and
        then, where nobody else may come to close it.

        In the first call of a function that is called again the hooks of that call
        stay: they forget all. The operators run below a recorder all the same, because
        the second call must save what the first does.
        """
        self._close_if_left = close_if_left
        self._is_inside_hooks = is_watched_from_around()
        self._footing = Footing()
        if self._is_inside_hooks:
            self._is_forgotten, self.collector = role_around()
            if self._is_forgotten:
                self.tape = Tape(placement_of(None, None))
        self._recorder = Recorder(self.tape)
        self._recorder.__enter__()
        if not self._is_forgotten:
            tracer = self.tracer
            hooks = self.hooks() if tracer is None else tracer.hooks(self)
            if tracer is not None:
                self._traced = hooks[0]
            push_hooks(*hooks)

    def hooks(self) -> tuple[Pack, Unpack]:
        """Return the saved-tensor hooks of the region."""
        return (self.pack if self.collector is None else self.collect), self.unpack

    def close(self, *, is_left: bool = False) -> None:
        """Stop recording; drop what neither backward nor a replay needs.

        One that was left by an interrupt has others around it than when it was opened.
        """
        if not self._is_forgotten:
            self._footing.take_off_hooks(self._traced or self.hooks()[0])
            if self._traced is not None:
                self._traced = None  # it refers to the region
        self._footing.leave_mode(self._recorder)
        del self._recorder, self._footing, self._close_if_left
        self.around = ()
        if self._is_forgotten:
            ran, self.tape = self.tape, Tape(placement_of(None, None))
            self.tape.unrecorded = ran.unrecorded
            return
        self._program = self._settle()
        self._uses = None
        if not is_left and is_watched_from_around():
            part_holds(self._roots or (), self._kept)
            self._is_handed_over = True
            hand_over(self.holds(), self._mark)
            self._program = None  # it must make the handed over values too
        self.tape.finish()

    def abandon(self) -> None:
        """Take what was opened off this thread, after an interrupt; forget the rest.

        May be called at any time and more than once.
        """
        self._cleared = True
        self._packs = 0  # the next one looks
        recorder = self.__dict__.get("_recorder")
        if recorder is not None:
            recorder.paused = True
        # A hold with a graph would keep the region alive. Without torch: an operator
        # runs through all regions around, and those may be too many.
        self.tape.attached.drop()
        Footing.drop(self.hooks()[0], recorder)
        for name in ("_recorder", "_footing", "_close_if_left"):
            self.__dict__.pop(name, None)

    def _settle(self) -> Program:
        """Keep what backward and a replay need, and free the rest."""
        tape = self.tape
        if self._check is not None:
            self._check.look_again(tape.value_of)
        tape.close()
        late = tape.late
        if late is not None:
            self._late = late.holds
            self._kept.update((id(hold), hold) for hold in late.holds.values())
        wanted = [value for value in tape.saved if value.demand > 0]
        program = Program(tape.operations, [v for v in wanted if v.hold is None])
        operations = program.operations
        roots = program.roots
        if len(program.wanted) < len(wanted):
            held = [value for value in wanted if value.hold is not None]
            roots = list(dict.fromkeys(held + roots))
        if tape.histories:
            tape.settle_histories(program)
        if self._is_inside_hooks:
            self._mark = mark_of(tape.operations, operations, roots)
        number(operations)
        tape.operations = operations
        if len(wanted) < len(tape.saved):
            tape.saved = dict.fromkeys(wanted)
        take_note(self._check, self._key, tape)
        tape.placement.place_roots(roots)
        forget_tensors(roots)
        written = tape.written
        for value in roots:
            hold = value.hold
            assert hold is not None, "roots are held"
            if hold.version is None:
                hold.settle()
            if written and value in written:
                hold = copy_small(value, hold, STATE_BYTES)
            if hold.tier is not None:
                self._stores |= hold.store(value.demand)
        self._roots = roots
        if self._check is not None:
            self._check.excuse(derived_from_lossy(operations, roots))
        return program

    @leave_uncompiled
    def pack(  # noqa: C901, PLR0912 (written out: autograd waits for this)
        self, tensor: Tensor
    ) -> Saved | Hold | Wrapped:
        """Take a tensor that autograd saves; return what stands for it."""
        if (self.listeners or self.around) and not is_handing_over():
            self._tell(tensor)
        self._packs -= 1
        if self._packs < 0 and self._was_left():
            return Hold(alias(tensor))
        tape = self.tape
        try:
            address = storage_address(tensor)
            known = tape.named.get(address)
            # What `save` asks first.
            if known is None or known.producer == OUTSIDE or tape.tainted:
                found = tape.save(tensor, address, known)
                if type(found) is Hold:
                    if self._is_inside_hooks:
                        found = apart(found, self._kept)
                    self._kept[id(found)] = found
                    return found
            else:
                found = tape.lying(known, tensor)
        except NotImplementedError:
            return self._pack_whole(tensor)
        value, layout = (found, None) if type(found) is TapeValue else found
        hold = value.hold
        if hold is None:
            if not self.options.recompute and value not in tape.forced:
                hold = value.keep_tensor(tensor)
                tape.placement.place_saved(hold)
            elif self._check is not None and value not in tape.unverified:
                self._fingerprint(value, tensor, layout)
        if value.demand == 0:
            tape.saved[value] = None
        if hold is not None and hold.stored is not None:
            hold.stored.claims += 1
        elif hold is not None and hold.tier is not None:
            self._stores |= hold.store(value.demand + 1)  # with the one made here
        return Saved(self, value, layout)

    @leave_uncompiled
    def collect(self, tensor: Tensor) -> Saved | Hold | Wrapped:
        """Take a tensor as `pack` does, and pass it to the collector around."""
        packed = self.pack(tensor)
        if not is_handing_over():
            assert self.collector is not None, "these hooks are used with one only"
            self.collector.take(tensor, packed, self.unpack)
        return packed

    def _tell(self, tensor: Tensor) -> None:
        """Show a saved tensor to listeners; let the regions around keep it, too."""
        tell(self.listeners, tensor)
        if (
            not self.around
            or not has_storage(tensor)
            or self.tape.value_of(tensor) in self.tape.forced
        ):
            return
        for region in self.around:
            value = region.tape.value_of(tensor)
            if value is not None and value not in region.tape.forced:
                region.keep(value, tensor, None)

    def _pack_whole(self, tensor: Tensor) -> Hold | Wrapped:
        """Take a tensor without a storage: by its inner tensors, or as it is."""
        if not is_wrapper(tensor) or not self.tape.names_own(tensor):
            hold = Hold(tensor.detach())
            self._kept[id(hold)] = hold
            return hold
        listeners, self.listeners = self.listeners, ()  # they have heard of the whole
        try:
            return Wrapped(tensor, self.pack)
        finally:
            self.listeners = listeners

    def _was_left(self) -> bool:
        if self._cleared:
            self.abandon()
            return True
        if is_in_backward():
            # Torch would put the hooks and the mode back at its end, and a replay of
            # this very region may be under way. The first one after it looks.
            self._packs = 0
            return False
        self._packs = _LOOK_EVERY
        close_if_left = self.__dict__.get("_close_if_left")
        return close_if_left is not None and close_if_left()

    def keep(self, value: TapeValue, tensor: Tensor, store: Tier | None) -> None:
        """Hold a value that the tensor names, and say where it is to be kept."""
        hold = value.hold
        if hold is None:
            hold = value.keep_tensor(tensor)
            hold.assign(store or self.options.store)
        elif store is not None:
            hold.assign(store)
        if value.demand > 0 and hold.tier is not None:
            self._stores |= hold.store(value.demand)

    @leave_uncompiled
    def unpack(self, packed: Saved | Hold | Wrapped) -> Tensor:
        """Return the tensor that `packed` stands for, recomputing it if need be."""
        if self._cleared:
            self._refuse()
        if type(packed) is Saved:
            value, layout = packed.value, packed.layout
            hold = value.hold
            if self._late and value in self._late:
                hold = self._late[value]
            elif hold is None:
                recall = self.recall
                if recall is not None:
                    task = current_backward()
                    if recall.task == task:
                        tensor = recall.give(packed, task)
                        if tensor is not None:
                            return tensor
                return self._recomputed(packed)
            elif hold.tensor is None:
                if not hold.is_at_hand:
                    return self._recomputed(packed)
                if hold.stored is not None:
                    whole = self._brought(packed, hold)
                    return whole if layout is None else layout.view(whole)
            whole = hold.fetch("a backward operator")
            return whole if layout is None else layout.view(whole)
        if type(packed) is Hold:
            return packed.fetch("a backward operator")
        assert type(packed) is Wrapped, "one of the three"
        return packed.unpack(self.unpack)

    def recompute(self) -> tuple[Tensor, ...]:
        """Return the saved values that are not held, recomputed now."""
        with self._lock:
            if self._cleared:
                self._refuse()
            wanted = wanted_of(self.tape.saved)
            self.count_replay()
            program = Program(self.tape.operations, wanted)
            live = run_nested(self._run(program, {}))
            return tuple(live[value] for value in wanted)

    def clear(self) -> None:
        """Drop everything held; a later backward through the region is an error."""
        with self._lock:
            self._cleared = True
            self.recall = None
            for hold in self.holds():
                hold.drop()
            self._kept = {}
            self._program = None
            self.tape.operations = []

    def holds(self) -> list[Hold]:
        """Return everything that the region holds for backward and for replays."""
        roots = self._roots
        if roots is None:
            wanted = [value for value in self.tape.saved if value.demand > 0]
            roots = Program(self.tape.operations, wanted).roots
        found: dict[int, Hold] = {}
        for value in roots:
            hold = value.hold
            if hold is not None and hold.past is None:  # as `parts` does
                found[id(hold)] = hold
            elif hold is not None:
                found.update((id(part), part) for part in hold.parts())
        found.update(self._kept)
        return list(found.values())

    def end(self, task: int) -> None:
        """Drop the recomputed values that a backward left."""
        with self._lock:
            if self.recall is not None and self.recall.task == task:
                self.recall = None
            if self._watched == task:
                self._watched = -1
                for hold in self.holds():
                    if hold.stored is not None:
                        hold.stored.end()

    def _refuse(self) -> NoReturn:
        raise ClearedError(
            f"a tensor saved in region {self.name!r} is needed, but its checkpoints "
            "were cleared. Run backward before clearing them, or run the forward again."
        )

    def _fingerprint(
        self, value: TapeValue, tensor: Tensor, layout: Layout | None
    ) -> None:
        assert self._check is not None, "only called when there is a check"
        geometry = value.geometry if layout is None else layout.geometry
        assert geometry is not None, "an operation made the value"
        with self._recorder.pausing():
            self._check.remember(value, tensor, geometry)

    def _brought(self, saved: Saved, hold: Hold) -> Tensor:
        with self._lock:
            self._watch_backward()
            return hold.fetch("a backward operator", saved)

    def _recomputed(self, saved: Saved) -> Tensor:
        task = current_backward()
        recall = self.recall
        if recall is not None and recall.task != task and recall.serves(task):
            tensor = recall.give(saved, task)  # else `unpack` has asked
            if tensor is not None:
                return tensor
        if self._program is not None and self._check is None and not self._stores:
            with self._lock:
                tensor = self._without_search(saved, task)
            if tensor is not None:
                return tensor
        return run_nested(self._recomputing(saved))

    def _without_search(self, saved: Saved, task: int) -> Tensor | None:
        """Do what `_recomputing` does, in fewer steps, where that takes no search.

        A region that has its program has given nothing to hooks around it, and records
        no more.
        """
        recall = self.recall
        if recall is None or not recall.serves(task):
            if task == -1 and not self.options.cache:
                return None
            self._packs = 0  # the next one looks: few regions are open in a backward
            recall = self._start(task)
        value, at_once = saved.value, self.options.at_once
        if recall.has_served(value):
            return None
        chosen = choice_for(recall, self._program, value, self.tape, at_once=at_once)
        if chosen is None:
            return None
        program, part, given = chosen
        operators = len(program.operations if part is None else part[0])
        wanted = program.wanted if part is None else part[1]
        self.replayed_operators += operators
        start = perf_counter()
        live = program.run(given=given, part=part)
        if self.accounts or SECONDS:
            self.count_run(operators, wanted, (), count_replay_seconds(start))
        if part is None:
            recall.take(wanted, live)
        else:
            recall.take_part(wanted, live)
        return recall.give(saved, task)

    def unpacking(self, saved: Saved) -> Generator[Request, Tensor, Tensor]:
        """Unpack as `unpack` does; yield requests to the regions around this one."""
        hold = saved.value.hold
        is_needed = hold is None or not hold.is_at_hand
        if self._cleared or saved.value in self._late or not is_needed:
            return self.unpack(saved)
        return (yield from self._recomputing(saved))

    def _recomputing(self, saved: Saved) -> Generator[Request, Tensor, Tensor]:
        value, task = saved.value, current_backward()
        if value.hold is not None and self.options.cache:
            return (yield from self._alone(saved))  # it may have changed since
        recall = self.recall
        if recall is None or not recall.serves(task):
            if task == -1 and not self.options.cache:
                return (yield from self._alone(saved))
            self._packs = 0  # the next one looks: few regions are open in a backward
            recall = self._start(task)
        if not recall.has_served(value):
            yield from self._extend(recall, value)
        tensor = recall.give(saved, task)
        if tensor is None:
            # Asked again after its last use, as by a function that reads its saved
            # tensors twice.
            return (yield from self._alone(saved))
        return tensor

    def _alone(self, saved: Saved) -> Generator[Request, Tensor, Tensor]:
        """Return one saved tensor, recomputed or fetched for itself."""
        program = Program(self.tape.operations, [saved.value])
        if program.operations:
            self.count_replay()
        live = yield from self._run(program, {})
        whole = live[saved.value]
        return whole if saved.layout is None else saved.layout.view(whole)

    def _start(self, task: int) -> ReplayCache:
        """Begin to recompute for a backward, unless another thread of it just did."""
        with self._lock:
            recall, lasting = self.recall, self.options.cache
            if recall is not None and recall.serves(task):
                return recall
            self.count_replay()
            recall = ReplayCache(-1 if lasting else task, lasting=lasting)
            self.recall = recall
            if not lasting:
                follow_backward(self)
            return recall

    def _extend(
        self, recall: ReplayCache, value: TapeValue
    ) -> Generator[Request, Tensor, None]:
        """Recompute a value for a backward with all that this needs, and no more."""
        with self._lock:
            if recall.has_served(value):
                return  # another thread of the backward asked for it
            given: Live = {}
            if self.options.at_once:
                program = program_at_once(recall, self._program, self.tape)
            else:
                program = program_for(recall, self._program, value)
            if program is None:
                uses = self._uses_of()
                program, given = recall.plan(self.tape.operations, value, uses)
            live = yield from self._run(program, given)
            recall.take(program.wanted, live)

    def _uses_of(self) -> Uses:
        is_open = "_recorder" in self.__dict__  # more operations are to come
        uses = self._uses or Uses(self.tape.operations)
        self._uses = None if is_open else uses
        return uses

    def _watch_backward(self) -> None:
        """Follow this backward to its end, to free the values fetched for it."""
        task = current_backward()
        if task not in (-1, self._watched):
            self._watched = task
            follow_backward(self)

    def _run(self, program: Program, given: Live) -> Generator[Request, Tensor, Live]:
        if self._stores:
            self._watch_backward()
        self.replayed_operators += len(program.operations)
        recorder = self.__dict__.get("_recorder")
        if recorder is None:
            return (yield from self._replayed(program, given))
        # A backward inside the region: what it runs again is on the tape already.
        with recorder.pausing():
            live = yield from self._replayed(program, given)
        for value in program.wanted:
            self.tape.name_again(live[value], value)
        return live

    def _replayed(
        self, program: Program, given: Live
    ) -> Generator[Request, Tensor, Live]:
        known = set(given)
        # What hooks around the region keep: they may run anything to give it back.
        for value in program.roots if self._is_handed_over else ():
            hold = value.hold
            if hold is None or value in known or not hold.has_parts_elsewhere:
                continue
            around = getattr(hold.unpack, "__self__", None)
            if type(hold.packed) is Saved and type(around) is Region:
                tensor = yield around, hold.packed
                given[value] = hold.given_back(tensor, "a replay")
            else:
                given[value] = hold.fetch("a replay")
        check = self._check
        start = perf_counter()
        observe = None if check is None else partial(check.observe, self.name)
        live = program.run(observe, given)
        if self.accounts or SECONDS:
            seconds = count_replay_seconds(start)
            self.count_run(len(program.operations), program.wanted, known, seconds)
        if check is None:
            return live
        made = [v for v in program.wanted if v not in known and v.demand > 0]
        check.compare(self.name, self.tape, {value: live[value] for value in made})
        return live
