"""The kernel that sums footprints, versus a reference machine that runs the plan."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.core.footprint import footprint
from recoup.core.memory_use import MemoryUse, Spans
from recoup.planners.interval_options import kept_around
from tests.support.graphs import graphs, plans
from tests.support.interpreter import Machine


@settings(max_examples=100)
@given(st.data())
def test_footprints_of_intervals_sum_to_the_bytes_of_the_reference_machine(data):
    graph = data.draw(graphs())
    segments = data.draw(plans(graph))
    around = kept_around(graph, [(s.start, s.stop) for s in segments])
    footprints = [footprint(graph, segment) for segment in segments]
    found = MemoryUse(graph, [around]).bytes_at(footprints)
    assert found.tolist() == Machine(graph, segments).run()


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=5))
def test_spans_are_summed_moment_by_moment(rows):
    """A span that ends before it begins counts as 0; spans end with the step."""
    spans = Spans(*np.array([(*row, 0) for row in rows], np.int64).reshape(-1, 4).T)
    expected = [sum(n for n, a, b in rows if a <= m <= b) for m in range(10)]
    assert spans.at_all(10).tolist() == expected
    assert spans.at_all(7).tolist() == expected[:7]
    assert spans.at(np.arange(10)).tolist() == expected
