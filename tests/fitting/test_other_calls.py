"""A fitted model that is called otherwise than it was measured: planned, or warned."""

import copy
import dataclasses
import sys
import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recoup
from recoup.backend.memory.meters import StorageMeter
from recoup.backend.state.trees import named_tensors, tensors_within
from recoup.core.growth import Growth, group_of, resized
from recoup.core.plan import plan_for, segments_of
from recoup.core.simulation import simulate
from recoup.fitting.following.adapted_pass import AdaptedPass
from recoup.planners.planner import floor

WIDTH = 16


class Layer(nn.Module):
    """Attention written out, so that a step has values of length x length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out((q @ k.mT).softmax(-1) @ v)
        return x + self.wide(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.order = list(range(5))

    def forward(self, x: Any, mask: Tensor | None = None, count: Any = None) -> Tensor:
        x = tensors_within(x)[0]
        for number in self.order:
            x = self.layers[number](x)
        return x.square().mean()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(
        batch, length, WIDTH, generator=torch.Generator().manual_seed(batch * length)
    )


def peak_bytes_of(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """The measured peak of a step, and nothing left of it."""
    model.zero_grad(set_to_none=True)
    with StorageMeter() as meter:
        meter.track(model, *tensors_within((args, kwargs)))
        model(*args, **kwargs).backward()
    model.zero_grad(set_to_none=True)
    return meter.peak_bytes


def fitted(
    share: float = 0.5, batch: int = 6, length: int = 48
) -> tuple[Net, recoup.results.Fit]:
    model = Net()
    _, report = recoup.fit(model, tokens(batch, length), share)
    return model, report


def adapted_of(report: recoup.results.Fit) -> AdaptedPass:
    adapted = report._adapted
    assert adapted is not None
    (part,) = adapted.parts
    return part


def warned(caught: list[warnings.WarningMessage]) -> list[recoup.errors.BudgetWarning]:
    return [
        found.message
        for found in caught
        if isinstance(found.message, recoup.errors.BudgetWarning)
    ]


# Sizes.


@settings(max_examples=4, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 48)), min_size=1, max_size=4)
)
def test_what_is_smaller_in_every_dimension_stays_within_the_budget(sizes):
    model, report = fitted()
    for size in sizes:
        for _ in range(3):
            assert peak_bytes_of(model, tokens(*size)) <= report.budget_bytes


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from([0.45, 0.7, 0.9]),
    st.lists(
        st.tuples(st.integers(1, 14), st.integers(2, 120)), min_size=1, max_size=4
    ),
)
def test_no_size_exceeds_the_budget_silently(share, sizes):
    model, report = fitted(share)
    for size in sizes:
        needed_bytes = 0
        for _ in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                peak_bytes = peak_bytes_of(model, tokens(*size))
            said = [warning.needed_bytes for warning in warned(caught)]
            needed_bytes = max(needed_bytes, *said, 0)
            if peak_bytes > report.budget_bytes:
                adapted = adapted_of(report)
                same_group = [group.is_warned for group in adapted._groups.values()]
                assert needed_bytes or any(same_group)


def test_the_same_tokens_in_longer_sequences_are_another_size():
    model, report = fitted(batch=8, length=32)
    with pytest.warns(recoup.errors.BudgetWarning) as caught:
        peak_bytes = peak_bytes_of(model, tokens(1, 256))
    (warning,) = warned(list(caught))
    assert "args.0 axis 0: 8 -> 1, args.0 axis 1: 32 -> 256" in str(warning)
    assert warning.budget_bytes == report.budget_bytes < peak_bytes
    assert warning.needed_bytes > report.budget_bytes
    for _ in range(4):
        peak_bytes = peak_bytes_of(model, tokens(1, 256))  # silent: said before
    graph = recoup.measure(Net(), tokens(1, 256))
    least = floor(graph).simulation.peak_bytes
    assert least <= peak_bytes <= 1.05 * least


@pytest.mark.parametrize(
    "size", [(2, 48), (12, 48), (6, 24), (6, 96), (3, 96), (9, 61)]
)
def test_storages_are_predicted_from_another_size_to_the_byte(size):
    sizes = [(6, 48), (12, 96), (5, 80)]
    graphs = [recoup.measure(Net(), tokens(*one)) for one in sizes]

    def axes(batch: int, length: int) -> dict[tuple[str, int], int]:
        return {("x", 0): batch, ("x", 1): length, ("x", 2): WIDTH}

    growth = Growth(axes(*sizes[0]), [s.bytes for s in graphs[0].storages])
    for one, graph in zip(sizes[1:], graphs[1:], strict=True):
        growth.add(axes(*one), {n: s.bytes for n, s in enumerate(graph.storages)})
    real = recoup.measure(Net(), tokens(*size))
    predicted = growth.predicted(axes(*size))
    assert predicted == [storage.bytes for storage in real.storages]
    # The step that is made of it costs what the real one does, or little more.
    step = resized(graphs[0], predicted)
    for graph in (step, real):
        assert len(graph.storages) == len(real.storages)
    plans = [(), floor(graphs[0]).segments]
    for segments in plans:
        told, found = (simulate(g, segments).peak_bytes for g in (step, real))
        assert 0.97 * found <= told
        if size[0] >= 6 and size[1] >= 48:
            assert told <= 1.1 * found


@given(
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        min_size=2,
        max_size=5,
        unique=True,
    ),
)
def test_a_storage_that_grows_with_powers_is_never_predicted_too_small(powers, sizes):
    def bytes_at(size: tuple[int, int]) -> int:
        return 1000 * size[0] ** powers[0] * size[1] ** powers[1]

    def axes(size: tuple[int, int]) -> dict[tuple[str, int], int]:
        return {("x", 0): size[0], ("y", 0): size[1]}

    growth = Growth(axes(sizes[0]), [bytes_at(sizes[0])])
    for size in sizes[1:-1]:
        growth.add(axes(size), {0: bytes_at(size)})
    (predicted,) = growth.predicted(axes(sizes[-1]))
    assert predicted >= bytes_at(sizes[-1])
    growth.add(axes(sizes[-1]), {0: bytes_at(sizes[-1])})
    assert growth.predicted(axes(sizes[-1])) == [bytes_at(sizes[-1])]


@given(st.integers(1, 300), st.integers(1, 2000))
def test_a_group_of_sizes_contains_what_is_in_it(measured, length):
    group = group_of({("x", 0): measured}, {("x", 0): length})
    assert length <= group["x", 0] <= max(1.1 * length, length + measured / 8)
    assert group_of({("x", 0): measured}, group) == group


def test_growing_sequences_do_not_plan_every_step():
    model, report = fitted(0.9, batch=2, length=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.errors.BudgetWarning)
        for length in range(1, 48):
            model(tokens(2, length)).backward()
    assert adapted_of(report).planned_groups <= 8 + 2 * 8


def test_a_larger_batch_uses_the_budget():
    # What its plan leaves free is what a fingerprint of its largest value takes, and
    # the error of the prediction.
    model, report = fitted(0.6)
    peaks = [peak_bytes_of(model, tokens(12, 48)) for _ in range(3)]
    assert 0.85 * report.budget_bytes < peaks[-1]
    assert max(peaks) <= report.budget_bytes


def test_a_count_and_a_mask_do_not_make_another_size():
    model, report = fitted()
    x = tokens(6, 48)
    for kwargs in (
        {"count": torch.tensor(3)},
        {"mask": torch.ones(6, 48)},
        {"mask": torch.ones(6, 48, dtype=torch.bool), "count": torch.tensor([3])},
    ):
        for _ in range(2):
            extra_bytes = sum(t.nbytes for t in tensors_within(kwargs))
            peak_bytes = peak_bytes_of(model, x, **kwargs)
            adapted = adapted_of(report)
            assert adapted._chosen is adapted.plan
            assert peak_bytes == report.measured_peak_bytes + extra_bytes


@dataclasses.dataclass
class Batch:
    tokens: Tensor


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Store:
    """As the graphs of PyTorch Geometric: a mapping inside of an object."""

    def __init__(self, **tensors: Tensor) -> None:
        self._mapping = tensors


WRAPPERS = {
    "dataclass": Batch,
    "slots": Slotted,
    "mapping": lambda x: UserDict(x=x),
    "graph": lambda x: Slotted(Store(x=x)),
    "nested": lambda x: [{"batch": Batch(x)}],
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_tensors_in_any_object_are_seen(wrap):
    model, x = Net(), tokens(6, 48)
    assert [found is x for _, found in named_tensors(wrap(x))] == [True]
    _, report = recoup.fit(model, (wrap(x),), 0.5)
    _, plain = recoup.fit(Net(), x, 0.5)
    assert report.plain_peak_bytes == plain.plain_peak_bytes
    with pytest.warns(recoup.errors.BudgetWarning, match="axis 0: 6 -> 60"):
        peak_bytes_of(model, wrap(tokens(60, 48)))


def test_a_plan_is_the_segments_it_was_made_of():
    graph = recoup.measure(Net(), tokens(6, 48))
    for share in (0.4, 0.6, 0.8):
        budget = int(share * simulate(graph, ()).peak_bytes)
        segments = recoup.plan(graph, budget).segments
        found = segments_of(graph, plan_for(graph, segments))
        assert found is not None
        assert simulate(graph, found).bytes_at == simulate(graph, segments).bytes_at


# The state of the model.


def test_verification_after_changes_of_mode_stays_within_the_budget():
    model = Net().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.errors.BudgetWarning)
        _, report = recoup.fit(model, tokens(6, 48), 0.5)
        model.train()
        peak_bytes_of(model, tokens(6, 48))  # the first such call is traced
    # Operators that were not seen before are verified when eval mode is back.
    for is_training in (True, False, False, False, True, False):
        model.train(is_training)
        assert peak_bytes_of(model, tokens(6, 48)) <= report.budget_bytes


def test_layers_that_are_frozen_take_less_and_are_silent():
    model, report = fitted()
    model.layers[0].requires_grad_(False)
    assert peak_bytes_of(model, tokens(6, 48)) <= report.budget_bytes


def test_validation_is_silent_and_unplanned():
    model, report = fitted()
    x = tokens(6, 48)
    for _ in range(2):
        assert peak_bytes_of(model, x) <= report.budget_bytes
        model.eval()
        with torch.no_grad():
            model(tokens(32, 200))
        model.train()
    assert adapted_of(report).planned_groups == 1


def test_copies_of_a_fitted_model_are_silent():
    model, report = fitted()
    twin = copy.deepcopy(model)
    for each in (twin, model, twin):
        assert peak_bytes_of(each, tokens(6, 48)) <= report.budget_bytes
    twin.eval()
    assert peak_bytes_of(twin, tokens(6, 48)) <= report.budget_bytes
    assert peak_bytes_of(model, tokens(6, 48)) <= report.budget_bytes


# The order of calls.


def test_a_second_call_before_backward_is_said_once():
    model, report = fitted()
    x = tokens(6, 48)

    def pair() -> int:
        with StorageMeter() as meter:
            meter.track(model, x)
            (model(x) + model(x)).backward()
        model.zero_grad(set_to_none=True)
        return meter.peak_bytes

    with pytest.warns(
        recoup.errors.BudgetWarning, match="another call before it"
    ) as caught:
        peak_bytes = pair()
    (warning,) = warned(list(caught))
    assert warning.needed_bytes >= 0.9 * peak_bytes > report.budget_bytes
    pair()


def test_calls_whose_backward_came_or_never_comes_are_silent():
    model, report = fitted()
    x = tokens(6, 48)
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        losses.append(loss)
        model(x)  # its graph is dropped
    assert peak_bytes_of(model, x) <= report.budget_bytes


def test_two_calls_that_were_measured_are_silent_and_three_are_not():
    model, x = Net(), tokens(6, 48)

    def step() -> None:
        model.zero_grad()
        (model(x) + model(x.flip(0))).backward()

    recoup.fit(model, step=step, budget=0.6)
    step()
    step()
    model.zero_grad()
    with pytest.warns(recoup.errors.BudgetWarning, match="after 2 calls"):
        (model(x) + model(x) + model(x)).backward()


def test_another_order_of_blocks_is_said_once():
    # So tight that every plan has a span across layers.
    model, report = fitted(0.42)
    model.order = [4, 3, 2, 1, 0]
    with pytest.warns(recoup.errors.BudgetWarning, match="measured order") as caught:
        peak_bytes = peak_bytes_of(model, tokens(6, 48))
    (warning,) = warned(list(caught))
    assert warning.needed_bytes >= 0.9 * peak_bytes
    assert "layers." in str(warning)
    peak_bytes_of(model, tokens(6, 48))
    model.order = list(range(5))
    assert peak_bytes_of(model, tokens(6, 48)) <= report.budget_bytes


# What it costs.


class Flat(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x).sum()


def python_calls(count: int) -> int:
    """How many functions of ours a call of a fitted model of so many modules runs."""
    model, x = Flat(count), torch.ones(8, 4)
    _, report = recoup.fit(model, x, 1.0)
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
    calls = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "recoup" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        model(x)
    finally:
        sys.setprofile(None)
    report.remove()
    return calls


def test_a_call_costs_as_many_python_calls_whatever_the_number_of_modules():
    # Two of them look whether a part of the model is called by itself.
    assert python_calls(20) == python_calls(200) <= 52


def stack_of_perceptrons() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in "abcd")
    )


def sample_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (sample,)).square().sum()

    values: dict[str, Tensor] = dict(model.named_parameters())
    return list(torch.vmap(torch.func.grad(loss), (None, 0))(values, x).values())


def mapped(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = torch.vmap(model)(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


def reverse_jacobian(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [torch.func.jacrev(lambda t: model(t).sum(0))(x)]


def forward_jacobian(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [torch.func.jacfwd(lambda t: model(t).sum(0))(x)]


@pytest.mark.parametrize("compiled", [False, "exact"])
@pytest.mark.parametrize("has_two_passes", [False, True])
@pytest.mark.parametrize(
    "transform", [sample_gradients, mapped, reverse_jacobian, forward_jacobian]
)
# torch 2.15 scripts its forward derivatives when they are first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_a_call_inside_a_transform_runs_without_a_plan(
    transform, has_two_passes, compiled
):
    x = torch.randn(64, 8)
    expected = transform(stack_of_perceptrons(), x)
    model = stack_of_perceptrons()

    def step() -> None:
        for _ in range(1 + has_two_passes):
            model(x).square().sum().backward()

    _, report = recoup.fit(model, step=step, budget=0.7, compile=compiled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert all(map(torch.equal, expected, transform(model, x)))
    said = [w for w in caught if isinstance(w.message, recoup.errors.BudgetWarning)]
    assert len(said) == (0 if compiled else 1)
    assert all("inside a transform of torch.func" in str(w.message) for w in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    report.remove()
