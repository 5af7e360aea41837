"""Many plans at once: the arrays say what the simulator says."""

from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.core.simulation import simulate
from recoup.planners.options import kept_around, nested
from recoup.planners.profile import Profile
from tests.support.graphs import graphs, plans


@settings(max_examples=100)
@given(st.data())
def test_bytes_at_every_moment_are_those_of_the_simulator(data):
    graph = data.draw(graphs())
    segments = data.draw(plans(graph))
    around = kept_around(graph, [(s.start, s.stop) for s in segments])
    options = [nested(graph, segment) for segment in segments]
    profile = Profile(graph, [around])
    found = simulate(graph, segments)
    assert profile.bytes_at(options).tolist() == list(found.bytes_at)
    assert profile.seconds(options) == found.extra_seconds
