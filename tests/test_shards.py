"""Cases that run in several processes: each is judged, whatever another does."""

import os
import time
from collections.abc import Iterator

from tests.support.shards import Tally, run_in_shards


def work(cases: Iterator[int], tally: Tally) -> None:
    """Judge numbers; some end the process, hang, fail, or are the last of it."""
    for case in cases:
        if case == 3:
            os._exit(5)
        if case == 6:
            time.sleep(600)
        if case == 8:
            tally.failures[case] = "eight"
        tally.kinds["failed" if case == 8 else "fine"] += 1
        if case in (2, 8):
            return


def unable(cases: Iterator[int], tally: Tally) -> None:
    """End before the first case."""


def test_every_case_is_judged_whatever_becomes_of_the_process_of_another():
    tally = run_in_shards(work, range(12), 3, seconds=300, hang=3)
    assert tally.kinds == {"fine": 9, "failed": 1, "crashed": 1, "hanging": 1}
    assert tally.failures == {
        3: "3: the process ended with 5",
        6: "6: does not end",
        8: "eight",
    }


def test_no_case_begins_when_the_time_is_over():
    assert run_in_shards(work, range(3), 2, seconds=-1).kinds.total() == 0


def test_processes_that_begin_no_case_are_not_started_again():
    assert run_in_shards(unable, range(3), 2, seconds=300).kinds.total() == 0
