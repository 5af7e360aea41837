"""A byte budget for a torch loop: measure one step, choose slots and tape together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recoup.backend.state.snapshots import buffers_restored
from recoup.loops.state_trees import flatten
from recoup.loops.steps import Step
from recoup.loops.torch.captures import Captures, captured_by
from recoup.loops.torch.step_tape import record
from recoup.measurement.tracing.saved import SavedBytes
from recoup.schedules.revolve import Chunked
from recoup.schedules.slot_budget import fit_budget


def fit_torch_budget(
    step: Step,
    state: Any,
    steps: int,
    budget_bytes: int,
    captures: Sequence[Tensor] = (),
) -> Chunked:
    """Return the schedule for a budget, after running the first step once on a tape.

    What autograd keeps for it is counted by unique storage, captured tensors left out;
    the state it begins with counts, because the next step's tape keeps it too.
    """
    leaves, structure = flatten(state)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    state_bytes = sum(leaf.nbytes for leaf in tensors)
    if steps == 0:
        return Chunked(0, slots=1, chunk=1)
    seen = Captures([*captures, *captured_by(step, leaves)])
    devices = [leaf.device for leaf in tensors if leaf.device.type != "cpu"]
    with (
        torch.random.fork_rng(devices=devices),
        buffers_restored(step.function),
        SavedBytes(*seen.sources) as saved,
    ):
        tape = record(step, leaves, structure, (0, 1), seen, in_place=True)
    tape_bytes = max(saved.bytes, state_bytes)
    del tape
    return fit_budget(
        steps, budget_bytes, state_bytes=state_bytes, tape_bytes=tape_bytes
    )
