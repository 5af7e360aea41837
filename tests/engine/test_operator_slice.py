"""A fixed slice of PyTorch's operator database; `make sweep` runs the whole of it."""

import pytest
import torch

from recoup import CheckpointScope
from recoup.errors import RecoupError
from tests.support.operators import (
    failures,
    operator_cases,
    operator_database,
    sparse_cases,
)
from tests.support.sparse import PROGRAMS, sparse_step
from tests.support.transforms import transform_cases
from tests.support.twin import compare

# Chosen so that every kind of operator that once went wrong, or well could, is here.
SLICE = {
    "views": """
        as_strided chunk diagonal expand movedim narrow permute real select slice
        split squeeze t tensor_split transpose unbind unfold unsqueeze view
        view_as_complex view_as_real
    """,
    "copies": """
        cat clone contiguous flip index_select repeat reshape roll stack tile triu
    """,
    "pointwise": """
        abs add clamp copysign div_no_rounding_mode erf exp lerp log mul
        polygamma_polygamma_n_0 pow reciprocal sigmoid sin sub tanh where
    """,
    "reductions": """
        amax cumprod cumsum logsumexp mean nanmean norm prod std sum var_mean
    """,
    "indexing": """
        gather index_add index_copy index_fill index_put index_reduce_amax masked_fill
        masked_scatter masked_select put scatter scatter_add scatter_reduce_mean take
        take_along_dim
    """,
    "sorting": "cummax kthvalue max_reduction_with_dim median mode msort sort topk",
    "complex": "angle complex conj fft_fft fft_irfft polar stft vdot",
    "matrices": """
        addmm baddbmm bmm cdist einsum linalg_cholesky linalg_det linalg_eigh
        linalg_inv linalg_lu_factor linalg_matrix_norm linalg_pinv linalg_qr
        linalg_slogdet linalg_solve linalg_svd matmul mv svd_lowrank
    """,
    "layers": """
        nn_functional_avg_pool2d nn_functional_batch_norm nn_functional_conv2d
        nn_functional_conv_transpose2d nn_functional_embedding
        nn_functional_embedding_bag nn_functional_gelu nn_functional_glu
        nn_functional_grid_sample nn_functional_group_norm nn_functional_instance_norm
        nn_functional_interpolate_bilinear nn_functional_layer_norm
        nn_functional_linear nn_functional_max_pool2d
        nn_functional_multi_head_attention_forward nn_functional_pad_reflect
        nn_functional_prelu nn_functional_relu nn_functional_rms_norm
        nn_functional_scaled_dot_product_attention nn_functional_silu
        nn_functional_softplus softmax
    """,
    "random": """
        bernoulli nn_functional_alpha_dropout nn_functional_dropout
        nn_functional_dropout2d nn_functional_feature_alpha_dropout_with_train
        nn_functional_rrelu normal
    """,
    "losses": """
        nn_functional_binary_cross_entropy nn_functional_cross_entropy
        nn_functional_ctc_loss nn_functional_hinge_embedding_loss
        nn_functional_huber_loss nn_functional_kl_div nn_functional_mse_loss
        nn_functional_nll_loss nn_functional_triplet_margin_loss
    """,
    "others": "combinations sparse_mm_reduce sparse_sampled_addmm to_sparse",
}
# Their results have no gradient, but may be saved as factors.
FACTORS = """
    arange argmax bucketize eq exponential full_like histc isnan multinomial nonzero
    rand_like randint randn randn_like searchsorted uniform unique
    zeros_like
"""

DATABASE = {op.formatted_name: op for op in operator_database()}
NAMES = [name for names in SLICE.values() for name in names.split()]


def test_the_slice_names_operators_once():
    assert len(set(NAMES)) == len(NAMES)
    assert set(NAMES) <= set(DATABASE)
    assert len(NAMES) >= 120


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_in_a_region_is_bitwise_the_plain_one(name):
    cases = list(
        operator_cases(
            DATABASE[name],
            CheckpointScope,
            variants=["alone", "nested", "inplace outside", "inplace inside"],
            dtypes=[torch.float64, torch.complex128],
            limit=2,
        )
    )
    assert failures(cases) == []
    assert any(case.verdict.kind == "equal" for case in cases)


@pytest.mark.parametrize("name", NAMES)
def test_so_it_is_in_half_precision_and_into_given_buffers(name):
    cases = operator_cases(
        DATABASE[name],
        CheckpointScope,
        variants=["alone", "out", "out resized"],
        dtypes=[torch.bfloat16],
        limit=2,
    )
    assert failures(cases) == []


@pytest.mark.parametrize("name", FACTORS.split())
def test_a_result_without_gradient_is_replayed_bitwise(name):
    cases = list(
        operator_cases(
            DATABASE[name],
            CheckpointScope,
            variants=["factor"],
            dtypes=[torch.float64, torch.int64],
            limit=3,
        )
    )
    assert failures(cases) == []
    assert any(case.verdict.kind == "equal" for case in cases)


@pytest.mark.parametrize("name", ["masked_amax", "masked_mean", "masked_sum", "sum"])
def test_sparse_samples_give_bitwise_the_plain_gradients(name):
    cases = list(sparse_cases(DATABASE[name], CheckpointScope, limit=5))
    assert failures(cases) == []
    assert any(case.verdict.kind == "equal" for case in cases)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_with_sparse_tensors_is_bitwise_the_plain_one(program):
    assert compare(sparse_step(program), CheckpointScope) == []


@pytest.mark.parametrize("name", NAMES)
def test_second_gradients_and_tangents_are_bitwise_the_plain_ones(name):
    cases = operator_cases(
        DATABASE[name],
        CheckpointScope,
        variants=["second order", "forward mode"],
        dtypes=[torch.float64],
        limit=1,
        refusals=(RecoupError,),
    )
    assert failures(cases) == []


@pytest.mark.parametrize(
    "name",
    ["matmul", "nn_functional_layer_norm", "nn_functional_rrelu", "polar", "sort"],
)
def test_function_transforms_give_the_plain_answer_or_our_error(name):
    cases = list(
        transform_cases(DATABASE[name], CheckpointScope, refusals=(RecoupError,))
    )
    assert failures(cases) == []
    assert any(case.verdict.kind == "equal" for case in cases)
