"""Tiny models of every family in `transformers`, each whole in one region."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recoup import CheckpointScope
from tests.support.architectures import ARCHITECTURES, architecture_cases
from tests.support.operators import Case, failures, write_summary

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def tally() -> Iterator[list[Case]]:
    """Collect the cases of the whole module, and report them where asked to."""
    pytest.importorskip("transformers").logging.set_verbosity_error()
    cases: list[Case] = []
    yield cases
    if path := os.environ.get("RECOUP_SWEEP_REPORT"):
        write_summary(Path(path), "Architectures", cases)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_a_whole_model_trains_bitwise_as_the_plain_one(architecture, tally):
    cases = list(architecture_cases(architecture, CheckpointScope))
    tally += cases
    assert failures(cases) == []
    # Every one of them runs plainly: an exclusion would be a mistake in its settings.
    assert [str(c) for c in cases if c.verdict.kind == "excluded"] == []
