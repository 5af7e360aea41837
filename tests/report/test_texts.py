"""Findings in words."""

from dataclasses import replace

import pytest

from recoup.core.graph import Graph
from recoup.report.composition import compose
from recoup.report.texts import verdict


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1.5, "a step is predicted 50.0% slower."),
        (1.0, "a step is predicted as fast as plain."),
        (0.8, "a step is predicted 20.0% faster."),  # compiled blocks
    ],
)
def test_a_verdict_compares_the_step_with_the_plain_one(seconds, words):
    found = compose(Graph((), 0, (), (), (), (), ()))
    plan = replace(found.plan, name="plan", seconds=seconds)
    found = replace(found, plans=(plan,), chosen=0, plain_seconds=1.0, budget_bytes=8)
    assert verdict(found).endswith(words)
