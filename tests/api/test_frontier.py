"""A frontier goes from the floor to the plain run, and never gets slower on the way."""

from itertools import pairwise

import pytest

from recoup.api.frontier import floor_bytes, frontier
from recoup.core.errors import UsageError
from recoup.core.simulation import simulate
from tests.support.findings import small_graph


def test_more_memory_is_less_time():
    graph, done = small_graph(), []
    found = frontier(graph, 5, progress=done.append)
    assert done == [1, 2, 3, 4, 5]
    for one, other in pairwise(found):
        assert one.simulation.peak_bytes < other.simulation.peak_bytes
        assert one.simulation.seconds > other.simulation.seconds
    assert found[-1].simulation == simulate(graph, ())
    assert found[0].simulation.peak_bytes <= floor_bytes(graph)


def test_one_point_is_no_frontier():
    with pytest.raises(UsageError, match="at least two points"):
        frontier(small_graph(), 1)
