"""Programs that write to what autograd saved: plain PyTorch refuses their backwards.

With recoup such a program is refused too, or its gradients are those of what forward
computed. These are known: in the reference run autograd saves copies, so that no write
reaches them.
"""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recoup.errors import ChangedTensorError
from tests.support.programs import CHANGES, Machine, Program, as_step
from tests.support.twin import (
    Observed,
    Region,
    Verdict,
    differences,
    last_line,
    observe,
    plain,
)

REFUSALS = ("modified by an inplace operation", "modified inplace")
"""What autograd says of a tensor that it saved itself, outside of all regions."""


def examine_refused_writes(
    program: Program, left_out: frozenset[int], region: Region
) -> Verdict | None:
    """Run a program with the writes that plain PyTorch refuses; judge its gradients.

    Args:
        program: The program.
        left_out: The lines that the plain run leaves out.
        region: Makes the regions under test.

    Returns:
        The verdict, or None if there are no such writes, or no reference run of them.
    """
    writes = {place for place in left_out if program.lines[place].name in CHANGES}
    found = _reference(program, left_out - writes) if writes else None
    if found is None:
        return None
    left_out, expected = found
    try:
        actual = observe(as_step(program, left_out), region, seed=0)
    except ChangedTensorError as error:
        return Verdict("refused", last_line(error))
    except Exception as error:  # noqa: BLE001
        # Whatever it is: that is the finding.
        is_refusal = any(words in str(error) for words in REFUSALS)
        return Verdict("refused" if is_refusal else "crashed", last_line(error))
    wrong = differences(expected, actual)
    return Verdict("wrong", "; ".join(wrong)) if wrong else Verdict("equal")


def _reference(
    program: Program, left_out: frozenset[int]
) -> tuple[frozenset[int], Observed] | None:
    """Run a program plainly with copies of what autograd saves."""
    while True:
        machine = Machine(program, plain, left_out)
        try:
            with saved_tensors_hooks(copied, lambda tensor: tensor):
                expected = observe(lambda _, run=machine.run: run(), plain, seed=0)
        except RuntimeError:
            return None
        if not machine.refused:
            return left_out, expected
        left_out |= machine.refused


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor with its layout: kernels may round otherwise for another one."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor.detach().clone()
    storage = tensor.untyped_storage().clone()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *place)
