"""Random programs give bitwise the same inside regions as without them."""

import pytest
from hypothesis import Phase, event, given, settings

from recoup import ChangedTensorError, CheckpointScope
from tests.support.programs import Program, as_step, programs, repaired
from tests.support.twin import judge


# The phase that explains a failure line by line takes longer than all the others.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def check(program: Program) -> None:
    left_out, machine = repaired(program)
    verdict = judge(
        as_step(program, left_out), CheckpointScope, refusals=(ChangedTensorError,)
    )
    event(verdict.kind)
    assert not verdict.failed, verdict.detail
    # The one refusal that is allowed: a tensor changed after a region had used it.
    assert verdict.kind != "refused" or machine.written_after_use, verdict.detail


@settings(max_examples=200, phases=PHASES)
@given(program=programs)
def test_a_random_program_with_scopes_is_bitwise_the_plain_program(program):
    check(program)


@pytest.mark.sweep
@settings(max_examples=5000, phases=PHASES)
@given(program=programs)
def test_thousands_of_random_programs_are_bitwise_the_plain_programs(program):
    check(program)
