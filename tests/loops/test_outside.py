"""Steps that leave tensors behind: a gradient that would be lost is an error."""

import types
from collections import OrderedDict, deque
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from recoup import checkpointed_loop
from recoup.errors import CaptureError, UsageError
from recoup.schedules import Online, Revolve

STEPS = 40


def start():
    return torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)


def appends():
    kept = []

    def step(state, index):
        kept.append(torch.sin(state))
        return kept[-1]

    return step


def appends_by_a_bound_method():
    append = [].append

    def step(state, index):
        append(torch.sin(state))
        return torch.sin(state)

    return step


def extends_a_deque_in_a_dictionary():
    kept = {"last": deque(maxlen=2)}

    def step(state, index):
        kept["last"].append(torch.sin(state))
        return torch.sin(state)

    return step


def adds_to_a_variable():
    total = torch.zeros(2, dtype=torch.float64)

    def step(state, index):
        nonlocal total
        total = total + state
        return torch.sin(state)

    return step


def writes_to_an_attribute():
    holder = types.SimpleNamespace(last=None)

    def step(state, index):
        holder.last = torch.sin(state)
        return torch.sin(state)

    return step


def writes_to_a_slot():
    class Holder:
        __slots__ = ("last",)

    holder = Holder()

    def step(state, index):
        holder.last = torch.sin(state)
        return torch.sin(state)

    return step


def fills_a_table():
    table = torch.zeros(STEPS, 2, dtype=torch.float64)

    def step(state, index):
        state = torch.sin(state)
        table[index] = state
        return state

    return step


def keeps_one_early_state(of=5):
    kept = []

    def step(state, index):
        state = torch.sin(state)
        if index == of:
            kept.append(state)
        return state

    return step


def replaces_its_weight():
    weight = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def step(state, index):
        nonlocal weight
        weight = weight * 1.0
        return torch.sin(state) * weight

    return step


LEAVING = [
    appends,
    appends_by_a_bound_method,
    extends_a_deque_in_a_dictionary,
    adds_to_a_variable,
    writes_to_an_attribute,
    writes_to_a_slot,
    fills_a_table,
    keeps_one_early_state,
    replaces_its_weight,
]


@pytest.mark.parametrize("make", LEAVING)
def test_a_tensor_left_outside_the_state_is_an_error_in_forward(make):
    schedule = Revolve(STEPS, slots=4)
    with pytest.raises(CaptureError, match="would be lost"):
        checkpointed_loop(make(), start(), STEPS, with_index=True, schedule=schedule)


@pytest.mark.parametrize("make", [appends, adds_to_a_variable, writes_to_an_attribute])
def test_a_tensor_left_outside_the_state_is_an_error_in_a_loop_of_unknown_length(make):
    step = make()
    with pytest.raises(CaptureError, match="would be lost"):
        checkpointed_loop(
            lambda state: step(state, 0),
            start(),
            STEPS,
            condition=lambda state: True,
            schedule=Online(slots=4),
        )


def test_a_tensor_left_by_the_first_step_is_found_in_backward():
    step = keeps_one_early_state(of=0)
    final, _ = checkpointed_loop(step, start(), STEPS, with_index=True)
    with pytest.raises(CaptureError, match="keeps a tensor"):
        final.sum().backward()


def test_without_gradients_a_step_may_keep_tensors():
    kept = []
    with torch.no_grad():
        checkpointed_loop(lambda h: kept.append(h) or h * 0.5, start(), STEPS)
    assert len(kept) == STEPS


def test_a_cache_made_by_the_first_step_is_allowed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
            self.cache = None

        def forward(self, state):
            if self.cache is None:
                self.cache = torch.arange(2.0, dtype=torch.float64)
            return torch.sin(state * self.weight + self.cache)

    model, twin = Scaled(), Scaled()
    checkpointed_loop(model, start(), STEPS)[0].sum().backward()
    state = start()
    for _ in range(STEPS):
        state = twin(state)
    state.sum().backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_computed_by_a_hook_are_allowed():
    def gradients(checkpointed):
        torch.manual_seed(0)
        layer = nn.utils.weight_norm(nn.Linear(2, 2).double())
        state = start()
        if checkpointed:
            state, _ = checkpointed_loop(lambda h: torch.tanh(layer(h)), state, STEPS)
        else:
            for _ in range(STEPS):
                state = torch.tanh(layer(state))
        state.sum().backward()
        return [parameter.grad for parameter in layer.parameters()]

    found, expected = gradients(checkpointed=True), gradients(checkpointed=False)
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)  # pyright: ignore[reportArgumentType]


def test_running_statistics_are_those_of_the_plain_loop():
    def run(checkpointed):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3).double()
        state = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        if checkpointed:
            schedule = Revolve(STEPS, slots=3)
            state, _ = checkpointed_loop(
                lambda h: torch.tanh(norm(h)), state, STEPS, schedule=schedule
            )
        else:
            for _ in range(STEPS):
                state = torch.tanh(norm(state))
        (state * torch.arange(3)).sum().backward()
        return [norm.weight.grad, *norm.buffers()]

    found, expected = run(checkpointed=True), run(checkpointed=False)
    assert len(found) == 4
    assert all(map(torch.equal, found, expected))


def test_a_hidden_capture_that_some_steps_use_is_an_error():
    module = types.ModuleType("hidden")
    module.weight = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)  # pyright: ignore[reportAttributeAccessIssue]
    known = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)

    def step(state, index):
        return state * (known if index >= STEPS // 2 else module.weight)

    final, _ = checkpointed_loop(step, start(), STEPS, with_index=True)
    with pytest.raises(CaptureError, match="captures="):
        final.sum().backward()


@dataclass
class Wrapped:
    h: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (Wrapped, lambda state: state.h),
        (lambda h: OrderedDict(h=h), lambda state: state["h"]),
        (lambda h: lambda: h, lambda state: state()),
        (lambda h: (part for part in [h]), next),
    ],
)
def test_tensors_hidden_in_a_part_of_the_state_are_an_error(wrap, unwrap):
    def step(state):
        count, held = state
        return count + 1, wrap(torch.sin(unwrap(held)))

    with pytest.raises(UsageError, match="tuples, lists and dictionaries"):
        checkpointed_loop(step, (torch.zeros(()), wrap(start())), STEPS)


def test_parameters_of_a_module_in_the_state_get_their_gradients():
    layer = nn.Linear(2, 2).double()

    def step(state):
        layer, h = state
        return layer, torch.tanh(layer(h))

    (_, final), _ = checkpointed_loop(step, (layer, start()), STEPS)
    final.sum().backward()
    found = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    h = start()
    for _ in range(STEPS):
        h = torch.tanh(layer(h))
    h.sum().backward()
    assert all(map(torch.equal, found, (p.grad for p in layer.parameters())))  # pyright: ignore[reportArgumentType]


def test_a_result_that_replaces_a_captured_variable_is_an_error():
    state = start()
    before = state
    helper = lambda: state * 0.5  # noqa: E731 (late binding is the point)

    def step(h):
        return torch.sin(h) + helper()

    schedule = Revolve(STEPS, slots=3)
    state, _ = checkpointed_loop(step, before, STEPS, schedule=schedule)
    with pytest.raises((CaptureError, RuntimeError)):
        state.sum().backward()


def test_leaves_that_share_memory_are_separated():
    begin = start()
    (one, other), _ = checkpointed_loop(
        lambda state: (torch.sin(state[0]),) * 2, (begin, begin), 3
    )
    one.mul_(2)
    assert torch.equal(one, 2 * other)
    (found,) = torch.autograd.grad((one + other).sum(), begin)
    h = begin
    for _ in range(3):
        h = torch.sin(h)
    (expected,) = torch.autograd.grad((3 * h).sum(), begin)
    assert torch.equal(found, expected)


def test_measuring_for_a_budget_leaves_no_trace_and_uses_given_captures():
    def run(**arguments):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3).double()
        module = types.ModuleType("hidden")
        module.weight = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)  # pyright: ignore[reportAttributeAccessIssue]
        state = torch.randn(5, 3, dtype=torch.float64)
        final, _ = checkpointed_loop(
            lambda h: torch.tanh(norm(h) * module.weight),
            state,
            STEPS,
            captures=[module.weight],
            **arguments,
        )
        (final * torch.arange(3)).sum().backward()
        return [module.weight.grad, *norm.buffers()]

    assert all(map(torch.equal, run(budget="4KiB"), run(num_checkpoints=0)))


def test_a_hook_on_a_captured_tensor_is_called_once():
    def run(loop):
        weight = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
        calls = []
        weight.register_hook(lambda gradient: calls.append(1) or gradient * 2)
        final = loop(lambda h: torch.sin(h) * weight, start())
        final.sum().backward()
        return weight.grad, len(calls)

    def plain(step, state):
        for _ in range(STEPS):
            state = step(state)
        return state

    found = run(lambda step, state: checkpointed_loop(step, state, STEPS)[0])
    assert found == run(plain)
    assert found[1] == 1
