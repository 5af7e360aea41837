"""A training loop that keeps more than the measured step: warned if it does not fit."""

import gc
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recoup
from recoup.backend.memory.meters import StorageMeter
from recoup.core.graph import Boundary, Graph, Operation
from recoup.core.simulation import Kept, LoopKept, peak_with, simulate
from recoup.fitting.following import adaptation

WIDTH, ROWS = 32, 96


def network(head: int = 1, depth: int = 4) -> nn.Sequential:
    """Blocks, and a head that is `head` times as wide as they are."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        for _ in range(depth)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, head * WIDTH))


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def train(
    model: nn.Module, x: Tensor, *, zero: str, keep: str, steps: int = 3
) -> tuple[list[int], list[recoup.errors.BudgetWarning]]:
    """Train; return the peak of each step, and the warnings.

    Args:
        model: The model.
        x: The batch.
        zero: Where gradients are dropped: "before" or "after" forward, or "never".
        keep: How long the output is referenced: "loss": until the loss is known,
            "backward": until backward has ended, "next": until the next output.
        steps: How many steps.
    """
    peaks: list[int] = []
    output = None
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            gc.collect()
            with StorageMeter() as meter:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                meter.track(model, x, *gradients)
                meter.track(*([] if output is None else [output]))
                gradients.clear()
                if zero == "before":
                    model.zero_grad(set_to_none=True)
                if keep == "loss":
                    loss = model(x).sum()
                else:
                    output = model(x)
                    loss = output.sum()
                if zero == "after":
                    model.zero_grad(set_to_none=True)
                loss.backward()
                if keep == "backward":
                    output = None
                del loss
            peaks.append(meter.peak_bytes)
    said = [w.message for w in caught]
    return peaks, [w for w in said if isinstance(w, recoup.errors.BudgetWarning)]


def fitted(
    share: float, head: int, **options: Any
) -> tuple[nn.Module, recoup.results.Fit]:
    model, x = network(head), batch()
    if "step" in options:
        step = options.pop("step")
        _, report = recoup.fit(model, budget=share, step=lambda: step(model, x))
    else:
        _, report = recoup.fit(
            model, x, share, loss=torch.sum, compile=False, **options
        )
    return model, report


@settings(max_examples=4, deadline=None)
@given(
    share=st.floats(0.7, 1.0),
    head=st.sampled_from([1, 12]),
    zero=st.sampled_from(["before", "after", "never"]),
    keep=st.sampled_from(["loss", "backward", "next"]),
)
@example(share=0.7, head=1, zero="never", keep="loss")
@example(share=0.7, head=12, zero="before", keep="backward")
@example(share=0.7, head=12, zero="after", keep="next")
def test_a_loop_is_warned_exactly_if_it_exceeds_the_budget(share, head, zero, keep):
    model, report = fitted(share, head, verify="off")
    peaks, said = train(model, batch(), zero=zero, keep=keep)
    assert bool(said) == (max(peaks) > report.budget_bytes)
    assert all(warning.needed_bytes in peaks for warning in said)
    assert all(warning.budget_bytes == report.budget_bytes for warning in said)
    # Each kind is said once: the output in the first step, gradients in the second.
    assert len(said) <= (zero != "before") + (keep != "loss")


def keeps_output(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    output.sum().backward()


def accumulates(model: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        model(x).sum().backward()


@pytest.mark.parametrize(
    ("options", "zero", "keep"),
    [
        ({"accumulate": True}, "never", "loss"),
        ({"accumulate": True}, "before", "loss"),
        ({"step": accumulates}, "never", "loss"),
        ({"step": keeps_output}, "before", "backward"),
    ],
)
def test_what_the_measured_step_keeps_is_silent(options, zero, keep):
    model, report = fitted(0.8, 12, **options)
    peaks, said = train(model, batch(), zero=zero, keep=keep)
    assert not said
    assert max(peaks) <= report.budget_bytes


def test_the_warning_names_the_line_and_what_to_do():
    model, _ = fitted(0.7, 1)
    x = batch()
    model(x).sum().backward()
    with pytest.warns(recoup.errors.BudgetWarning, match="accumulate=True") as caught:
        model(x).sum().backward()
    assert caught[0].filename == __file__
    model.zero_grad()
    model(x).sum().backward()
    model(x).sum().backward()  # silent: said before


def test_a_warning_that_is_an_error_ends_backward():
    model, _ = fitted(0.7, 12)
    output = model(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error", recoup.errors.BudgetWarning)
        with pytest.raises(recoup.errors.BudgetWarning, match="del output"):
            output.sum().backward()


def test_parts_whose_gradients_are_dropped_are_not_counted():
    model, report = fitted(0.7, 12)
    *blocks, head = model.children()
    x = batch()
    model(x).sum().backward()
    for block in blocks:
        block.zero_grad()
    with pytest.warns(recoup.errors.BudgetWarning) as caught:
        model(x).sum().backward()
    (warning,) = (w.message for w in caught)
    assert isinstance(warning, recoup.errors.BudgetWarning)
    carried_bytes = sum(p.nbytes for p in head.parameters())
    # The head's gradient is made first in backward: it is carried during forward.
    assert report.measured_peak_bytes < warning.needed_bytes
    assert warning.needed_bytes <= report.measured_peak_bytes + carried_bytes


def test_calls_of_other_sizes_are_compared_with_their_own_plan():
    # Verification would need room of its own in plans of other sizes.
    model, report = fitted(0.8, 12, verify="off")
    x = batch()
    for rows in (ROWS // 2, ROWS // 3):
        peaks, said = train(model, x[:rows], zero="before", keep="backward")
        assert bool(said) == (max(peaks) > report.budget_bytes)


def passes(
    model: nn.Module, batches: list[Tensor], kept: list[Tensor] | None = None
) -> None:
    """Accumulate gradients over batches; keep the outputs if there is a list."""
    for x in batches:
        output = model(x)
        if kept is not None:
            kept.append(output)
        loss = output.sum()
        del output
        loss.backward()


def peak_of_passes(
    model: nn.Module, batches: list[Tensor], *, keep: bool
) -> tuple[int, list[recoup.errors.BudgetWarning]]:
    """Run a step of several passes; return its peak, and the warnings."""
    model.zero_grad(set_to_none=True)
    with (
        warnings.catch_warnings(record=True) as caught,
        StorageMeter() as meter,
    ):
        warnings.simplefilter("always")
        meter.track(model, *batches)
        passes(model, batches, [] if keep else None)
    said = [w.message for w in caught]
    kinds = recoup.errors.BudgetWarning
    return meter.peak_bytes, [w for w in said if isinstance(w, kinds)]


@pytest.mark.parametrize("rows", [(ROWS, 48, ROWS), (ROWS,) * 4, (48, ROWS, 48)])
def test_outputs_of_all_earlier_passes_count(rows):
    model, x = network(4), batch()
    batches = [x[:count] for count in rows]
    budget, said = 1 << 26, []
    while not said:
        _, report = recoup.fit(
            model, step=lambda: passes(model, batches), budget=budget
        )
        peak, said = peak_of_passes(model, batches, keep=False)
        assert peak <= report.budget_bytes
        assert not said
        peak, said = peak_of_passes(model, batches, keep=True)
        assert len(said) == (peak > report.budget_bytes)
        budget = peak - 1  # too small by one byte, if the plan is the same
        report.remove()


def test_outputs_that_the_measured_step_keeps_are_silent():
    model, x = network(4), batch()
    batches = [x, x[:48], x]
    _, report = recoup.fit(model, step=lambda: passes(model, batches, []), budget=0.8)
    for _ in range(2):
        peak, said = peak_of_passes(model, batches, keep=True)
        assert peak <= report.budget_bytes
        assert not said


def test_outputs_that_are_kept_from_step_to_step_add_up():
    model, x = network(12), batch()
    _, report = recoup.fit(model, x, 1.0, loss=torch.sum)
    output_bytes = 12 * x.nbytes
    report.remove()
    budget = report.measured_peak_bytes + 5 * output_bytes // 2
    _, report = recoup.fit(model, x, budget, loss=torch.sum)
    outputs: list[Tensor] = []
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        with (
            warnings.catch_warnings(record=True) as caught,
            StorageMeter() as meter,
        ):
            warnings.simplefilter("always")
            meter.track(model, x, *outputs)
            outputs.append(model(x))
            outputs[-1].sum().backward()
        exceeds = meter.peak_bytes > report.budget_bytes
        assert exceeds == (len(outputs) > 2)
        assert len(caught) == (len(outputs) == 3)


def as_measured(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def collects_features(model: nn.Module, x: Tensor) -> None:
    features = []

    def collect(module: nn.Module, inputs: object, output: Tensor) -> None:
        features.append(output.detach())

    handles = [part.register_forward_hook(collect) for part in model.modules()]
    model(x).sum().backward()
    for handle in handles:
        handle.remove()


def has_a_teacher(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    with torch.no_grad():
        hidden = [x.repeat(1, 16) for _ in range(4)]
    (output.sum() + hidden[0].sum()).backward()


def retains_the_graph(model: nn.Module, x: Tensor) -> None:
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def perturbs_parameters(model: nn.Module, x: Tensor) -> None:
    held = [x.repeat(1, 16) for _ in range(4)]
    model(x).sum().backward()
    del held


MORE = [collects_features, has_a_teacher, retains_the_graph]


def steps_said(
    step: Any, device: str, *, copies: int = 1
) -> tuple[list[int], list[Any]]:
    """Fit, then train in another way; return the peaks and the warnings."""
    model, x = network().to(device), batch().to(device).repeat(copies, 1)
    recoup.fit(model, x, 0.7, loss=torch.sum)
    peaks: list[int] = []
    said: list[Any] = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with (
            StorageMeter(device) as meter,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            meter.track(model, x)
            step(model, x)
        peaks.append(meter.peak_bytes)
        said += [warning.message for warning in caught]
    return peaks, said


@pytest.mark.parametrize("step", [as_measured, *MORE])
def test_of_more_that_is_kept_the_first_step_is_warned(step, monkeypatch):
    # As on an accelerator, whose allocator counts by itself.
    monkeypatch.setattr(adaptation, "device_of", lambda _: torch.device("cuda"))
    peaks, said = steps_said(step, "cpu")
    assert [w.needed_bytes for w in said] == ([] if step is as_measured else peaks[:1])


@pytest.mark.cuda
@pytest.mark.parametrize("step", [as_measured, *MORE, perturbs_parameters])
def test_the_allocator_is_asked_for_the_peak_of_the_first_step(step):
    # Activations of 600 MB: a GPU's matrix products take 65 MiB of workspace.
    _, said = steps_said(step, "cuda", copies=1365)
    assert len(said) == (step is not as_measured)


def test_a_graph_that_is_kept_does_not_keep_the_model():
    model, report = fitted(0.7, 1)
    kept = model(batch()).grad_fn
    model.zero_grad()
    dead = weakref.ref(report._adapted)
    del model, report
    gc.collect()
    assert kept is not None
    assert dead() is None


# What it costs.


def python_calls(depth: int) -> int:
    """How many functions of ours a step runs with `depth` blocks that do nothing."""
    parts: Any = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
    parts.forward = lambda x: x.sum()
    model, x = nn.Sequential(nn.Linear(8, 8), parts), torch.ones(8, 8)
    _, report = recoup.fit(model, x, 1.0)
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "recoup" in frame.f_code.co_filename

    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    model.zero_grad()
    sys.setprofile(count)
    try:
        model(x).backward()
    finally:
        sys.setprofile(None)
    report.remove()
    return calls


def test_a_step_costs_as_many_python_calls_whatever_the_number_of_parameters():
    assert python_calls(10) == python_calls(100) <= 80


# The model of it.


@given(
    st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 50)), max_size=5),
    st.lists(st.integers(0, 100), min_size=6, max_size=6),
    st.integers(0, 50),
)
def test_memory_that_is_kept_adds_to_each_moment_that_does_not_count_it(
    gradients, moments, other
):
    graph = Graph(
        operations=(Operation("exp", 1.0, (), ()),) * 2,
        backward=4,
        storages=(),
        values=(),
        saves=(),
        boundaries=(Boundary(0, 0), Boundary(2, 0)),
        other_bytes=tuple(moments),
        gradients=tuple((str(n), born) for n, (born, _) in enumerate(gradients)),
    )
    kept = Kept({str(n): nbytes for n, (_, nbytes) in enumerate(gradients)}, other)
    expected = [
        nbytes + other + sum(size for born, size in gradients if moment < born)
        for moment, nbytes in enumerate(moments)
    ]
    assert peak_with(graph, (), LoopKept(kept, kept, kept)) == max(expected)
    nothing = Kept({})
    peak_bytes = simulate(graph, ()).peak_bytes
    assert peak_with(graph, (), LoopKept(nothing, nothing, nothing)) == peak_bytes
    assert peak_with(graph, (), LoopKept(nothing, nothing, kept)) == max(
        *moments[:2], *expected[2:]
    )
