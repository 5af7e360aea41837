"""Every module of PyTorch's database, measured dry: the graph of the real step."""

import pytest
import torch
from torch import Tensor, nn

from recoup.backend.state.trees import tensors
from recoup.errors import UnsupportedError
from recoup.fitting.measuring import measure
from tests.support.graphs import timeless
from tests.support.modules import Sample, module_subjects

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]

SUBJECTS = module_subjects()
SAMPLES = 2
# One looks at a counter of its own, the other keeps what only its kernel can size.
NOT_DRY = {"nn_BatchNorm1d", "nn_BatchNorm2d", "nn_BatchNorm3d", "nn_LSTM"}


class Step(nn.Module):
    """A module with what it is called with, whose output is a loss."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.module = sample.build().float().train()
        self.keywords = sample.kwargs
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *args: object) -> Tensor:
        found = tensors(self.module(*args, **self.keywords))
        sums = [t.abs().sum() for t in found if t.is_floating_point()]
        return sum(sums, torch.zeros(())) * self.scale


@pytest.mark.parametrize("subject", SUBJECTS, ids=[s.name for s in SUBJECTS])
def test_the_dry_graph_is_that_of_the_real_step(subject):
    for sample in subject.samples(torch.float32, True)[:SAMPLES]:
        model = Step(sample)
        try:
            real = measure(model, sample.args)
        except Exception:  # noqa: BLE001 (not one that can be measured at all)
            continue
        try:
            dry = measure(model, sample.args, dry=True)
        except UnsupportedError:
            assert subject.name in NOT_DRY
        else:
            assert timeless(dry) == timeless(real)
