"""The exact figures of the original guide, and the actual ones."""

import pytest
import torch

from recoup import checkpointed_loop
from recoup.loops import (
    compute_checkpoint_positions,
    estimate_checkpoint_savings,
    get_memory_savings,
    should_checkpoint,
)

SIX = (
    "without_checkpointing",
    "with_checkpointing",
    "savings_percent",
    "savings_ratio",
    "num_checkpoints",
    "recomputation_factor",
)


@pytest.mark.parametrize(
    ("steps", "checkpoints", "percent", "peak_percent"),
    [
        (100, 10, "90.0", "79.0"),
        (500, 22, "95.6", "91.0"),
        (1000, 31, "96.9", "93.6"),
        (5000, 70, "98.6", "97.2"),
    ],
)
def test_the_guides_table(steps, checkpoints, percent, peak_percent):
    for stats in (get_memory_savings(steps), estimate_checkpoint_savings(steps)):
        assert stats["num_checkpoints"] == checkpoints
        assert f"{stats['savings_percent']:.1f}" == percent
        assert f"{stats['peak_savings_percent']:.1f}" == peak_percent


def test_the_guides_six_keys():
    stats = get_memory_savings(1000, 10)
    assert [stats[key] for key in SIX] == [1000, 10, 99.0, 0.99, 10, 100.0]
    assert f"{get_memory_savings(1000)['recomputation_factor']:.1f}" == "32.3"


def test_fewer_checkpoints_than_the_root_hold_more():
    peaks = [get_memory_savings(1000, k)["peak_with_checkpointing"] for k in (10, 31)]
    assert peaks == [102, 64]
    assert get_memory_savings(1000, 100)["peak_with_checkpointing"] == 111


@pytest.mark.parametrize("steps", [0, 1, 2, 10, 100])
@pytest.mark.parametrize("checkpoints", [None, 0, 1, 5, 200])
def test_the_stated_evaluations_equal_the_counted_ones(steps, checkpoints):
    calls = 0

    def step(state):
        nonlocal calls
        calls += 1
        return state * 0.5

    begin = torch.ones(1, requires_grad=True)
    final, _ = checkpointed_loop(step, begin, steps, checkpoints)
    final.backward()
    stats = get_memory_savings(steps, checkpoints)
    assert calls == steps + stats["extra_forward_steps"]


@pytest.mark.parametrize(("steps", "advised"), [(0, False), (1, False), (2, True)])
def test_should_checkpoint_compares_the_ratio(steps, advised):
    assert should_checkpoint(steps) is advised
    assert should_checkpoint(seq_length=1000, threshold=0.97) is False
    assert should_checkpoint(1000, 0.96) is True


def test_the_rules_of_thumb_are_in_states():
    rows = [get_memory_savings(1000, k) for k in (31, 100, 10)]
    assert [row["extra_forward_steps"] for row in rows] == [968, 990, 909]
    assert len(compute_checkpoint_positions(1000, 100)) == 100
