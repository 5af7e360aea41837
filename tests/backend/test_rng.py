"""Random state: which generator an operator draws from, and putting it back."""

import pytest
import torch

from recoup.backend.state.rng import (
    default_generator,
    default_states,
    devices_in_use,
    generator_of,
    random_state,
    same_state,
)
from tests.support.watching import CPU_STATE_BYTES


class TestFinding:
    def test_a_generator_that_is_given_is_used(self):
        own = torch.Generator()
        assert generator_of((torch.ones(1),), {"generator": own}) is own
        assert generator_of((torch.ones(1), own), {}) is own

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((torch.ones(1),), {}),
            (([torch.ones(1)],), {}),
            (([3],), {}),
            (([3],), {"device": "cpu"}),
            (([3],), {"device": torch.device("cpu"), "generator": None}),
            (([3],), {"device": "meta"}),
            ((), {}),
        ],
    )
    def test_else_the_default_one_of_the_device(self, args, kwargs):
        assert generator_of(args, kwargs) is torch.default_generator

    @pytest.mark.cuda
    def test_an_accelerator_has_its_own(self):
        device = torch.accelerator.current_accelerator()
        x = torch.ones(1, device=device)
        generator = generator_of((x,), {})
        assert generator.device.type == x.device.type
        assert generator is default_generator(x.device)
        assert generator_of(([3],), {"device": device}) is generator
        on_cpu = torch.ones(1)
        assert generator_of((on_cpu,), {"device": device}) is generator
        assert generator_of((on_cpu, [x]), {}) is generator
        assert generator_of((x,), {"device": "cpu"}) is torch.default_generator
        state = generator.get_state()
        torch.rand(3, device=device)
        assert not same_state(state, generator.get_state())


class TestStates:
    def test_the_state_of_the_cpu_has_the_known_size(self):
        assert torch.default_generator.get_state().nbytes == CPU_STATE_BYTES

    def test_states_are_compared_by_their_bytes(self):
        before = torch.default_generator.get_state()
        assert same_state(before, torch.default_generator.get_state())
        torch.rand(1)
        assert not same_state(before, torch.default_generator.get_state())

    def test_a_block_runs_in_a_state_and_leaves_the_generator_as_it_was(self):
        generator = torch.default_generator
        state = generator.get_state()
        first = torch.rand(3)
        torch.rand(5)
        now = generator.get_state()
        with random_state(generator, state):
            assert torch.equal(torch.rand(3), first)
        assert same_state(generator.get_state(), now)

    def test_an_exception_puts_the_generator_back(self):
        generator = torch.Generator()
        now = generator.get_state()

        def fail():
            with random_state(generator, now):
                torch.rand(3, generator=generator)
                raise KeyError("on purpose")

        with pytest.raises(KeyError):
            fail()
        assert same_state(generator.get_state(), now)

    def test_the_default_states_include_the_cpu_once(self):
        devices = [torch.device("cpu"), torch.device("cpu")]
        ((generator, state),) = default_states(devices)
        assert generator is torch.default_generator
        assert same_state(state, generator.get_state())

    @pytest.mark.cuda
    def test_the_default_states_include_the_accelerators(self):
        device = torch.ones(1, device=torch.accelerator.current_accelerator()).device
        assert len(default_states([device, device])) == 2


class TestDevicesInUse:
    def test_a_runtime_that_was_not_started_is_asked_nothing(self, monkeypatch):
        # As with a CUDA build on a machine without a driver: the accelerator has a
        # name, and every question to its runtime is an error.
        asked = []
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda: torch.device("cuda")
        )
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        for name in ("is_current_stream_capturing", "device_count"):
            monkeypatch.setattr(torch.cuda, name, lambda: asked.append("runtime"))
        assert devices_in_use() == []
        assert asked == []
