"""PyTorch's own operator database as the judge of the engine."""

import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.twin import (
    IDLE_NOTE,
    Region,
    Step,
    Verdict,
    judge,
    seed_generators,
)
from tests.support.variants import VARIANTS, alone, factor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
)
SPARSE_LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
# Their result, or its enlarged part, is whatever the memory held before.
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)

# Defects of PyTorch itself: by operator, the pattern of the settings concerned and why
# they cannot be judged. Such a case may come out wrong, but it may not crash.
UNWRITTEN = "out= is not written under any dispatch mode"
UNREPEATABLE = "the pivots of the gelsy driver start as uninitialised memory"
DEFECTS = {
    ("linalg_matrix_rank", "*, out"): UNWRITTEN,
    ("linalg_matrix_rank", "*, out resized"): UNWRITTEN,
    ("linalg_matrix_rank_hermitian", "*, out"): UNWRITTEN,
    ("linalg_matrix_rank_hermitian", "*, out resized"): UNWRITTEN,
}
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
GELSY_REPEATS = _VERSION >= (2, 14)
if not GELSY_REPEATS:
    DEFECTS |= {
        ("linalg_lstsq", "* driver=gelsy, *"): UNREPEATABLE,
        ("linalg_lstsq_grad_oriented", "* driver=gelsy, *"): UNREPEATABLE,
    }
# Where PyTorch takes another formula while any dispatch mode is active. Here the
# region must give, bit by bit, what an idle mode gives.
OTHER_FORMULA = {
    **dict.fromkeys(
        ("linalg_cond", "linalg_matrix_norm", "norm_nuc"), ("out", "out resized")
    ),
    **dict.fromkeys(
        (
            "_batch_norm_with_update",
            "_native_batch_norm_legit",
            "native_batch_norm",
            "nn_functional_batch_norm",
            "nn_functional_group_norm",
            "nn_functional_instance_norm",
            "nn_functional_layer_norm",
            "prod",
        ),
        ("forward mode", "jvp", "jvp, then backward"),
    ),
    "nn_LinearCrossEntropyLoss": ("train", "eval"),
}
if _VERSION >= (2, 13):  # older ones have no samples of it
    OTHER_FORMULA["native_group_norm"] = OTHER_FORMULA["prod"]
if _VERSION >= (2, 15):
    OTHER_FORMULA |= dict.fromkeys(
        ("linalg_det", "linalg_slogdet", "logdet"),
        ("forward mode", "jvp", "jvp, then backward"),
    )

# Given the scopes of a run, names the operators whose values were kept there.
KeptValues = Callable[[Sequence[Any]], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Case:
    """One subject (an operator, a module) in one setting, and what came of it."""

    subject: str
    dtype: torch.dtype
    setting: str
    verdict: Verdict
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        where = f"{self.subject} {dtype} {self.setting}"
        return f"{where}: {self.verdict.kind}: {self.verdict.detail}"


def operator_database() -> list[Any]:
    """Return PyTorch's own description of every operator, with sample inputs."""
    return list(database_module("common_methods_invocations").op_db)


def database_module(name: str) -> ModuleType:
    """Import a module of PyTorch's test library without its effect on global flags.

    The import forbids assignments to `torch.backends` flags for the rest of the
    process, which would reach into other tests.
    """
    pytest.importorskip("expecttest", reason="PyTorch's own tests need it")
    # Not `torch.backends` itself: that module object was replaced after its functions
    # were made.
    flags = torch.backends.flags_frozen.__globals__
    allowed = flags["__allow_nonbracketed_mutation_flag"]
    with warnings.catch_warnings():
        # What it imports in turn (numba, SciPy) is not ours to keep up to date.
        warnings.simplefilter("ignore")
        module = import_module(f"torch.testing._internal.{name}")
    flags["__allow_nonbracketed_mutation_flag"] = allowed
    return module


def operator_cases(
    op: Any,
    region: Region,
    *,
    variants: Iterable[str],
    dtypes: Iterable[torch.dtype] = DTYPES,
    limit: int | None = None,
    device: str = "cpu",
    refusals: tuple[type[BaseException], ...] = (),
    kept_values: KeptValues | None = None,
) -> Iterator[Case]:
    """Judge one operator in several variants, on PyTorch's sample inputs.

    Args:
        op: An entry of the operator database.
        region: Makes the regions under test.
        variants: Names of `VARIANTS`; those that do not apply are left out.
        dtypes: Left out where the operator does not support one.
        limit: Most samples taken for each data type; all without it.
        device: Where the samples are made.
        refusals: Exceptions that are an allowed answer of the region.
        kept_values: If given, asked after each case what was kept.
    """
    chosen = [VARIANTS[name] for name in variants if VARIANTS[name].applies(op)]
    for dtype in dtypes:
        if not chosen or dtype not in op.supported_dtypes(device):
            continue
        for index, sample in enumerate(dense_samples(op, dtype, device, limit)):
            for variant in chosen:
                yield run_case(
                    op.formatted_name,
                    dtype,
                    f"{sample_name(index, sample)}, {variant.name}",
                    step=variant.build(op, sample),
                    region=region,
                    refusals=refusals,
                    kept_values=kept_values,
                )


def sample_name(index: int, sample: Any) -> str:
    """Name a sample by its place and by what was chosen for it in words.

    Examples:
        >>> from types import SimpleNamespace
        >>> sample_name(3, SimpleNamespace(kwargs={"driver": "gelsy", "rcond": None}))
        'sample 3 driver=gelsy'
    """
    chosen = [f"{k}={v}" for k, v in sample.kwargs.items() if isinstance(v, str)]
    return " ".join([f"sample {index}", *chosen])


def sparse_cases(
    op: Any, region: Region, *, limit: int | None = None, device: str = "cpu"
) -> Iterator[Case]:
    """Judge one operator on its sparse samples, in every layout it supports."""
    for layout in SPARSE_LAYOUTS:
        for index, sample in enumerate(sparse_samples(op, layout, device, limit)):
            for build in (alone, factor):
                name = f"{build.__name__} {str(layout).removeprefix('torch.')}"
                yield run_case(
                    op.formatted_name,
                    torch.float64,
                    f"sample {index}, {name}",
                    step=build(op, sample),
                    region=region,
                )


def run_case(
    subject: str,
    dtype: torch.dtype,
    setting: str,
    *,
    step: Step,
    region: Region,
    refusals: tuple[type[BaseException], ...] = (),
    kept_values: KeptValues | None = None,
) -> Case:
    """Judge one step, and name the case."""
    if subject in UNINITIALISED:
        reason = "the result is uninitialised memory"
        return Case(subject, dtype, setting, Verdict("excluded", reason))
    scopes: list[Any] = []

    def tracked(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        scopes.append(region(*args, **kwargs))
        return scopes[-1]

    verdict = judge(step, tracked if kept_values else region, refusals=refusals)
    if verdict.kind == "wrong":
        verdict = _excused(subject, setting, verdict)
    kept = tuple(kept_values(scopes)) if kept_values else ()
    return Case(subject, dtype, setting, verdict, kept)


def dense_samples(
    op: Any, dtype: torch.dtype, device: str, limit: int | None
) -> list[Any]:
    """Draw an operator's samples, the same ones each time."""
    requires_grad = op.supports_autograd and dtype in op.supported_backward_dtypes(
        device
    )
    seed_generators(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = op.sample_inputs(device, dtype, requires_grad=requires_grad)
        return list(islice(samples, limit))


def sparse_samples(
    op: Any, layout: torch.layout, device: str, limit: int | None
) -> list[Any]:
    """Draw an operator's sparse samples; none where the layout is not supported."""
    coo = layout == torch.sparse_coo
    name = "supports_" + str(layout).removeprefix("torch.")
    if not getattr(op, "supports_sparse" if coo else name):
        return []
    seed_generators(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = op.sample_inputs_sparse(
                layout, device, torch.float64, requires_grad=op.supports_autograd
            )
            return list(islice(samples, limit))
        except (NotImplementedError, unittest.SkipTest):  # flagged, but no samples
            return []


def failures(cases: Iterable[Case]) -> list[str]:
    """Return the cases that were wrong or crashed, in words."""
    return [str(case) for case in cases if case.verdict.failed]


def write_summary(path: Path, title: str, cases: Sequence[Case]) -> None:
    """Append counts per data type and every exception to the rule to a page."""
    kinds = ("equal", "wrong", "crashed", "refused", "excluded")
    counts = Counter((case.dtype, case.verdict.kind) for case in cases)
    lines = [f"# {title}", "", "| dtype | " + " | ".join(kinds) + " |"]
    lines.append("|---" * (len(kinds) + 1) + "|")
    for dtype in sorted({case.dtype for case in cases}, key=str):
        numbers = " | ".join(str(counts[dtype, kind]) for kind in kinds)
        lines.append(f"| {str(dtype).removeprefix('torch.')} | {numbers} |")
    kept = Counter(name for case in cases for name in case.kept)
    if kept:
        lines += ["", "Kept instead of replayed (cases):", ""]
        lines += [f"- {name}: {count}" for name, count in sorted(kept.items())]
    for kind in kinds[1:]:
        found = Counter(
            (case.subject, case.setting.split(", ")[-1], case.verdict.detail)
            for case in cases
            if case.verdict.kind == kind
        )
        if found:
            lines += ["", f"## {kind}", ""]
        lines += [
            f"- {subject}, {setting}, {count} cases: {detail}"
            for (subject, setting, detail), count in sorted(found.items())
        ]
    with path.open("a", encoding="utf-8") as page:
        page.write("\n".join(lines) + "\n\n")


def _excused(subject: str, setting: str, verdict: Verdict) -> Verdict:
    """Turn a wrong answer into an exclusion where the defect is PyTorch's own."""
    for (name, pattern), reason in DEFECTS.items():
        if name == subject and fnmatchcase(setting, pattern):
            return Verdict("excluded", reason)
    if verdict.detail.startswith(IDLE_NOTE) and setting.endswith(
        OTHER_FORMULA.get(subject, ())
    ):
        return Verdict("excluded", IDLE_NOTE + "another formula")
    return verdict
