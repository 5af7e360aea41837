"""Architectures of transformers and timm at the peak of their own checkpointing.

The budget is what the model's authors' own checkpointing takes. A plan must exist,
hold, and give bitwise the gradients and buffers of the plain step. It uses 97 % of the
budget, unless it keeps all that it can: no recomputed result could be kept in addition,
by the simulator, and all that is recomputed is within a tenth of forward of what any
plan must recompute (docs/design/planning.md, "The last bytes").
"""

import pytest

from tests.support.zoo import (
    TIMM,
    TRANSFORMERS,
    Entry,
    repeated_differences,
    result_of,
)

pytestmark = pytest.mark.sweep


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
    assert result_of(entry).faults == []


HAVE_EFFECTS = {"gptj", "recurrent_gemma"}
"""Blocks of these assign attributes: none of them is called again."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", TRANSFORMERS, ids=lambda e: e.name)
def test_blocks_that_are_called_again_give_the_same_bits(entry: Entry):
    package = pytest.importorskip(entry.package)
    package.logging.set_verbosity_error()
    calls, differences = repeated_differences(entry)
    assert differences == []
    assert bool(calls) == (entry.name not in HAVE_EFFECTS)
