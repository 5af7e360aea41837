"""Thousands of the fuzzer's programs, from a seed that is new each time."""

import gc
import os
import random
from collections.abc import Iterator

import pytest

from tests.support.fuzz import run_seeds
from tests.support.wrapping import begin_fake_group, end_fake_group

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROGRAMS = int(os.environ.get("RECOUP_PROGRAMS", "50000"))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Let this process be the first of two."""
    begin_fake_group()
    yield
    end_fake_group()


def test_random_programs_are_bitwise_the_plain_programs():
    first = random.SystemRandom().randrange(10**9)
    failures = list[str]()
    for start in range(first, first + PROGRAMS, 100):
        stop = min(start + 100, first + PROGRAMS)
        failures += run_seeds(range(start, stop), report=print).failures
        gc.collect()  # cycles that plain PyTorch makes
    assert failures == []
