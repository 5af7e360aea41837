"""Source rewriting: loops whose writes differ from those of Python run plain."""

import collections

import numpy as np
import pytest
import torch

from recoup.loops import grad

SHORT = {"min_loop_size": 2, "num_checkpoints": 4}
X, W = (torch.tensor(value, dtype=torch.float64) for value in (0.7, 1.02))

# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def two_names_for_one_tensor(x, w):
    a = zeros(40)
    b = a
    for i in range(40):
        x = torch.sin(x * w + b.sum() / 99)
        a[i] = x
        b.mul_(0.99)
    return a.square().sum() + b.sum()


def a_tensor_and_a_view_of_it(x, w):
    base = x.repeat(4)
    part = base[:2]
    for i in range(40):
        base.mul_(w * 0.99)
        part[i % 2] = torch.sin(x)
    return base.sum() + part.sum()


def a_tensor_that_is_in_a_container_too(x, w):
    h = zeros(40)
    state = {"h": h, "x": x}
    for i in range(40):
        state["x"] = torch.sin(state["x"] * w + state["h"].sum() / 99)
        h[i] = state["x"]
    return state["h"].square().sum()


def a_list_by_two_names(x, w):
    one = [x, x]
    other = one
    for i in range(40):
        one[i % 2] = torch.sin(other[0] * w)
        other[1] = one[0] * w
    return one[0] + other[1]


def a_view_that_the_loop_reads(x, w):
    history = zeros(40)
    view = history.view(4, 10)
    for i in range(40):
        x = torch.sin(x * w + view.sum() / 99)
        history[i] = x
    return x


def a_container_that_the_loop_reads(x, w):
    state = {"x": x}
    same = {"state": state}
    for _ in range(40):
        state["x"] = torch.sin(same["state"]["x"] * w)
    return state["x"]


def a_write_and_another_value(x, w):
    h = x.repeat(2)
    first = h
    for _ in range(40):
        h[0] = torch.sin(x)
        h = h * w
    return h.sum() + first.sum()


def a_write_that_comes_late(x, w):
    h = x.repeat(2)
    first = h
    for i in range(40):
        x = torch.sin(x * w)
        if i > 20:
            h[0] = x
    return first.sum() + h.sum()


def a_variable_that_is_cloned_on_the_way(x, w):
    h = zeros(40)
    first = h
    for i in range(40):
        x = torch.sin(x * w)
        if i == 20:
            h = h.clone()
        h[i] = x
    return first.square().sum() + h.sum()


def a_swap(x, w):
    a, b = x.repeat(2), x.repeat(2) * 2
    first = a
    for _ in range(41):
        a.mul_(w)
        a, b = b, a
    return first.sum() * 2 + a.sum() + b.sum() * 3


def add_to(tensor, value):
    tensor.add_(value)


def a_function_that_writes(x, w):
    h = x.repeat(2)
    first = h
    for i in range(40):
        add_to(h, torch.sin(x) * w)
        if i == 100:
            h = h * 2
    return first.sum()


def a_tensor_in_a_list_that_is_made_anew(x, w):
    box = [x.repeat(2)]
    first = box[0]
    for i in range(40):
        inner = box[0]
        inner[i % 2] = torch.sin(x * w + i)
        box = [inner]
    return first.sum() + box[0].sum()


def a_view_that_leaves_the_loop(x, w):
    h = zeros(40)
    for i in range(40):
        x = torch.sin(x * w)
        h[i] = x
        part = h[:3]
    h.mul_(2)
    return part.sum()


def a_list_that_holds_what_is_written_to(x, w):
    h, kept = x.repeat(2), []
    for _ in range(40):
        h.mul_(w)
        kept.append(h)
    return sum(kept).sum()


def a_write_in_the_iteration_that_ends_the_loop(x, w):
    h = x.repeat(2)
    for i in range(100):
        h.mul_(w)
        if i == 60:
            break
    return h.sum()


def a_write_in_the_iteration_that_returns(x, w):
    total = x * 0
    for i in range(100):
        total += torch.sin(x * w)
        if i == 60:
            return total * 2
    return total


def a_table_of_another_kind(x, w):
    state = collections.defaultdict(float, y=x * 0)
    for _ in range(40):
        x = torch.sin(x * w)
        state["y"] += x
    return state["y"]


def a_numpy_array_beside_tensors(x, w):
    counts = np.zeros(2)
    for i in range(40):
        counts[i % 2] += 1
        x = torch.sin(x * w * float(counts[0]))
    return x * float(counts.sum())


def elements_that_are_written_to(x, w):
    rows = [x * k for k in range(40)]
    total = x * 0
    for row in rows:
        row.mul_(w)
        total = total + torch.sin(row)
    return total + rows[3]


def a_transposition_in_place(x, w):
    h = torch.stack([x, x * 2, x * 3, x * 4]).reshape(2, 2)
    first = h
    for i in range(41):
        h.mul_(w)
        if i % 2 == 0:
            h.t_()
    return first[0, 1] * 5 + h[1, 0]


def a_part_of_a_result_written_to_afterwards(x, w):
    h = x.repeat(4)
    for _ in range(40):
        h = torch.sin(h * w)
        part = h[:2]
    h = h.mul_(2)
    return part.sum()


def an_element_gone_over_written_to_afterwards(x, w):
    rows = [x * k for k in range(40)]
    for row in rows:
        x = torch.sin(x * w + row)
        last = row
    last.mul_(w)
    return x + rows[-1]


PLAIN = [
    a_part_of_a_result_written_to_afterwards,
    an_element_gone_over_written_to_afterwards,
    two_names_for_one_tensor,
    a_tensor_and_a_view_of_it,
    a_tensor_that_is_in_a_container_too,
    a_list_by_two_names,
    a_view_that_the_loop_reads,
    a_container_that_the_loop_reads,
    a_write_and_another_value,
    a_write_that_comes_late,
    a_variable_that_is_cloned_on_the_way,
    a_swap,
    a_function_that_writes,
    a_tensor_in_a_list_that_is_made_anew,
    a_view_that_leaves_the_loop,
    a_list_that_holds_what_is_written_to,
    a_write_in_the_iteration_that_ends_the_loop,
    a_write_in_the_iteration_that_returns,
    a_table_of_another_kind,
    a_numpy_array_beside_tensors,
    elements_that_are_written_to,
    a_transposition_in_place,
]


@pytest.mark.parametrize("function", PLAIN, ids=lambda f: f.__name__)
def test_a_write_that_cannot_be_tracked_keeps_the_loop_plain(function):
    expected = grad(function, (0, 1))(X, W)
    derivative = grad(function, (0, 1), checkpoint=SHORT)
    with pytest.warns(UserWarning, match="is not checkpointed and runs plain: it writ"):
        found = derivative(X, W)
    assert all(map(torch.equal, found, expected))
