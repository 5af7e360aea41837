"""Autocast: remembered as it stood, put back for a second run."""

import pytest
import torch

from recoup.backend.autograd.autocast import AutocastState, autocast_as, autocast_states


def product_dtype():
    x = torch.ones(2, 2)
    return torch.mm(x, x).dtype


def test_the_cpu_is_always_among_the_states():
    (state,) = autocast_states([])
    assert state == AutocastState("cpu", False, torch.bfloat16, True)


def test_a_device_without_autocast_has_no_state():
    assert [state.device_type for state in autocast_states(["cpu", "meta"])] == ["cpu"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_state_of_a_block_is_remembered(dtype):
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        (state,) = autocast_states([])
    assert state == AutocastState("cpu", True, dtype, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_remembered_state_is_put_back(dtype):
    with torch.autocast("cpu", dtype=dtype):
        states = autocast_states([])
    assert product_dtype() is torch.float32
    with autocast_as(states):
        assert product_dtype() is dtype
        assert autocast_states([]) == states
    assert product_dtype() is torch.float32


def test_a_state_without_autocast_turns_it_off():
    states = autocast_states([])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with autocast_as(states):
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.bfloat16


def test_an_exception_puts_it_back():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = autocast_states([])
    with pytest.raises(KeyError), autocast_as(states):
        raise KeyError("on purpose")
    assert product_dtype() is torch.float32


@pytest.mark.cuda
def test_an_accelerator_has_a_state_of_its_own():
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    kind = accelerator.type
    with torch.autocast(kind, dtype=torch.float16):
        states = {state.device_type: state for state in autocast_states([kind])}
    assert (states[kind].enabled, states[kind].dtype) == (True, torch.float16)
    assert not states["cpu"].enabled
