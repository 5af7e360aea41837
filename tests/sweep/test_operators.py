"""Every operator of PyTorch's database, on every sample, in and around regions."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from recoup import CheckpointScope
from recoup.errors import RecoupError
from tests.support.operators import (
    DEFECTS,
    Case,
    failures,
    operator_cases,
    operator_database,
    sparse_cases,
    write_summary,
)
from tests.support.transforms import transform_cases

pytestmark = pytest.mark.sweep

OPERATORS = operator_database()
DEFECTIVE = {name for name, _ in DEFECTS}
every_operator = pytest.mark.parametrize(
    "op", OPERATORS, ids=[op.formatted_name for op in OPERATORS]
)


def kept_operators(scopes: Sequence[CheckpointScope]) -> list[str]:
    return [name for scope in scopes for name in scope.kept_operators]


@pytest.fixture(scope="module")
def tally() -> Iterator[list[Case]]:
    """Collect the cases of the whole module, and report them where asked to."""
    cases: list[Case] = []
    yield cases
    if path := os.environ.get("RECOUP_SWEEP_REPORT"):
        write_summary(Path(path), "Operators", cases)


@every_operator
def test_outputs_and_gradients_are_bitwise_those_of_the_plain_run(op, tally):
    cases = list(
        operator_cases(
            op, CheckpointScope, variants=["alone"], kept_values=kept_operators
        )
    )
    tally += cases
    assert failures(cases) == []
    # Nothing else may be excluded: all these samples run plainly.
    if op.formatted_name not in DEFECTIVE:
        assert [c for c in cases if c.verdict.kind == "excluded"] == []


@every_operator
def test_so_they_are_in_a_region_inside_a_larger_one(op, tally):
    cases = list(operator_cases(op, CheckpointScope, variants=["nested"], limit=5))
    tally += cases
    assert failures(cases) == []


@every_operator
def test_so_they_are_when_the_operator_overwrites_its_input(op, tally):
    variants = ["inplace outside", "inplace inside"]
    cases = list(operator_cases(op, CheckpointScope, variants=variants))
    tally += cases
    assert failures(cases) == []


@every_operator
def test_so_they_are_when_the_result_goes_to_a_given_buffer(op, tally):
    dtypes = [torch.float64, torch.complex128]
    variants = ["out", "out resized"]
    cases = list(
        operator_cases(op, CheckpointScope, variants=variants, dtypes=dtypes, limit=5)
    )
    tally += cases
    assert failures(cases) == []


@every_operator
def test_a_result_without_gradient_is_replayed_bitwise(op, tally):
    cases = list(operator_cases(op, CheckpointScope, variants=["factor"]))
    cases += operator_cases(
        op, CheckpointScope, variants=["factor"], dtypes=[torch.int64], limit=5
    )
    tally += cases
    assert failures(cases) == []


@every_operator
def test_sparse_samples_give_bitwise_the_plain_gradients(op, tally):
    cases = list(sparse_cases(op, CheckpointScope, limit=40))
    tally += cases
    assert failures(cases) == []


@every_operator
def test_second_gradients_are_bitwise_those_of_the_plain_run(op, tally):
    dtypes = [torch.float64, torch.complex128]
    variants = ["second order"]
    cases = list(
        operator_cases(op, CheckpointScope, variants=variants, dtypes=dtypes, limit=5)
    )
    tally += cases
    assert failures(cases) == []


@every_operator
def test_forward_mode_gives_the_plain_tangents_or_our_error(op, tally):
    cases = list(
        operator_cases(
            op,
            CheckpointScope,
            variants=["forward mode"],
            dtypes=[torch.float64, torch.complex128],
            limit=5,
            refusals=(RecoupError,),
        )
    )
    tally += cases
    assert failures(cases) == []


@every_operator
def test_function_transforms_give_the_plain_answer_or_our_error(op, tally):
    cases = list(transform_cases(op, CheckpointScope, refusals=(RecoupError,)))
    tally += cases
    assert failures(cases) == []
