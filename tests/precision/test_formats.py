"""Formats by name, by dtype and by hardware."""

import pytest
import torch

from recoup.errors import UnsupportedError, UsageError
from recoup.precision.mixed_precision import check_precision, resolve_precision


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("auto", torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_a_precision_has_one_type_on_the_cpu(precision, dtype):
    assert resolve_precision(precision, "cpu") is dtype


@pytest.mark.parametrize("precision", ["fp8", "", None, torch.float64, 16])
def test_unknown_precisions_are_refused(precision):
    with pytest.raises(UsageError, match="expected a precision of"):
        check_precision(precision)


def test_a_device_without_autocast_is_refused_except_in_full_precision():
    assert resolve_precision("fp32", "meta") is torch.float32
    with pytest.raises(UnsupportedError, match="no autocast"):
        resolve_precision("auto", "meta")


@pytest.mark.cuda
def test_auto_depends_on_the_accelerator():
    found = resolve_precision("auto", "cuda")
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert found is (torch.bfloat16 if native else torch.float16)
