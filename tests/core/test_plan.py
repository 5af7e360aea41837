"""Plans as data: they round-trip through JSON; a bad file raises one clear error."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup import Action, Plan
from recoup.core.plan import Held, Place, Span
from recoup.errors import PlanError

# Printable text only: other text is refused, see below.
printable = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
places = st.builds(
    Place,
    st.text(printable, max_size=8),
    st.integers(0, 9),
    st.sampled_from([True, False]),
)
held = st.builds(
    Held,
    st.text(printable, min_size=1, max_size=8),
    st.integers(0, 99),
    st.integers(0, 1 << 40),
    st.sampled_from(Action),
)
made = st.tuples(st.text(printable, max_size=8), st.integers(1, 99))
spans = st.recursive(
    st.builds(
        Span, places, places, st.tuples(held), st.lists(made, max_size=2).map(tuple)
    ),
    lambda inner: st.builds(
        Span,
        places,
        places,
        st.just(()),
        st.just(()),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=6,
)
plans = st.builds(
    Plan,
    st.lists(spans, max_size=4).map(tuple),
    st.text(printable, max_size=16),
    st.text(printable, max_size=16),
    st.integers(0, 1 << 50),
    st.integers(0, 1 << 50),
    st.floats(0, 1e6),
)


@given(plans)
def test_a_plan_survives_json(plan):
    assert Plan.from_json(plan.to_json()) == plan


def a_plan() -> Plan:
    keeps = Held("aten.mm.default", 2, 64, Action.KEEP)
    span = Span(Place("h.0", 0, True), Place("h.0", 0, False), (keeps,))
    return Plan((span,), "step", "model", 8, 7, 0.5)


def changed(change) -> str:
    data = json.loads(a_plan().to_json())
    change(data)
    return json.dumps(data)


def held_in(data) -> dict:
    return data["spans"][0]["held"][0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a plan"),
        ("[]", "expected a JSON object, got a list"),
        ("[" * 100_000, "not a plan"),
        ("{}", "expected 'recoup plan' of version 2, got None"),
        ('{"format": "recoup plan"', "not a plan"),
        (changed(lambda d: d.update(format="pickle")), "not a plan"),
        (changed(lambda d: d.update(version=1)), "of version 2, got .* of version 1"),
        (changed(lambda d: d.update(version=2.0)), "got .* of version 2.0"),
        (changed(lambda d: d.update(more=1)), "unknown field, 'more'"),
        (changed(lambda d: d.update(spans=7)), "spans is 7"),
        (changed(lambda d: d.update(passes=[{}], order=[1])), "the order of passes"),
        (changed(lambda d: d.update(roots=[])), "the calls of a pass"),
        (changed(lambda d: d.update(budget_bytes=-1)), "budget_bytes is -1"),
        (changed(lambda d: d.update(seconds=float("nan"))), "seconds is nan"),
        (changed(lambda d: d.update(seconds=10**400)), "seconds is 1000"),
        (changed(lambda d: d.update(seconds=float("inf"))), "seconds is inf"),
        (None, "not a plan"),
        (changed(lambda d: d["spans"][0].pop("stop")), "spans lacks 'stop'"),
        (changed(lambda d: d["spans"][0]["start"].update(call=-1)), "call is -1"),
        (changed(lambda d: d["spans"][0]["stop"].update(entering=0)), "entering is 0"),
        (changed(lambda d: held_in(d).update(action="run")), "action is 'run'"),
        (changed(lambda d: d["spans"][0].update(made=[["mm", 0]])), "a count"),
        (changed(lambda d: d["spans"][0].update(made=[["mm"]])), "made is"),
        (changed(lambda d: d["spans"][0].update(inner=[7])), "inner is 7"),
    ],
)
def test_a_bad_file_is_one_clear_error(text, says):
    with pytest.raises(PlanError, match=says):
        Plan.from_json(text)


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "a\nb", "\u202e", "\x9b2J"])
@pytest.mark.parametrize(
    "change",
    [
        lambda data, name: data.update(signature=name),
        lambda data, name: data.update(model=name),
        lambda data, name: data["spans"][0]["start"].update(module=name),
        lambda data, name: held_in(data).update(operator=name),
        lambda data, name: data["spans"][0].update(made=[[name, 1]]),
    ],
)
def test_unprintable_names_are_refused_with_a_printable_message(change, name):
    with pytest.raises(PlanError, match="is damaged") as caught:
        Plan.from_json(changed(lambda data: change(data, name)))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("amount", [-1, (1 << 63) + 1, 10**400, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda data, amount: data.update(budget_bytes=amount),
        lambda data, amount: data.update(peak_bytes=amount),
        lambda data, amount: data.update(model_calls=amount),
        lambda data, amount: data.update(seconds=amount),
        lambda data, amount: data["spans"][0]["stop"].update(call=amount),
        lambda data, amount: held_in(data).update(nth=amount),
        lambda data, amount: held_in(data).update(bytes=amount),
        lambda data, amount: data["spans"][0].update(made=[["mm", amount]]),
    ],
)
def test_impossible_amounts_are_refused(change, amount):
    with pytest.raises(PlanError, match="is damaged"):
        Plan.from_json(changed(lambda data: change(data, amount)))


def test_the_nesting_depth_of_a_file_is_limited():
    data = json.loads(a_plan().to_json())
    span = data["spans"][0]
    for _ in range(80):
        span = {**span, "inner": [span]}
    data["spans"] = [span]
    with pytest.raises(PlanError, match="nested at most 64 deep, got more"):
        Plan.from_json(json.dumps(data))
