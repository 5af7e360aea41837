"""Choose the program that recomputes a value, if that needs no search."""

from typing import Protocol

from recoup.engine.lifetime.operations import TapeOperation
from recoup.engine.lifetime.values import TapeValue
from recoup.engine.replay.program import Live, Program
from recoup.engine.replay.program_parts import Part
from recoup.engine.replay.replay_cache import ReplayCache, wanted_of


class RecordedTape(Protocol):
    """A region's operations, and the values that autograd saved in it."""

    operations: list[TapeOperation]
    saved: dict[TapeValue, None]


def whole_program(
    recall: ReplayCache, program: Program | None, value: TapeValue
) -> Program | None:
    """Return a program with one end, if a value needs all of it and none of it ran."""
    if (
        program is None
        or value.hold is not None
        or value.producer != len(program.operations) - 1
        or not recall.is_untouched
    ):
        return None
    # Autograd may have freed some of the wanted values by now.
    for each in program.wanted:
        if each.demand <= 0:
            return None
    return program


def program_at_once(
    recall: ReplayCache, program: Program | None, tape: RecordedTape
) -> Program | None:
    """Return the program that recomputes everything, unless some of it was run."""
    if not recall.is_untouched:
        return None
    wanted = wanted_of(tape.saved)
    if program is not None and len(wanted) == len(program.wanted):
        return program
    return Program(tape.operations, wanted)


def program_for(
    recall: ReplayCache, program: Program | None, value: TapeValue
) -> Program | None:
    """Return a program that recomputes a value, of a whole region or of a part.

    It frees held values, such as those fetched from a tier, at their last use in it.
    """
    if program is None or program.has_one_end:
        return whole_program(recall, program, value)
    found = None if value.hold is not None else program.part_at(value.producer)
    if found is None or not recall.begin(found[0]):
        return None
    places, made = found
    among = {place: program.operations[place].reads() for place in places}
    return Program(program.operations, [v for v in made if v.demand > 0], among)


def part_for(
    recall: ReplayCache, program: Program, value: TapeValue
) -> tuple[Part, Live] | None:
    """Return a program's part that computes a value, and the tensors to start from."""
    if value.hold is not None:
        return None
    parts = program.parts
    part = parts.alone.get(value.producer)
    if part is None:
        if program.has_writes:
            return None
        return recall.begin_shared(parts, value.producer)
    for each in part[1]:
        if each.demand <= 0:
            return None
    return (part, {}) if recall.begin(part[0]) else None


Choice = tuple[Program, Part | None, Live | None]
"""A program, the part to run if not all of it, and the tensors to start from."""


def choice_for(
    recall: ReplayCache,
    program: Program | None,
    value: TapeValue,
    tape: RecordedTape,
    *,
    at_once: bool,
) -> Choice | None:
    """Return the choice that recomputes a value with the least host time, or None."""
    if at_once:
        whole = program_at_once(recall, program, tape)
    elif program is None or program.has_one_end:
        whole = whole_program(recall, program, value)
    else:
        found = part_for(recall, program, value)
        return None if found is None else (program, *found)
    return None if whole is None else (whole, None, None)
