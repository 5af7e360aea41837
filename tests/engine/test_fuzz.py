"""A fixed slice of the fuzzer's programs, and the fuzzer shown what is wrong."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.autograd.graph import saved_tensors_hooks

from recoup import CheckpointScope
from recoup.engine.recording.active import Call, begin
from recoup.engine.recording.region_options import Options
from tests.support.fuzz import (
    Case,
    _keeps_itself,
    case_of,
    examine,
    reduced,
    run_in_processes,
    run_seeds,
)
from tests.support.programs import (
    BLOCKS,
    CHANGES,
    Instruction,
    Program,
    as_step,
    repaired,
)
from tests.support.refused_writes import examine_refused_writes
from tests.support.wrapping import COLLECTIVES, begin_fake_group, end_fake_group

PROGRAMS = 300


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Let this process be the first of two."""
    begin_fake_group()
    yield
    end_fake_group()


# An interrupt in a destructor is ignored by Python, and reported.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_slice_of_the_programs_is_bitwise_the_plain_programs():
    tally = run_seeds(range(PROGRAMS))
    assert tally.failures == {}
    # A program that the plain twin cannot run, or that is refused, shows nothing.
    assert tally.kinds["equal"] > 0.9 * PROGRAMS


def test_the_slice_has_everything_in_it():
    cases = [case_of(seed) for seed in range(PROGRAMS)]
    names = {line.name for case in cases for line in case.program.lines}
    assert names >= {*BLOCKS, *CHANGES, *COLLECTIVES, "raise", "keep", "gradient"}
    assert sum(case.interrupt is not None for case in cases) > 20
    assert sum(case.program.tiers for case in cases) > 100
    assert sum(case.program.steps > 1 for case in cases) > 50


def test_a_seed_always_makes_the_same_program():
    assert case_of(5) == case_of(5) != case_of(6)


def program(*lines: tuple[str, int, int]) -> Case:
    return Case(Program(tuple(Instruction(*line) for line in lines), ((0,),)))


LINES = program(("sin", 3, 0), ("open", 0, 0), ("product", 4, 5), ("tanh", 0, 0))


def inexact(*_: object, **__: object) -> saved_tensors_hooks:
    """Make a region that gives back what was saved with one bit in error."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor + 1e-15)


def left_open(name: str, **_: Any) -> contextlib.AbstractContextManager[None]:
    """Make a region that nobody closes."""
    begin(Call(), name, Options(), name)
    return contextlib.nullcontext()


def test_a_wrong_gradient_is_found_and_its_program_reduced():
    verdict = examine(LINES, inexact)
    assert verdict.kind == "wrong"
    assert "elements differ" in verdict.detail
    small = reduced(LINES, lambda case: examine(case, inexact).failed)
    assert [line.name for line in small.program.lines] == ["open", "product"]
    assert "open(0, 0)" in str(small)


def test_a_region_left_open_is_found():
    verdict = examine(LINES, left_open)
    assert verdict.kind == "wrong"
    assert "dispatch modes still active" in verdict.detail
    # The next program begins with nothing left.
    assert examine(LINES).kind == "equal"


def test_a_region_left_alive_is_found():
    kept = []

    def keeping(name: str, **options: Any) -> CheckpointScope:
        scope = CheckpointScope(name, **options)
        kept.append(scope)
        return scope

    def holding(name: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
        @contextlib.contextmanager
        def region() -> Iterator[None]:
            with keeping(name, **options) as scope:
                kept.extend(node.region for node in scope.nodes)
                yield

        return region()

    verdict = examine(LINES, holding)
    assert verdict.kind == "wrong"
    assert "alive: {'Region': 1" in verdict.detail


def test_what_plain_pytorch_keeps_alive_itself_is_no_failure():
    # A tensor is written to with what was computed from it and depends on a view of it
    # that autograd saved. The backward does not come by there.
    case = program(
        *[("bernoulli", 6, 5), ("product", 4, 1), ("rerun", 5, 2), ("where", 8, 4)],
        *[("close", 0, 0), ("assign_diagonal", 3, 0), ("sigmoid", 8, 3)],
    )
    case = replace(case, program=replace(case.program, backwards=((0, 10, 6),)))
    left_out, _ = repaired(case.program)
    assert not left_out
    assert _keeps_itself(as_step(case.program, left_out))
    assert examine(case).kind == "equal"
    assert not _keeps_itself(as_step(LINES.program, frozenset()))


def test_lines_that_plain_pytorch_refuses_in_the_second_step_are_left_out():
    # Without the line that is refused in the first run, others name other tensors.
    case = program(
        *[("clone", 9, 6), ("zero_", 2, 1), ("dropout", 7, 0), ("transpose", 0, 1)],
        *[("transpose", 5, 0), ("assign_diagonal", 6, 9), ("backward", 9, 0)],
        ("mul_", 0, 5),
    )
    two = replace(case.program, backwards=((1, 7),), steps=2)
    left_out, machine = repaired(two)
    assert left_out
    assert not machine.refused
    assert examine(replace(case, program=two)).kind == "equal"


REFUSED = program(("open", 0, 0), ("tanh", 5, 0), ("mul_", 0, 1))


def served_as_it_is_now(*_: object, **__: object) -> saved_tensors_hooks:
    """Make a region that gives back what a saved tensor has become since."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def test_a_write_to_a_saved_tensor_that_goes_unnoticed_is_found():
    left_out, _ = repaired(REFUSED.program)
    assert left_out, "plain PyTorch refuses the write"
    assert examine(REFUSED).kind == "equal"
    verdict = examine(REFUSED, served_as_it_is_now)
    assert verdict.kind == "wrong"
    assert verdict.detail.startswith("with writes to saved tensors: ")


@pytest.mark.filterwarnings("ignore:c10d")
def test_the_slice_writes_to_saved_tensors():
    cases = [case_of(seed).program for seed in range(PROGRAMS)]
    judged = [
        examine_refused_writes(case, repaired(case)[0], CheckpointScope)
        for case in cases
    ]
    kinds = [verdict.kind for verdict in judged if verdict is not None]
    assert kinds.count("equal") > 5
    assert kinds.count("refused") > 5


def test_a_failure_names_its_seed():
    wrong = (n for n in range(100) if examine(case_of(n), inexact).failed)
    seed = next(wrong)
    failures = run_seeds([seed], inexact, most=10).failures
    assert list(failures) == [seed]
    assert failures[seed].startswith(f"seed {seed}: ")


def fatal(*_: object, **__: object) -> saved_tensors_hooks:
    """End the process."""
    os._exit(7)


def test_processes_find_what_one_finds():
    tally = run_in_processes(range(2, 6), 2, seconds=600, region=inexact)
    assert tally == run_seeds(range(2, 6), inexact)


def test_a_seed_that_ends_its_process_is_named_and_the_others_run():
    tally = run_in_processes(range(2, 6), 2, seconds=600, region=fatal)
    opens = [n for n in range(2, 6) if examine(case_of(n), inexact).failed]
    assert tally.kinds.total() == 4
    assert tally.kinds["crashed"] == len(tally.failures) > 0
    assert tally.failures.keys() >= set(opens)
    assert all("ended with 7" in text for text in tally.failures.values())
