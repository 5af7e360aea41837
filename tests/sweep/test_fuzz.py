"""Thousands of the fuzzer's programs, from a seed that is new each time."""

import os
import random

import pytest

from tests.support.fuzz import run_in_processes

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(7200)]

PROGRAMS = int(os.environ.get("RECOUP_PROGRAMS", "50000"))
SEED = os.environ.get("RECOUP_SEED")


def test_random_programs_are_bitwise_the_plain_programs():
    first = random.SystemRandom().randrange(10**9) if SEED is None else int(SEED)
    seeds = range(first, first + PROGRAMS)
    processes = os.cpu_count() or 1
    tally = run_in_processes(seeds, processes, seconds=7000, report=print)
    assert tally.failures == {}
    assert tally.kinds.total() == PROGRAMS, "more than the time allows"
