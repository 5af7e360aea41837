"""The training of the demonstration is deterministic; its checks detect one bit."""

from dataclasses import replace

import pytest
import torch
from rich.progress import Progress

from recoup.cli import demo_training as training
from recoup.cli.demo_training import encode, read_text
from recoup.cli.gpt import Shape

TINY = training.Settings(
    Shape(layers=2, width=16, heads=2, vocabulary=60, context=8, dropout=0.5),
    batch=2,
    steps=3,
    device=torch.device("cpu"),
)


def test_both_runs_start_from_the_same_seed_and_learn():
    settings = replace(TINY, steps=30)
    with Progress(disable=True) as progress:
        first = training.train(settings, progress, label="first")
        torch.rand(7)
        second = training.train(settings, progress, label="second")
    assert training.losses_equal(first, second)
    assert training.gradients_equal(first, second)
    assert first.losses[-1] < first.losses[0]


def test_a_flipped_bit_makes_gradients_differ():
    with Progress(disable=True) as progress:
        one = training.train(TINY, progress, label="one")
    first, *others = one.gradients
    other = replace(one, gradients=(first.nextafter(first + 1), *others))
    assert training.gradients_equal(one, one)
    assert not training.gradients_equal(one, other)


def test_a_batch_predicts_the_next_character():
    text = encode(read_text())
    tokens, targets = training.draw_batch(text, TINY)
    assert tokens.shape == targets.shape == (2, 8)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("strictly", [True, False])
def test_the_settings_of_torch_are_restored(enabled, strictly):
    def state():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        )

    untouched = state()
    torch.use_deterministic_algorithms(enabled, warn_only=enabled)
    try:
        before = state()
        with training.repeatable(strictly=strictly):
            assert state() == (True, not strictly, False)
        assert state() == before
    finally:
        torch.use_deterministic_algorithms(untouched[0], warn_only=untouched[1])
