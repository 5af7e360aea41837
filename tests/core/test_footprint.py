"""Footprints: what is known of innermost segments changes nothing."""

from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.core.footprint import Innermost, footprint
from tests.support.graphs import graphs, plans


@settings(max_examples=150, deadline=None)
@given(data=st.data(), graph=graphs(most=9))
def test_segments_cost_the_same_with_innermost_ones_that_are_known(data, graph):
    known: Innermost = {}
    for _ in range(3):
        for segment in data.draw(plans(graph)):
            alone = footprint(graph, segment)
            assert footprint(graph, segment, known) == alone
            assert footprint(graph, segment, known) == alone
