"""Loops x models: each trains within its budget or warns, with the bits of its twin.

A slice; tests/sweep/test_loops.py runs all of them.
"""

import pytest

from tests.support.loop_checks import check_loop

CELLS = [
    ("plain", "mlp", 0.8),
    ("accumulation", "mlp", 0.8),
    ("autocast", "transformer with dropout", 0.8),
    ("GradScaler", "mlp", 0.8),
    ("clip", "conv and BatchNorm", 0.8),
    ("EMA", "mlp", 0.8),
    ("GAN", "mlp", 0.85),
    ("contrastive", "transformer with dropout", 0.8),
    ("distillation", "conv and BatchNorm", 0.85),
    ("alternating optimizers", "mlp", 0.85),
    ("last smaller batch", "transformer with dropout", 0.8),
    ("growing sequence", "mlp", 0.8),
    # Plans whose last region ends with the model.
    ("growing sequence", "transformer with dropout", 0.7),
]


@pytest.mark.parametrize(("kind", "name", "share"), CELLS)
def test_a_loop_stays_within_its_budget_and_ends_with_the_same_bits(kind, name, share):
    check_loop(kind, name, share)
