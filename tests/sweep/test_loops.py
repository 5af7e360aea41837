"""Every training loop on every small model, at several budgets."""

import pytest

from recoup.errors import InfeasibleError
from tests.support.loop_checks import check_loop
from tests.support.training_loops import KINDS, MODELS

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("share", [1.0, 0.85, 0.7])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_stays_within_its_budget_and_ends_with_the_same_bits(kind, name, share):
    try:
        check_loop(kind, name, share)
    except InfeasibleError as error:
        assert share < 1.0
        assert error.floor_bytes > error.budget_bytes  # noqa: PT017
