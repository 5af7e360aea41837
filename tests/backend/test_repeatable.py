"""Which calls give the same bits when they run again, by operator and device."""

import pytest
import torch

from recoup.backend.operators import repeatable
from recoup.backend.operators.properties import facts_of, name_of
from recoup.backend.operators.repeatable import is_repeatable

aten = torch.ops.aten
ROWS = torch.zeros(3, dtype=torch.long)


def repeats(operator, *args, **kwargs) -> bool:
    return is_repeatable(name_of(operator), args, kwargs)


@pytest.mark.parametrize(
    "listed", [repeatable.CHOOSING, repeatable.GATHERING, repeatable._ATOMIC]
)
def test_every_operator_on_a_list_exists(listed):
    names = torch._C._dispatch_get_all_op_names()
    bases = {name.partition(".")[0] for name in names}
    assert sorted(b for b in listed if not {b, b + "_"} & bases) == []


def test_the_short_lists_are_parts_of_the_long_one():
    short = repeatable._ADDING | repeatable._ORDERED_ON_CUDA | repeatable._RACING_ON_CPU
    assert {f"aten::{base}" for base in short} <= repeatable.VARYING


def test_float_sums_in_any_order_vary_on_accelerators_only():
    x = torch.zeros(3)
    for operator in (aten.index_add.default, aten.scatter_add_.default):
        facts = facts_of(operator)
        assert (facts.opaque, facts.may_vary) == (False, True)
        assert repeats(operator, x, 0, ROWS, x)
        assert not repeats(operator, x.to("meta"), 0, ROWS, x)


def test_sums_of_integers_are_exact_in_any_order():
    ints, floats = (torch.zeros(3, dtype=d, device="meta") for d in (torch.int, None))
    assert repeats(aten.cumsum.default, ints, 0)
    assert not repeats(aten.cumsum.default, floats, 0)
    assert not repeats(aten.cumsum.default, ints, 0, dtype=torch.float32)
    assert repeats(aten.scatter_add.default, ints, 0, ROWS, ints)
    assert repeats(aten.bincount.default, ints)
    assert not repeats(aten.bincount.default, ints, floats)
    assert repeats(aten.histc.default, ints, 4, 0, 3)
    assert not repeats(aten.histc.default, floats, 4, 0, 3)


def test_one_number_may_be_written_in_any_order():
    x = torch.zeros(3, device="meta")
    assert repeats(aten.scatter.value, x, 0, ROWS, 1.0)
    assert not repeats(aten.scatter.src, x, 0, ROWS, x)


@pytest.mark.parametrize("base", sorted(repeatable.CHOOSING))
def test_choices_repeat_on_a_cpu_and_not_on_a_device_nobody_knows(base):
    name = base.replace("::", ".") + ".default"
    assert is_repeatable(name, (torch.zeros(3),), {})
    assert not is_repeatable(name, (torch.zeros(3, device="meta"),), {})


def test_an_operator_on_no_list_repeats_anywhere():
    assert repeats(aten.exp.default, torch.zeros(3, device="meta"))
