"""Ways for models of one step: within the budget if any are, and monotone in it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.api import together
from recoup.api.together import Part, Way, choose_together, peak_of

ways = st.builds(
    lambda held, more, less, seconds: Way((), held + more, held + less, held, seconds),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 9).map(float),
)
parts = st.lists(
    st.builds(
        lambda ways, left: Part(tuple(sorted(ways, key=lambda w: w.seconds)), left),
        st.lists(ways, min_size=1, max_size=3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
).map(lambda found: dict(enumerate(found)))


def seconds(chosen):
    return sum(way.seconds for way in chosen.values())


@given(parts, st.integers(0, 60), st.integers(0, 20))
def test_the_fastest_that_fits_is_chosen_and_more_budget_is_never_slower(
    parts, budget_bytes, more
):
    row = list(parts)
    chosen = choose_together([row], parts, budget_bytes)
    every = [
        dict(zip(parts, each, strict=True))
        for each in itertools.product(*(part.ways for part in parts.values()))
    ]
    fitting = [each for each in every if peak_of(row, parts, each) <= budget_bytes]
    if fitting:
        assert peak_of(row, parts, chosen) <= budget_bytes
        assert seconds(chosen) == min(map(seconds, fitting))
        larger = choose_together([row], parts, budget_bytes + more)
        assert seconds(larger) <= seconds(chosen)
    else:
        assert peak_of(row, parts, chosen) == min(
            peak_of(row, parts, each) for each in every
        )


def test_many_models_go_down_until_they_fit(monkeypatch):
    monkeypatch.setattr(together, "_FEW", 0)
    part = Part((Way((), 20, 20, 10, 1.0), Way((), 20, 20, 1, 2.0)), 0)
    parts, row = dict.fromkeys(range(40), part), list(range(40))
    times = []
    for budget_bytes in range(410, 50, -30):
        chosen = choose_together([row], parts, budget_bytes)
        assert peak_of(row, parts, chosen) <= budget_bytes
        # One of those that are too fast would be enough to be over the budget.
        assert peak_of(row, parts, chosen) > budget_bytes - 9
        times.append(seconds(chosen))
    assert times == sorted(times)
    assert peak_of(row, parts, choose_together([row], parts, 0)) == 59


@pytest.mark.parametrize("times", [1, 3])
def test_a_model_that_is_called_again_holds_again_and_leaves_once(times):
    way = Way((), 5, 7, 4, 1.0)
    left = 2 if times > 1 else 0
    row, parts = [0] * times, {0: Part((way,), 2)}
    most = max(4 * n + max(5, 7 + (left if n < times - 1 else 0)) for n in range(times))
    assert peak_of(row, parts, {0: way}) == most
