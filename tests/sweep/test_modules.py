"""Every module of PyTorch's database, training and evaluating, inside a region."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recoup import CheckpointScope
from tests.support.modules import module_cases, module_subjects
from tests.support.operators import Case, failures, write_summary

pytestmark = pytest.mark.sweep

SUBJECTS = module_subjects()


@pytest.fixture(scope="module")
def tally() -> Iterator[list[Case]]:
    """Collect the cases of the whole module, and report them where asked to."""
    cases: list[Case] = []
    yield cases
    if path := os.environ.get("RECOUP_SWEEP_REPORT"):
        write_summary(Path(path), "Modules", cases)


@pytest.mark.parametrize("subject", SUBJECTS, ids=[s.name for s in SUBJECTS])
def test_gradients_buffers_and_random_state_are_bitwise_those_of_the_plain_run(
    subject, tally
):
    cases = list(module_cases(subject, CheckpointScope))
    tally += cases
    assert cases
    assert failures(cases) == []
