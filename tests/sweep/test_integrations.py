"""Each setting of transformers' Trainer by itself, with the callback and without."""

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.integrations.test_transformers import check_run

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SINGLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "bfloat16": {"bf16": True},
    "smoothing": {"label_smoothing_factor": 0.1},
    "noise": {"neftune_noise_alpha": 5.0},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("settings", SINGLE.values(), ids=SINGLE)
def test_each_setting_by_itself(tmp_path, settings):
    # The Trainer's own checkpointing leaves nothing to recompute.
    share = 1.0 if "gradient_checkpointing" in settings else 0.7
    check_run(tmp_path, settings, share)
