"""Verdicts: what checks found, read from the device at the end of a backward."""

import threading
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

from torch import Tensor

from recoup.backend.autograd.saved_tensors import at_end_of_backward, current_backward
from recoup.backend.compiler.recognition import leave_uncompiled
from recoup.engine.verification.verification_log import LEDGER
from recoup.errors import MismatchError

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
        key: Identifies the region in the log; None: nothing is logged.
        operators: The signature of its operators.
        since: The ledger's moment at which the region was run.

    Attributes:
        task: The backward that it is for.
        is_whole: All values that could have been replayed were compared.
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
        """Add what to say of a value made at a place on the tape, if it differs."""
        self._flags.append((place, complaint, differs))

    def complaint(self) -> str | None:
        """Return what to say if any value differed; waits for the device."""
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

    Runs of a region that share a key (the layers of a loop) are verified as a whole:
    one that passes must not speak for another that does not.
    """

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []

    @leave_uncompiled
    def __call__(self) -> None:
        _judge(self.verdicts)


# Weak: autograd holds the session. A backward that raises drops it unjudged.
_SESSIONS: "WeakValueDictionary[int, _Session]" = WeakValueDictionary()
_LOCK = threading.Lock()


def hand_in(verdict: Verdict) -> None:
    """Judge a verdict with all others of the running backward, at its end.

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
    """Log the regions that passed as a whole; raise if any did not."""
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
