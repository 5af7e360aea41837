"""A fitted model in another state than it was measured in: within the budget, or said.

The law: no step exceeds the budget unless a warning says so in that step or before, and
what the warning says is the measured peak of a step to the byte.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.backend.memory.meters import StorageMeter

WIDTH, ROWS, DEPTH = 16, 256, 5


class Net(nn.Module):
    """Blocks with dropout, of which a call runs those in `order`."""

    def __init__(self, chance: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Dropout(chance),
                nn.Linear(4 * WIDTH, WIDTH),
                nn.Dropout(chance),
            )
            for _ in range(DEPTH)
        )
        self.order = list(range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = x + self.blocks[number](x)
        return x.square().mean()


def rows(count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def fitted(model: Net, share: float, **options: Any) -> recoup.results.Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.errors.BudgetWarning)
        _, report = recoup.fit(model, rows(), share, compile=False, **options)
    return report


def train(
    model: nn.Module, steps: int, count: int = ROWS
) -> tuple[list[int], list[int], list[recoup.errors.BudgetWarning]]:
    """Train; return the peak of each step, which steps warned, and the warnings."""
    peaks: list[int] = []
    when: list[int] = []
    said: list[recoup.errors.BudgetWarning] = []
    x = rows(count)
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with StorageMeter() as meter:
                meter.track(model, x)
                model(x).backward()
        found = [w.message for w in caught]
        said += [w for w in found if isinstance(w, recoup.errors.BudgetWarning)]
        when += [number] * len(found)
        peaks.append(meter.peak_bytes)
    return peaks, when, said


def freeze(model: Net) -> None:
    model.blocks[:3].requires_grad_(False)


def unfreeze(model: Net) -> None:
    model.requires_grad_(True)


CHANGES: dict[str, tuple[Callable[[Net], Any], Callable[[Net], Any], bool]] = {
    "training": (lambda model: model.eval(), lambda model: model.train(), False),
    "evaluation": (lambda model: model.train(), lambda model: model.eval(), False),
    "unfrozen": (freeze, unfreeze, False),
    "autocast": (lambda model: model.train(), lambda model: model.train(), True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_a_step_in_another_state_is_within_the_budget_or_said_to_the_byte(
    share, change
):
    before, after, is_cast = CHANGES[change]
    model = Net()
    before(model)
    try:
        report = fitted(model, share)
    except recoup.errors.InfeasibleError as error:
        report = fitted(model, error.floor_bytes)
    after(model)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=is_cast)
    with cast if is_cast else contextlib.nullcontext():
        peaks, when, said = train(model, 5)
    exceeding = [n for n, peak in enumerate(peaks) if peak > report.budget_bytes]
    assert exceeding[:1] == when
    assert all(
        warning.needed_bytes == peaks[n] for n, warning in zip(when, said, strict=True)
    )
    assert all(warning.budget_bytes == report.budget_bytes for warning in said)


def test_a_model_that_is_fitted_in_eval_mode_trains_within_the_budget():
    model = Net().eval()
    with pytest.warns(recoup.errors.BudgetWarning, match=r"blocks\.0\.2"):
        _, report = recoup.fit(model, rows(), 0.6)
    model.train()
    peaks, _, said = train(model, 5)
    assert not said
    assert max(peaks) <= report.budget_bytes
    # The first step ran with the smallest plan, later ones use what there is.
    assert peaks[0] < 0.8 * report.budget_bytes < peaks[-1]


def test_a_state_that_changes_no_operator_keeps_the_measured_plan():
    model = Net(chance=0).eval()
    blocks: Any = model.blocks
    for block in blocks:
        block[2] = block[4] = nn.Identity()
    report = fitted(model, 0.6)
    model.train()
    peaks, _, said = train(model, 3)
    assert not said
    assert peaks[1:] == [report.measured_peak_bytes] * 2


def floor_of(model: Net) -> int:
    with pytest.raises(recoup.errors.InfeasibleError) as caught:
        fitted(model, 1000)
    return caught.value.floor_bytes


def test_what_does_not_fit_is_named_once_with_the_line():
    model = Net()
    freeze(model)
    report = fitted(model, floor_of(model))
    unfreeze(model)
    with pytest.warns(recoup.errors.BudgetWarning) as caught:
        model(rows()).backward()
    (warning,) = [w.message for w in caught]
    assert isinstance(warning, recoup.errors.BudgetWarning)
    assert "blocks.0.0.weight" in str(warning)
    assert "now require a gradient" in str(warning)
    assert warning.needed_bytes is not None
    assert warning.needed_bytes > report.budget_bytes
    assert caught[0].filename == __file__


def test_another_size_in_another_state_is_planned_too():
    model = Net().eval()
    report = fitted(model, 0.6)
    model.train()
    for count in (ROWS // 2, ROWS // 4, ROWS):
        peaks, _, said = train(model, 3, count)
        assert not said
        assert max(peaks) <= report.budget_bytes


def test_gradients_in_another_state_are_bitwise_those_of_the_plain_model():
    model, twin = Net().eval(), Net()
    fitted(model, 0.6)
    model.train()
    for number in range(3):
        for each in (model, twin):
            each.zero_grad()
            torch.manual_seed(number)
            each(rows()).backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine.grad, other.grad)


def test_nothing_stays_on_the_stack_of_modes():
    model = Net().eval()
    fitted(model, 0.6)
    model.train()
    train(model, 5)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("ends", ["dropped", "raises"])
def test_a_step_that_never_ends_is_forgotten(ends):
    model = Net().eval()
    report = fitted(model, 0.6)
    model.train()
    loss = model(rows())
    if ends == "raises":
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    del loss
    peaks, _, said = train(model, 5)
    assert not said
    assert max(peaks) <= report.budget_bytes
    assert torch._C._len_torch_dispatch_stack() == 0


# Layers that are unfrozen after fit: what they save is not in the measured step.


def check_bitwise(model: Net, steps: int) -> None:
    twin = Net()
    for number in range(steps):
        for each in (model, twin):
            each.zero_grad()
            torch.manual_seed(number)
            each(rows()).backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("above", [1.1, 1.5, 3.0])
def test_unfrozen_layers_train_within_every_budget_that_has_room_for_them(above):
    model = Net()
    floor_bytes = floor_of(model)
    freeze(model)
    report = fitted(model, int(above * floor_bytes))
    unfreeze(model)
    peaks, _, said = train(model, 4)
    assert not said
    assert max(peaks) <= report.budget_bytes
    # The first step recomputes every block, later ones use what there is.
    plain = recoup.fit(Net(), rows(), 1.0)[1].plain_peak_bytes
    assert peaks[-1] >= 0.8 * min(plain, report.budget_bytes)
    check_bitwise(model, 2)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_observed_step_of_unfrozen_layers_is_bitwise():
    model = Net()
    freeze(model)
    fitted(model, 0.9)
    unfreeze(model)
    check_bitwise(model, 2)


def test_layers_that_are_unfrozen_one_after_the_other_stay_within_the_budget():
    model = Net()
    floor_bytes = floor_of(model)
    model.blocks[:4].requires_grad_(False)
    report = fitted(model, int(1.2 * floor_bytes))
    for number in (3, 2, 1, 0):
        model.blocks[number].requires_grad_(True)
        peaks, _, said = train(model, 2)
        more, _, again = train(model, 2, ROWS // 2)
        assert not said + again
        assert max(peaks + more) <= report.budget_bytes
    model.eval()
    peaks, _, said = train(model, 2)
    assert not said
    assert max(peaks) <= report.budget_bytes


@pytest.mark.parametrize("first", ["dropped", "copied"])
def test_an_observed_step_that_is_dropped_or_copied_leaves_nothing(first):
    model = Net()
    floor_bytes = floor_of(model)
    freeze(model)
    report = fitted(model, int(1.2 * floor_bytes))
    unfreeze(model)
    loss = model(rows())
    if first == "copied":
        loss.backward()
        other = copy.deepcopy(model)
        report.remove()
        model = other
    del loss
    peaks, _, said = train(model, 3)
    assert not said
    assert max(peaks) <= report.budget_bytes
    assert torch._C._len_torch_dispatch_stack() == 0


# Blocks that did not run when the step was measured.


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
def test_blocks_that_were_not_measured_are_said_if_they_do_not_fit(share):
    model = Net()
    model.order = [0, 1, 4]
    report = fitted(model, share)
    assert not train(model, 1)[2]
    model.order = list(range(DEPTH))
    peaks, when, said = train(model, 4)
    exceeding = [n for n, peak in enumerate(peaks) if peak > report.budget_bytes]
    assert exceeding[:1] == when
    for warning in said:
        assert "blocks.2, blocks.3 ran, which did not" in str(warning)
        assert warning.needed_bytes is not None
        # Besides the blocks there are residual sums.
        assert 0.95 * peaks[0] <= warning.needed_bytes <= peaks[0]


def test_blocks_that_run_again_later_are_silent():
    # As with LayerDrop: the measured step ran all of them.
    model = Net()
    report = fitted(model, 0.7)
    model.order = [0, 2, 4]
    peaks, _, said = train(model, 2)
    model.order = list(range(DEPTH))
    more, _, again = train(model, 2)
    assert not said + again
    assert max(peaks + more) <= report.budget_bytes


# Verification takes memory: a plan is verified before it is measured, or has room.


@pytest.mark.parametrize("verify", ["first", "always"])
def test_no_step_after_fit_exceeds_the_budget_verifying_ones_included(verify):
    model = Net()
    with pytest.raises(recoup.errors.InfeasibleError) as caught:
        fitted(model, 1000, verify=verify)
    for budget in (caught.value.floor_bytes + 256, 0.7):
        report = fitted(model, budget, verify=verify)
        while True:
            peaks, _, said = train(model, 2)
            assert not said
            assert max(peaks) <= report.budget_bytes
            if not report.tighten():
                break
        report.remove()


class Words(nn.Module):
    """Takes integers, so that it can be called in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, WIDTH)
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
                for _ in range(6)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.table(x)).square().mean()


def word_steps(
    call: Callable[[Words, Tensor], Tensor], change: Callable[[Words], Any]
) -> tuple[list[int], list[recoup.errors.BudgetWarning], recoup.results.Fit]:
    """Fit, change the model, and train it by another call."""
    model, x = Words(), torch.arange(512) % 9
    _, report = recoup.fit(model, x, 0.7)
    change(model)
    peaks: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            with StorageMeter() as meter:
                meter.track(model, x)
                call(model, x).backward()
            peaks.append(meter.peak_bytes)
    found = [each.message for each in caught]
    report.remove()
    return (
        peaks,
        [each for each in found if isinstance(each, recoup.errors.BudgetWarning)],
        report,
    )


def test_a_larger_dtype_after_fit_is_within_the_budget_or_said():
    peaks, said, report = word_steps(lambda model, x: model(x), lambda m: m.double())
    assert peaks[0] > report.budget_bytes
    assert "changed to a larger dtype" in str(said[0])
    assert said[0].needed_bytes == peaks[0]


def test_a_smaller_dtype_after_fit_is_within_the_budget():
    peaks, said, report = word_steps(lambda model, x: model(x), lambda m: m.bfloat16())
    assert said == []
    assert max(peaks) <= report.budget_bytes


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: model.forward(x),
        lambda model, x: model.body(model.table(x)).square().mean(),
    ],
    ids=["forward by name", "a part"],
)
def test_a_call_that_no_plan_applies_to_is_said_once(call):
    peaks, said, report = word_steps(call, lambda model: model)
    assert max(peaks) > report.budget_bytes
    assert len(said) == 1
    assert "outside of one" in str(said[0])
    assert said[0].needed_bytes >= max(peaks)


def test_a_table_that_a_loss_uses_too_is_no_such_call():
    def call(model: Words, x: Tensor) -> Tensor:
        return model(x) + model.table(x[:2]).mean()

    _, said, _ = word_steps(call, lambda model: model)
    assert not any("outside of one" in str(each) for each in said)


def test_a_part_that_is_called_without_gradients_is_no_such_call():
    def call(model: Words, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.body(model.table(x))
        return model(x)

    peaks, said, report = word_steps(call, lambda model: model)
    assert said == []
    assert max(peaks) <= report.budget_bytes
