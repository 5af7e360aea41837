"""A fixed slice of PyTorch's module database; `make sweep` runs the whole of it."""

import pytest

from recoup import CheckpointScope
from tests.support.modules import module_cases, module_subjects
from tests.support.operators import failures

# Buffers, random operators, parameters made inside the region, in-place kernels.
SLICE = """
    nn_BatchNorm1d nn_BatchNorm2d nn_CTCLoss nn_Conv2d nn_CrossEntropyLoss nn_Dropout
    nn_Embedding nn_GRU nn_GRUCell nn_GroupNorm nn_HingeEmbeddingLoss nn_InstanceNorm2d
    nn_LSTM nn_LSTMCell nn_LayerNorm nn_LazyBatchNorm2d nn_LazyConv2d nn_LazyLinear
    nn_Linear nn_MaxPool2d nn_MultiheadAttention nn_PReLU nn_RMSNorm nn_RNN nn_RNNCell
    nn_RReLU nn_Softmax nn_Transformer nn_TransformerDecoderLayer
    nn_TransformerEncoderLayer
"""
SUBJECTS = {subject.name: subject for subject in module_subjects()}


@pytest.mark.parametrize("name", SLICE.split())
def test_a_module_in_a_region_trains_bitwise_as_the_plain_one(name):
    cases = list(module_cases(SUBJECTS[name], CheckpointScope, limit=4))
    assert failures(cases) == []
    assert any(case.verdict.kind == "equal" for case in cases)
