"""Random programs give bitwise the same inside regions as without them."""

import pytest
import torch
from hypothesis import event, given, settings
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from recoup import CheckpointScope
from recoup.errors import ChangedTensorError
from tests.support.drawn_programs import PHASES, programs
from tests.support.programs import WRITES, Instruction, Program, as_step, repaired
from tests.support.twin import judge


def check(program: Program) -> None:
    left_out, machine = repaired(program)
    verdict = judge(
        as_step(program, left_out), CheckpointScope, refusals=(ChangedTensorError,)
    )
    event(verdict.kind)
    assert not verdict.failed, verdict.detail
    # The one refusal that is allowed: a tensor changed after a region had used it.
    assert verdict.kind != "refused" or machine.written_after_use, verdict.detail


def copying() -> saved_tensors_hooks:
    """Hooks that keep a copy of what is saved, as moving it elsewhere would."""
    return saved_tensors_hooks(copied, lambda tensor: tensor)


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, on which the order of a sum may depend."""
    storage = tensor.untyped_storage().clone()
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *place)


def check_hooked(program: Program) -> None:
    left_out, machine = repaired(program, around=copying)
    verdict = judge(
        as_step(program, left_out, around=copying),
        CheckpointScope,
        refusals=(ChangedTensorError,),
    )
    event(verdict.kind)
    assert not verdict.failed, verdict.detail
    # Copies survive every write, and regions do not: any write is a reason.
    written = any(
        line.name in WRITES and position not in left_out
        for position, line in enumerate(machine.program.lines)
    )
    assert verdict.kind != "refused" or written, verdict.detail


def forgetful(*_: object, **__: object) -> saved_tensors_hooks:
    """Make a region that gives back what was saved with one bit in error."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor + 1e-15)


def test_a_region_that_gives_back_something_else_is_found():
    lines = (Instruction("open", 0, 0), Instruction("product", 4, 5))
    verdict = judge(as_step(Program(lines, ((0,),)), frozenset()), forgetful)
    assert verdict.kind == "wrong"


@settings(max_examples=200, phases=PHASES)
@given(program=programs)
def test_a_random_program_with_scopes_is_bitwise_the_plain_program(program):
    check(program)


@settings(max_examples=60, phases=PHASES)
@given(program=programs)
def test_a_random_program_under_other_hooks_is_bitwise_the_plain_program(program):
    check_hooked(program)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", [check, check_hooked])
@settings(max_examples=5000, phases=PHASES)
@given(program=programs)
def test_thousands_of_random_programs_are_bitwise_the_plain_programs(how, program):
    how(program)
