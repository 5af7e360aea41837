"""Settings are checked at construction and immutable."""

import dataclasses
import math

import pytest

from recoup import TrainerSettings
from recoup.errors import UsageError


def test_the_settings_of_the_original_guide_have_its_values():
    settings = TrainerSettings()
    assert settings.enable_mixed_precision is False
    assert settings.initial_loss_scale == 65536.0
    assert settings.use_gradient_checkpointing is False
    assert settings.mixed_precision == "fp32"


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainerSettings().epochs = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "fp32"),
        ({"enable_mixed_precision": True}, "auto"),
        ({"enable_mixed_precision": True, "precision": "fp16"}, "fp16"),
        ({"precision": "bf16"}, "bf16"),
        ({"precision": "fp32"}, "fp32"),
    ],
)
def test_precision_follows_from_two_settings(settings, precision):
    assert TrainerSettings(**settings).mixed_precision == precision


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"epochs": True},
        {"epochs": None},
        {"epochs": 1.5},
        {"batch_size": 0},
        {"accumulation_steps": 0},
        *(
            {"use_gradient_checkpointing": True, "checkpoint_segment_size": size}
            for size in (0, -1, 2.0, True, "4")
        ),
        {"loss_scale_growth_interval": 0},
        {"initial_loss_scale": 0.0},
        {"initial_loss_scale": math.nan},
        {"initial_loss_scale": 2.0**33},
        {"initial_loss_scale": "large"},
        {"max_gradient_norm": -1.0},
        {"max_gradient_norm": 0},
        {"max_gradient_norm": math.inf},
        {"average_decay": 1.5},
        {"precision": "fp8"},
        {"schedule_each": "batch"},
        {"enable_mixed_precision": "yes"},
        {"budget": "lots"},
        {"snapshot_every_steps": 0, "snapshot_path": "run"},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused(settings):
    with pytest.raises(UsageError):
        TrainerSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_mixed_precision": True, "precision": "fp32"}, "contradicts"),
        ({"budget": "1GiB", "use_gradient_checkpointing": True}, "Give one"),
        ({"compile": "exact"}, "a budget with compile="),
        ({"budget": "1GiB", "compile": "fast"}, "expected compile=False"),
        ({"checkpoint_segment_size": 4}, "needs use_gradient_checkpointing=True"),
        ({"checkpoint_segment_size": 4, "budget": "1GiB"}, "plans by itself"),
        (
            {
                "checkpoint_segment_size": 4,
                "budget": "1GiB",
                "use_gradient_checkpointing": True,
            },
            "plans by itself",
        ),
        ({"snapshot_every_steps": 5}, "needs snapshot_path"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        TrainerSettings(**settings)
