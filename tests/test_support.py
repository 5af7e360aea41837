"""The checkers are shown something wrong, and must say so."""

import ast
import contextlib
import itertools
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from recoup import CheckpointScope
from tests.support.architectures import ARCHITECTURES, architecture_cases
from tests.support.bits import duplicate, tree_differences
from tests.support.modules import Sample, module_cases, module_step, module_subjects
from tests.support.operators import (
    GELSY_REPEATS,
    OTHER_FORMULA,
    Case,
    failures,
    operator_cases,
    operator_database,
    run_case,
    sparse_cases,
    write_summary,
)
from tests.support.sparse import PROGRAMS, sparse_step
from tests.support.transforms import transform_cases
from tests.support.twin import (
    IDLE_NOTE,
    IdleMode,
    Verdict,
    compare,
    idle,
    judge,
    plain,
)
from tests.support.variants import VARIANTS

OPERATORS = {op.formatted_name: op for op in operator_database()}
NAN = float("nan")


def nudge(value):
    """Move a floating tensor to the next number up; leave anything else alone."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if value.layout != torch.strided:
        return value * (1 + 1e-9)
    return torch.nextafter(value, torch.full_like(value, float("inf")))


def corrupting_saved(*_, **__):
    """A region whose saved tensors come back one unit in the last place off."""
    return saved_tensors_hooks(lambda tensor: tensor, nudge)


class CorruptingResults(IdleMode):
    """A region in which every product is one unit in the last place off."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return nudge(result) if func is torch.ops.aten.mul.Tensor else result


def corrupting_results(*_, **__):
    return CorruptingResults()


class Drawing:
    """A region that takes a random number of its own."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        torch.rand(())


def drawing(*_, **__):
    return Drawing()


@contextlib.contextmanager
def warning(*_, **__):
    """A region that warns."""
    yield
    warnings.warn("recomputing", UserWarning, stacklevel=2)


def square(region):
    """A step: the product of a tensor with itself, and its gradient."""
    leaf = torch.linspace(1, 2, 4).requires_grad_()
    with region("square"):
        product = leaf * leaf
    (gradient,) = torch.autograd.grad(product.sum(), leaf)
    return {"product": product, "gradient": gradient}


def found(expected, actual):
    return list(tree_differences(expected, actual, where="value"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, NAN, -0.0, float("inf")]),
        torch.tensor([1 + 2j, complex(NAN, 1)]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(2, 3, dtype=torch.bfloat16).expand(4, 2, 3),
        torch.eye(3).to_sparse(),
        torch.empty(0, 3),
    ],
    ids=repr,
)
def test_a_tensor_equals_its_copy(tensor):
    assert found({"a": [tensor]}, {"a": [duplicate(tensor)]}) == []


@pytest.mark.parametrize(
    ("expected", "actual", "message"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002]), "1 of 2 elements"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "-0.0 instead of 0.0"),
        (torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN]), "2 of 2 elements"),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), "(1+3j) instead of (1+2j)"),
        (torch.ones(1), torch.ones(1).double(), "dtype torch.float64 instead of"),
        (torch.ones(2), torch.ones(1, 2), "shape"),
        (torch.ones(2, 3), torch.ones(3, 2).T, "strides (1, 2) instead of (3, 1)"),
        (torch.ones(1), torch.ones(1).requires_grad_(), "requires_grad True"),
        (torch.eye(2).to_sparse(), torch.eye(2), "layout"),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), "values: 2 of 2"),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse(), "indices: shape"),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], "structure"),
        (None, torch.ones(1), "instead of None"),
        (1.0, NAN, "nan instead of 1.0"),
        (1, 1.0, "1.0 instead of 1"),
    ],
    ids=itertools.count(),
)
def test_a_difference_is_named(expected, actual, message):
    assert message in found(expected, actual)[0]


def test_a_copy_has_the_geometry_and_the_sharing_of_the_original():
    base = torch.arange(12.0).reshape(3, 4)
    row, column = duplicate((base[1], base[:, 1].requires_grad_()))
    assert column.stride() == (4,)
    assert column.requires_grad
    assert column.is_leaf
    row.fill_(7)
    assert column.tolist() == [1, 7, 9]
    assert base[1].tolist() == [4, 5, 6, 7]


def test_a_right_region_is_equal():
    assert compare(square, plain) == []
    assert judge(square, plain) == Verdict("equal")
    assert judge(square, idle) == Verdict("equal")


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (corrupting_saved, "['gradient']: 4 of 4 elements differ"),
        (corrupting_results, "['product']: 4 of 4 elements differ"),
        (drawing, "generator state"),
        (warning, "warning not given by the plain run: UserWarning: recomputing"),
    ],
)
def test_a_wrong_region_is_noticed(region, message):
    verdict = judge(square, region)
    assert verdict.kind == "wrong"
    assert message in verdict.detail
    assert any(message in difference for difference in compare(square, region))


def test_a_region_that_stays_active_is_noticed():
    modes = []

    @contextlib.contextmanager
    def staying(*_, **__):
        modes.append(IdleMode())
        modes[-1].__enter__()
        yield

    differences = compare(square, staying)
    modes[0].__exit__(None, None, None)
    assert "dispatch modes still active" in differences[0]


def test_a_region_that_raises_crashed_unless_it_may_refuse():
    @contextlib.contextmanager
    def refusing(*_, **__):
        raise ValueError("not here")
        yield

    verdict = judge(square, refusing)
    assert verdict.kind == "crashed"
    assert verdict.detail.startswith("ValueError: not here")
    assert judge(square, refusing, refusals=(ValueError,)).kind == "refused"
    assert judge(square, refusing, refusals=(TypeError,)).kind == "crashed"


def test_a_plain_run_that_raises_or_varies_is_excluded():
    def raising(region):
        raise ValueError("a bad sample")

    counter = itertools.count()
    assert "a bad sample" in judge(raising, plain).detail
    verdict = judge(lambda region: {"count": next(counter)}, plain)
    assert verdict == Verdict("excluded", "plain run is not repeatable")


def test_only_a_named_defect_of_pytorch_is_excused():
    def kinds(subject, setting, region):
        case = run_case(subject, torch.float32, setting, step=square, region=region)
        return case.verdict.kind

    wrong = corrupting_saved
    assert kinds("linalg_matrix_rank", "sample 0, out", wrong) == "excluded"
    assert kinds("linalg_matrix_rank", "sample 0, alone", wrong) == "wrong"
    assert kinds("linalg_cond", "sample 0, out", wrong) == "wrong"
    assert kinds("linalg_cond", "sample 0, out", plain) == "equal"


@pytest.mark.parametrize("name", ["linalg_lstsq", "linalg_lstsq_grad_oriented"])
def test_of_the_drivers_of_least_squares_only_the_unrepeatable_one_is_excused(name):
    cases = list(
        operator_cases(
            OPERATORS[name],
            drawing,  # wrong with every driver, by the state of the generator
            variants=["alone"],
            dtypes=[torch.float64],
        )
    )
    kinds = {(case.setting.split("=")[1], case.verdict.kind) for case in cases}
    assert kinds == {
        ("gels, alone", "wrong"),
        ("gelsd, alone", "wrong"),
        ("gelss, alone", "wrong"),
        ("gelsy, alone", "wrong" if GELSY_REPEATS else "excluded"),
    }


LEAST_SQUARES = """
import torch
generator = torch.Generator().manual_seed(0)
matrix = torch.randn(3, 3, dtype=torch.float64, generator=generator)
right = torch.randn(3, 3, dtype=torch.float64, generator=generator)
for driver in ("gelsy", "gels", "gelsd", "gelss"):
    solution = torch.linalg.lstsq(matrix, right, driver=driver).solution
    print(solution.numpy().tobytes().hex())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="fills memory by glibc")
def test_the_driver_is_not_repeatable_in_plain_pytorch_exactly_where_it_is_excused():
    def solutions(filling):
        environment = {**os.environ, "MALLOC_PERTURB_": filling}
        command = [sys.executable, "-c", LEAST_SQUARES]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    # New memory is filled with the complement of the lowest byte.
    (gelsy, *others), (gelsy_of_zeros, *others_of_zeros) = map(solutions, ("1", "255"))
    assert (gelsy == gelsy_of_zeros) == GELSY_REPEATS
    assert others == others_of_zeros
    assert len(others) == 3


def test_another_formula_of_pytorch_is_excused_where_an_idle_mode_shows_it():
    def formula(region):
        with region("formula"):
            watched = torch._C._len_torch_dispatch_stack() > 0
        return {"value": torch.tensor(2.0 if watched else 1.0)}

    def kind(subject):
        setting = "sample 0, forward mode"
        case = run_case(subject, torch.float64, setting, step=formula, region=idle)
        return case.verdict.kind

    assert kind("nn_functional_layer_norm") == "excluded"
    assert kind("nn_functional_relu") == "wrong"


FORMULAS = sorted(set(OTHER_FORMULA) & set(OPERATORS))


@pytest.mark.parametrize("region", [idle, CheckpointScope], ids=["idle", "scope"])
@pytest.mark.parametrize("name", FORMULAS)
def test_an_operator_has_another_formula_under_a_mode_that_does_nothing(name, region):
    variants = [setting for setting in OTHER_FORMULA[name] if setting in VARIANTS]
    cases = list(
        operator_cases(
            OPERATORS[name], region, variants=variants, dtypes=[torch.float64], limit=5
        )
    )
    found = {c.verdict for c in cases if c.verdict.kind != "equal"}
    assert found == {Verdict("excluded", IDLE_NOTE + "another formula")}


def test_a_module_has_another_formula_under_a_mode_that_does_nothing():
    name = "nn_LinearCrossEntropyLoss"
    subjects = [s for s in module_subjects() if s.name == name]
    if not subjects:
        pytest.skip("this PyTorch has no such module")
    (subject,) = subjects
    for region in (idle, CheckpointScope):
        cases = module_cases(subject, region, dtypes=[torch.float32], limit=64)
        found = {c.verdict for c in cases if c.verdict.kind != "equal"}
        assert found == {Verdict("excluded", IDLE_NOTE + "another formula")}


def test_everything_that_has_another_formula_is_shown():
    assert set(OTHER_FORMULA) == {*FORMULAS, "nn_LinearCrossEntropyLoss"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_notices_a_wrong_value(variant):
    name = "special_airy_ai" if variant == "factor" else "sin"
    name = "mul" if variant == "forward mode" else name
    # Forward mode saves nothing: only a wrong result can be noticed there.
    region = corrupting_results if variant == "forward mode" else corrupting_saved
    cases = list(
        operator_cases(
            OPERATORS[name],
            region,
            variants=[variant],
            dtypes=[torch.float64],
            limit=3,
        )
    )
    assert any(case.verdict.kind == "wrong" for case in cases)
    assert failures(cases)[0].startswith(f"{name} float64 sample")


def test_sparse_samples_notice_a_wrong_value():
    cases = sparse_cases(OPERATORS["masked_prod"], corrupting_saved, limit=3)
    wrong = {case.setting.split()[-1] for case in cases if case.verdict.failed}
    assert wrong == {"sparse_coo", "sparse_csr"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_with_sparse_tensors_notices_a_wrong_value(program):
    assert compare(sparse_step(program), plain) == []
    assert "['gradient']" in compare(sparse_step(program), corrupting_saved)[0]


def test_transforms_notice_a_wrong_value_and_a_foreign_error():
    cases = list(transform_cases(OPERATORS["mul"], corrupting_results, refusals=()))
    wrong = {case.setting for case in cases if case.verdict.kind == "wrong"}
    assert {"region inside vmap", "region around jvp"} <= wrong
    # Hooks are not allowed there: PyTorch's own error is not one of ours.
    cases = list(transform_cases(OPERATORS["mul"], corrupting_saved, refusals=()))
    crashed = {case.setting for case in cases if case.verdict.kind == "crashed"}
    assert {"region inside grad", "region inside vjp"} <= crashed


def test_uninitialised_memory_is_not_compared():
    op = OPERATORS["empty_like"]
    (case, *_) = operator_cases(op, plain, variants=["factor"])
    assert case.verdict == Verdict("excluded", "the result is uninitialised memory")


def test_what_was_kept_is_asked_of_the_scopes_of_the_region_run():
    scopes = []

    def kept_values(made):
        scopes.append(made)
        return ["aten.sin"]

    (case,) = operator_cases(
        OPERATORS["sin"],
        plain,
        variants=["nested"],
        dtypes=[torch.float64],
        limit=1,
        kept_values=kept_values,
    )
    assert case.kept == ("aten.sin",)
    assert [len(made) for made in scopes] == [2]


def test_samples_are_the_same_each_time():
    op = OPERATORS["nn_functional_dropout"]
    first, second = (
        list(operator_cases(op, corrupting_saved, variants=["alone"], limit=2))
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("region", [corrupting_saved, drawing])
def test_a_wrong_module_step_is_noticed(region):
    (subject,) = [s for s in module_subjects() if s.name == "nn_BatchNorm2d"]
    cases = list(module_cases(subject, region, dtypes=[torch.float64], limit=1))
    assert [case.verdict.kind for case in cases] == ["wrong", "wrong"]


def test_a_wrong_buffer_is_noticed():
    module = nn.BatchNorm1d(3)

    class CountingTwice:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            assert module.num_batches_tracked is not None
            module.num_batches_tracked += 1

    def build():
        module.reset_running_stats()
        return module

    sample = Sample(build, (torch.randn(4, 3, requires_grad=True),))
    step = module_step(sample, dtype=torch.float32, training=True)
    verdict = judge(step, lambda *_: CountingTwice())
    assert verdict.kind == "wrong"
    assert "['buffer']['num_batches_tracked']" in verdict.detail


@pytest.mark.parametrize("region", [corrupting_saved, drawing])
def test_a_wrong_architecture_step_is_noticed(region):
    pytest.importorskip("transformers").logging.set_verbosity_error()
    (bert,) = [a for a in ARCHITECTURES if a.name == "bert"]
    kinds = [case.verdict.kind for case in architecture_cases(bert, region)]
    assert kinds == ["wrong", "wrong"]


def test_the_summary_counts_and_names(tmp_path):
    page = tmp_path / "sweep.md"
    cases = [
        Case("sin", torch.float64, "sample 0, alone", Verdict("equal"), ("aten.sin",)),
        Case("sin", torch.float64, "sample 1, alone", Verdict("wrong", "1 of 2")),
        Case("cos", torch.float32, "sample 0, out", Verdict("excluded", "raises")),
    ]
    write_summary(page, "Operators", cases)
    text = page.read_text()
    assert "| float64 | 1 | 1 | 0 | 0 | 0 |" in text
    assert "| float32 | 0 | 0 | 0 | 0 | 1 |" in text
    assert "- sin, alone, 1 cases: 1 of 2" in text
    assert "- cos, out, 1 cases: raises" in text
    assert "- aten.sin: 1" in text


def test_loading_the_databases_leaves_the_flags_of_the_process_alone():
    assert not torch.backends.flags_frozen()


VERDICTS = {"compare", "judge", "differences", "tree_differences"}
"""Checkers of tests/support that say what they found instead of raising."""


def unheard_verdicts(text: str) -> list[int]:
    """Return the lines on which a verdict is asked for and nobody looks at it."""
    tree = ast.parse(text)
    known = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("tests.support")
        for name in node.names
        if name.name in VERDICTS
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id in known
    ]


@pytest.mark.parametrize(
    "module",
    sorted(Path(__file__).parent.rglob("test_*.py")),
    ids=lambda module: str(module.relative_to(Path(__file__).parent)),
)
def test_every_verdict_is_heard(module):
    assert unheard_verdicts(module.read_text(encoding="utf-8")) == []


def test_a_verdict_that_nobody_hears_is_found():
    imported = "from tests.support.twin import compare\n"
    assert unheard_verdicts(f"{imported}assert compare(a, b) == []\n") == []
    assert unheard_verdicts(f"{imported}compare(a, b)\n") == [2]
    assert unheard_verdicts("def compare(): ...\ncompare()\n") == []
