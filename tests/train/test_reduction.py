"""A step in parts has the gradients of the whole for any reduction of its loss."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup import Trainer
from recoup.errors import UsageError
from recoup.train.data.reduction import reduction_of
from tests.support.training import Classifier, samples

INPUTS, TARGETS = samples(11)
INPUTS = INPUTS.double()
IGNORING = TARGETS.clone()
IGNORING[[0, 1, 2, 3, 7]] = -100
WEIGHT = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
PROBABILITIES = functional.one_hot(TARGETS, 3).double()


ROUNDING = 1e-14
"""Parts add up 11 samples in another order than the whole does, in 53 bits. Measured:
1.3e-15 of numbers up to 4.7."""


class Limited(nn.Module):
    """Runs out of memory above a number of samples."""

    def __init__(self, inner: nn.Module, most: int) -> None:
        super().__init__()
        self.inner = inner
        self.most = most

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.inner(x)


def stepped(loss_fn, *parts, most=11, **options):
    """Make one step; return its result and the parameters, which show gradients."""
    torch.manual_seed(0)
    model = Classifier(dropout=0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(Limited(model, most), optimizer, loss_fn=loss_fn, **options)
    result = trainer.step(*parts)
    return result, [p.detach() for p in model.parameters()]


def largest_difference(expected, found):
    """Return the largest difference of any parameter."""
    pairs = zip(expected, found, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def cut(*sizes, targets):
    return list(zip(INPUTS.split(sizes), targets.split(sizes), strict=True))


def summed(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="sum")


def contrasted(outputs, targets):
    """A loss that compares the samples of a batch with each other."""
    return (outputs @ outputs.T).logsumexp(1).mean() + outputs.square().mean()


LOSSES = {
    "function": (functional.cross_entropy, TARGETS),
    "ignoring": (functional.cross_entropy, IGNORING),
    "module that ignores": (nn.CrossEntropyLoss(ignore_index=1), TARGETS),
    "weighted": (nn.CrossEntropyLoss(weight=WEIGHT), TARGETS),
    "all of it": (
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        IGNORING,
    ),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHT), PROBABILITIES),
    "squares": (functional.mse_loss, PROBABILITIES),
    "a mean of one's own": (lambda o, t: (o - t).abs().mean(), PROBABILITIES),
    "a function of one's own that ignores": (
        lambda o, t: functional.cross_entropy(o.unsqueeze(-1), t.unsqueeze(-1)),
        IGNORING,
    ),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), TARGETS),
    "sum of squares": (nn.MSELoss(reduction="sum"), PROBABILITIES),
    "partial sum": (
        functools.partial(functional.cross_entropy, reduction="sum"),
        IGNORING,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_parts_have_the_gradients_of_the_whole(name, caplog):
    loss_fn, targets = LOSSES[name]
    whole, expected = stepped(loss_fn, (INPUTS, targets))
    for parts, most in (
        (cut(4, 1, 6, targets=targets), 11),  # accumulated
        ([(INPUTS, targets)], 3),  # out of memory twice
        (cut(5, 6, targets=targets), 3),  # both
    ):
        result, found = stepped(loss_fn, *parts, most=most)
        assert result.parts > 1
        assert result.loss == pytest.approx(whole.loss, rel=1e-12)
        assert largest_difference(expected, found) <= ROUNDING
    assert "other gradients" not in caplog.text


def test_a_batch_is_split_down_to_single_samples():
    batch = INPUTS, TARGETS
    _, expected = stepped(functional.cross_entropy, batch)
    result, found = stepped(functional.cross_entropy, batch, most=1)
    assert result.parts == 11
    assert largest_difference(expected, found) <= ROUNDING
    with pytest.raises(torch.OutOfMemoryError) as caught:
        stepped(functional.cross_entropy, batch, most=0)
    assert "in 11 pieces and cannot be split further" in caught.value.__notes__[0]


@pytest.mark.parametrize("loss_fn", [summed, contrasted])
def test_a_batch_whose_loss_is_not_a_mean_is_not_split(loss_fn):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        stepped(loss_fn, (INPUTS, TARGETS), most=6)
    assert "its loss is not a mean over its samples" in caught.value.__notes__[0]


@pytest.mark.parametrize("loss_fn", [summed, contrasted])
def test_batches_whose_loss_is_not_a_mean_are_warned_about_once(loss_fn, caplog):
    torch.manual_seed(0)
    limited = Limited(Classifier(dropout=0.0).double(), 11)
    optimizer = torch.optim.SGD(limited.parameters(), lr=0.1)
    trainer = Trainer(limited, optimizer, loss_fn=loss_fn)
    parts = cut(5, 6, targets=TARGETS)
    with caplog.at_level(logging.WARNING):
        trainer.step(*parts)
        trainer.step(*parts)
    assert caplog.text.count("other gradients") == 1
    limited.most = 3
    with pytest.raises(torch.OutOfMemoryError):
        trainer.step(*parts)


def test_a_loss_that_draws_random_numbers_draws_the_same_and_is_not_checked(caplog):
    def noisy(outputs, targets):
        del targets
        return (outputs + torch.randn_like(outputs)).square().mean()

    parts = cut(5, 6, targets=TARGETS)
    _, found = stepped(noisy, *parts)
    torch.manual_seed(0)
    model = Classifier(dropout=0.0).double()
    for (inputs, targets), share in zip(parts, (5 / 11, 6 / 11), strict=True):
        (noisy(model(inputs), targets) * share).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(map(torch.equal, found, model.parameters()))
    assert "other gradients" not in caplog.text


def test_ignored_labels_have_no_weight_if_the_model_returns_its_loss():
    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Classifier(dropout=0.0).double()

        def forward(self, inputs, labels):
            return {"loss": functional.cross_entropy(self.inner(inputs), labels)}

    ends = []
    for sizes in ([11], [4, 7]):
        torch.manual_seed(0)
        model = Labelled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cuts = cut(*sizes, targets=IGNORING)
        Trainer(model, optimizer).step(*({"inputs": x, "labels": t} for x, t in cuts))
        ends.append([p.detach() for p in model.parameters()])
    assert largest_difference(*ends) <= ROUNDING


def test_weights_for_a_loss_that_sums_are_refused():
    with pytest.raises(UsageError, match="this loss function sums"):
        reduction_of(nn.MSELoss(reduction="sum"), len)
