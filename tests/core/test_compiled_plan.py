"""Compiled plans as files."""

import json

import pytest

from recoup.core.compiled_plan import BlockPartition, CompiledPlan
from recoup.errors import PlanError


def plan() -> CompiledPlan:
    block = BlockPartition("layers.0", 0, "digest", ("mm",), 8, 8)
    return CompiledPlan("exact", (block,))


def test_a_compiled_plan_round_trips_through_a_file():
    assert CompiledPlan.from_json(plan().to_json()) == plan()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"executor": "fast"}, "expected an executor of .*, got 'fast'"),
        ({"blocks": 3}, "blocks is 3"),
        ({"more": 1}, "has an unknown field, 'more'"),
    ],
)
def test_a_bad_file_is_one_clear_error(change, says):
    data = {**json.loads(plan().to_json()), **change}
    with pytest.raises(PlanError, match=says):
        CompiledPlan.from_json(json.dumps(data))
