"""Architectures of transformers and timm at the peak of their own checkpointing.

The budget is what the model's authors' own checkpointing takes. A plan must exist,
hold, give bitwise the gradients and buffers of the plain step, and use the budget.
"""

import pytest

from tests.support.zoo import TIMM, TRANSFORMERS, Entry, result_of

pytestmark = pytest.mark.sweep

USED = 0.97
NOTHING_TO_GAIN = 0.03
"""Memory may be left over if the proven bound says that it could buy no more time than
this share of a step."""


def test_there_are_enough_architectures():
    assert len(TRANSFORMERS) >= 60
    assert len(TIMM) >= 60


@pytest.mark.filterwarnings("ignore")  # of the packages, when models are built
@pytest.mark.parametrize(
    "entry", [*TRANSFORMERS, *TIMM], ids=lambda e: f"{e.package}-{e.name}"
)
def test_the_peak_of_its_own_checkpointing_is_a_budget_that_holds(entry: Entry):
    package = pytest.importorskip(entry.package)
    if entry.package == "transformers":
        package.logging.set_verbosity_error()
    found = result_of(entry)
    assert found.floor_bytes <= found.budget_bytes, "it is feasible"
    assert 0 < found.peak_bytes <= found.budget_bytes
    assert found.differences == ()
    if found.is_tight:
        assert found.used >= USED or found.gap <= NOTHING_TO_GAIN
