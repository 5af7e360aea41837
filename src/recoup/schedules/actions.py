"""Actions: the five things a loop schedule may ask for, as plain integers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advance:
    """Run the steps from `start` up to `stop` without a tape.

    The current state is the one before `start`; afterwards it is the one before `stop`.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keep the current state, the one before `step`, in `slot`.

    `tier` is 0 for the fastest place to keep it, 1 for the next, and so on.
    """

    step: int
    slot: int
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Restore:
    """Make the state in `slot`, the one before `step`, the current one."""

    step: int
    slot: int


@dataclass(frozen=True, slots=True)
class Reverse:
    """Run the steps from `start` up to `stop` with a tape and pull the cotangent back.

    The current state is the one before `start`. Afterwards there is no current state,
    and the cotangent is that of the state before `start`.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Free:
    """Forget the state in `slot`."""

    slot: int


Action = Advance | Snapshot | Restore | Reverse | Free
