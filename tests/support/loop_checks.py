"""The check of the loops x models matrix."""

import warnings

import torch

from recoup.backend.memory.meters import StorageMeter
from recoup.errors import BudgetWarning
from tests.support.steps_of_fit import fit_metered, missing_bytes
from tests.support.training_loops import build, twin_of

STEPS = 4


def check_loop(kind: str, name: str, share: float) -> None:
    """Train some steps in a budget, and compare with the plain twin, bit by bit."""
    loop = build(kind, name)
    plain = twin_of(loop)
    report, peaks = fit_metered(loop.models, loop.step, share)
    assert report.measured_peak_bytes <= report.budget_bytes
    assert max(peaks) <= report.budget_bytes + missing_bytes(report)
    peaks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        for number in range(STEPS):
            meter = StorageMeter()
            loop.train(number, meter)
            peaks.append(meter.peak_bytes)
    torch.manual_seed(1)
    for number in range(STEPS):
        plain.train(number)
    assert all(map(torch.equal, loop.state(), plain.state()))
    warned = any(issubclass(each.category, BudgetWarning) for each in caught)
    assert warned or max(peaks) <= report.budget_bytes, (peaks, report.budget_bytes)
    report.remove()
