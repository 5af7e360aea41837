"""Verification: replayed values must equal forward's bitwise."""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Literal, get_args
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from recoup.backend.autograd.saved_tensors import at_end_of_backward, current_backward
from recoup.backend.compiler.recognition import leave_uncompiled
from recoup.backend.memory.storages import Geometry, flat, has_contents, shaped
from recoup.backend.operators.fingerprints import fingerprint
from recoup.engine.lifetime.values import TapeValue
from recoup.engine.recording.tape import Tape
from recoup.engine.verification.verification_log import LEDGER
from recoup.errors import MismatchError, UsageError

REASONS = (
    "Either the operator gives another result when it is recomputed (a "
    "nondeterministic kernel), or a switch that chooses kernels was not the same in "
    "backward (`torch.backends...flags`, `sdpa_kernel`: put it around the whole step), "
    "or something wrote to the region's tensors without autograd's knowledge (`.data`, "
    "a custom kernel, NumPy). Keep its output with `recoup.keep`, or find the first "
    'operator that differs with `verify="full"`.'
)


class Verdict:
    """The findings of a check of one run of a region, still on the device.

    Args:
        region: The region's name.
        key: The region's identity in the log, or None to log nothing.
        operators: The signature of its operators.
        since: The ledger's moment when the region ran.

    Attributes:
        task: The task id of its backward.
        is_whole: Whether all values that could have been replayed were compared.
    """

    task = -1
    is_whole = True

    def __init__(
        self, region: str, key: Hashable | None, *, operators: int, since: int
    ) -> None:
        self.key = key
        self.operators = operators
        self.since = since
        self._region = region
        self._flags: list[tuple[int, str, Tensor]] = []

    def add(self, place: int, complaint: str, differs: Tensor) -> None:
        """Add a comparison of a value, with its position and message."""
        self._flags.append((place, complaint, differs))

    def complaint(self) -> str | None:
        """Return a message if any value differed, else None; synchronises."""
        wrong = [(at, saying) for at, saying, flag in self._flags if flag.item()]
        if not wrong:
            return None
        return (
            f"region {self._region!r}: {min(wrong)[1]} ({len(wrong)} of "
            f"{len(self._flags)} comparisons of saved values differ). Do not use "
            f"the gradients of this backward. {REASONS}"
        )


class _Session:
    """The verdicts of one backward, judged together at its end.

    Runs of a region that share a key (the layers of a loop) are verified together: one
    that passes must not hide another that fails.
    """

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    @leave_uncompiled
    def __call__(self) -> None:
        _judge(self.verdicts)


# Weak: autograd owns the session. A backward that raises drops it unjudged.
_SESSIONS: "WeakValueDictionary[int, _Session]" = WeakValueDictionary()
_LOCK = threading.Lock()


def hand_in(verdict: Verdict) -> None:
    """Judge a verdict together with all others at the end of the running backward.

    Raises:
        MismatchError: Outside of a backward, at once, if a value differed.
    """
    task = current_backward()
    if task == -1:
        _judge([verdict])
        return
    with _LOCK:  # the devices of a backward have a thread each
        session = _SESSIONS.get(task)
        if session is None:
            session = _SESSIONS[task] = _Session()
            at_end_of_backward(session)
        session.verdicts.append(verdict)


def _judge(verdicts: Sequence[Verdict]) -> None:
    """Log passed and failed regions; raise if any failed."""
    complaints = [verdict.complaint() for verdict in verdicts]
    groups: dict[Hashable, list[Verdict]] = {}
    failed: set[Hashable] = set()
    for verdict, complaint in zip(verdicts, complaints, strict=True):
        if verdict.key is not None:
            groups.setdefault(verdict.key, []).append(verdict)
            if complaint is not None:
                failed.add(verdict.key)
    for key, group in groups.items():
        if key in failed:
            LEDGER.failed(key)
        else:
            LEDGER.passed(
                key,
                {verdict.operators for verdict in group},
                min(verdict.since for verdict in group),
                is_whole=all(verdict.is_whole for verdict in group),
            )
    for complaint in complaints:
        if complaint is not None:
            raise MismatchError(complaint)


Verify = Literal["first", "always", "full", "off"]
"""When replayed values are compared with forward's: at the first use of a region, at
every use, at every use with copies of all values (for debugging), or never."""

_WORDS = get_args(Verify)

RECOMPUTED = "recomputing {} did not give what forward computed"
_WRITTEN = "what {} returned was changed inside the region after autograd saved it"


class Check:
    """Compares the replayed saved values of one region with forward's.

    Holds three integers per saved value and does not synchronise before the end of
    backward. Skips tensors without contents (meta or fake tensors), and logs nothing
    for a region that is replayed on them.

    Args:
        key: The region's identity in the log, or None to log nothing.
    """

    def __init__(self, key: Hashable | None = None) -> None:
        self.key = key
        self._since = LEDGER.moment
        self._seen: dict[TapeValue, tuple[Geometry, Tensor]] = {}
        self._changed: list[tuple[TapeValue, Tensor]] = []
        self._compared: set[TapeValue] = set()
        self._verdict: ref[Verdict] | None = None

    def excuse(self, values: Iterable[TapeValue]) -> None:
        """Skip values that are computed from a lossy tier."""
        for value in values:
            self._seen.pop(value, None)

    def remember(self, value: TapeValue, tensor: Tensor, geometry: Geometry) -> None:
        """Take the fingerprint of a value that autograd saves, once."""
        if value not in self._seen and has_contents(tensor):
            self._seen[value] = (geometry, fingerprint(tensor))

    def watch(self, value: TapeValue, tensor: Tensor) -> None:
        """Do nothing with a new value of forward; `FullCheck` overrides this."""

    def look_again(self, value_of: Callable[[Tensor], TapeValue | None]) -> None:
        """Compare values that are alive at the end of forward with what was saved.

        A kernel unknown to PyTorch may have written to them since. Plain autograd's
        backward would see that, but a replay would not.
        """
        for value, (geometry, before) in self._seen.items():
            tensor = value.first_tensor()
            if tensor is not None and value_of(tensor) is value:
                now = fingerprint(shaped(tensor.detach(), geometry))
                self._changed.append((value, now != before))

    def compare(
        self,
        region: str,
        tape: Tape,
        replayed: Mapping[TapeValue, Tensor],
    ) -> None:
        """Compare replayed values with forward's, at the end of the running backward.

        A backward may replay a region in parts, and skip some. The region has passed
        once all values that autograd may request were compared.

        Raises:
            MismatchError: Outside of a backward, at once.
        """
        if not all(map(has_contents, replayed.values())):
            return
        operations = tape.operations
        task = current_backward()
        verdict = None if self._verdict is None else self._verdict()
        is_new = verdict is None or verdict.task != task
        if verdict is None or is_new:
            operators = signature(tape)
            verdict = Verdict(region, self.key, operators=operators, since=self._since)
            verdict.task = task
            self._verdict = ref(verdict)
        for value, differs in self._changed:
            if value in replayed and value.hold is None:
                operator = operations[value.producer].operator
                verdict.add(value.producer, _WRITTEN.format(operator), differs)
        for value, tensor in replayed.items():
            if value in self._seen and value.hold is None:
                geometry, before = self._seen[value]
                now = fingerprint(shaped(tensor, geometry))
                operator = operations[value.producer].operator
                verdict.add(value.producer, RECOMPUTED.format(operator), now != before)
        self._compared.update(replayed)
        verdict.is_whole = not any(
            value.demand > 0 and value.hold is None and value not in self._compared
            for value in self._seen
        )
        if is_new:
            hand_in(verdict)

    def observe(
        self, region: str, value: TapeValue, tensor: Tensor, operator: str
    ) -> None:
        """Do nothing with a replayed value; `FullCheck` overrides this."""


class FullCheck(Check):
    """Compares every value of a region with a copy of forward's, for debugging."""

    def __init__(self, key: Hashable | None = None) -> None:
        super().__init__(key)
        self._originals: dict[TapeValue, Tensor] = {}

    def remember(self, value: TapeValue, tensor: Tensor, geometry: Geometry) -> None:
        """Do nothing: `watch` has copied the value already."""

    def excuse(self, values: Iterable[TapeValue]) -> None:
        """Skip these values."""
        for value in values:
            self._originals.pop(value, None)

    def watch(self, value: TapeValue, tensor: Tensor) -> None:
        """Keep a copy of the value."""
        if has_contents(tensor):
            self._originals[value] = flat(tensor.detach()).clone()

    def observe(
        self, region: str, value: TapeValue, tensor: Tensor, operator: str
    ) -> None:
        """Compare a replayed value with forward's at once.

        Raises:
            MismatchError: It differs; the operator is the first that does.
        """
        original = self._originals.get(value)
        if original is None or not has_contents(tensor):
            return
        now = flat(tensor)
        if torch.equal(fingerprint(now), fingerprint(original)):
            return
        unequal = int((now != original).sum())
        raise MismatchError(
            f"region {region!r}: {operator} is the first operator that gave another "
            f"result when it was recomputed: {unequal} of {now.numel()} elements of a "
            f"{now.dtype} tensor differ. {REASONS}"
        )


def check_verify(verify: Verify) -> None:
    """Raise unless `verify` is a valid option."""
    if verify not in _WORDS:
        raise UsageError(
            f"expected verify to be one of {', '.join(map(repr, _WORDS))}, got "
            f"{verify!r}."
        )


def check_for(verify: Verify, key: Hashable) -> Check | None:
    """Return the check for the next use of a region, or None."""
    if verify == "full":
        return FullCheck()
    if verify == "always":
        return Check()
    if verify == "first" and LEDGER.needs(key):
        return Check(key)
    return None


def take_note(check: Check | None, key: Hashable, tape: Tape) -> None:
    """Log that a region ran, with its operators."""
    if check is None:
        LEDGER.ran(key, signature(tape))
    elif check.key is not None and not tape.operations:
        LEDGER.done(key, signature(tape))  # there is nothing to compare


def signature(tape: Tape) -> int:
    """Return a hash of the operators of a region.

    Includes those that are not replayed: they may write to values that are.
    """
    replayed = [id(operation.kernel) for operation in tape.operations]
    return hash((tuple(replayed), tuple(tape.unrecorded)))
