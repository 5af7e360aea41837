"""Thousands of the fuzzer's programs, from a seed that is new each time."""

import os
import random
from collections.abc import Iterator

import pytest

from tests.support.fuzz import Tally, run_seeds
from tests.support.wrapping import begin_fake_group, end_fake_group

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROGRAMS = int(os.environ.get("RECOUP_PROGRAMS", "50000"))
SEED = os.environ.get("RECOUP_SEED")
BATCH = 500


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Let this process be the first of two."""
    begin_fake_group()
    yield
    end_fake_group()


def test_random_programs_are_bitwise_the_plain_programs():
    first = random.SystemRandom().randrange(10**9) if SEED is None else int(SEED)
    tally, report = Tally(), print
    for start in range(first, first + PROGRAMS, BATCH):
        stop = min(start + BATCH, first + PROGRAMS)
        run_seeds(range(start, stop), report=report, tally=tally)
        report(f"seeds {first} to {stop - 1}: {dict(tally.kinds)}")
    assert tally.failures == []
