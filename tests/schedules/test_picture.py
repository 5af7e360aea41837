"""The drawing shows every step once on a tape, at its place."""

from hypothesis import given
from hypothesis import strategies as st

from recoup.schedules import Even, Revolve, draw, interpret


def test_the_square_root_rule():
    picture = draw(Even(12, 3).actions(), 12)
    assert picture == "o>>o>>o>>###\n|  |  ###\n|  ###\n###"


@given(st.integers(1, 40), st.integers(1, 8))
def test_every_step_is_taped_once_and_evaluated_as_counted(steps, slots):
    actions = list(Revolve(steps, slots=slots).actions())
    lines = draw(actions, steps).split("\n")
    marks = "".join(lines)
    assert marks.count("#") == steps
    assert len(lines) == steps
    counts = interpret(actions, steps)
    # A kept state hides the mark of the step that is run from it.
    assert marks.count(">") <= counts.advances <= marks.count(">") + marks.count("o")
