"""Runs of a region that share a key are verified as a whole, until all of them pass."""

import itertools
import threading

import pytest
import torch
from torch import Tensor, nn

from recoup import CheckpointScope, checkpoint, checkpoint_module, rerun
from recoup.checkpointing import is_recomputing
from recoup.engine.verification.verification_log import LEDGER, Ledger
from recoup.errors import MismatchError
from tests.support.counting import Operators

_names = itertools.count()


class Layers:
    """Three runs of one scope, of which some write where no operator shows it."""

    def __init__(self) -> None:
        self.name = f"layers {next(_names)}"
        self.weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

    def run(self, place: int, x: Tensor, *, wrong: bool) -> Tensor:
        """Run one layer."""
        with CheckpointScope(self.name):
            hidden = (x @ self.weights[place]).tanh()
            if wrong:
                hidden.detach().numpy()[:] *= 0.5
            return hidden.exp().sin()

    def step(self, wrong: set[int]) -> None:
        """One backward through all layers."""
        x = torch.ones(4, 8)
        for place in range(3):
            x = self.run(place, x, wrong=place in wrong)
        x.sum().backward()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_passes_does_not_speak_for_another_that_fails(place):
    layers = Layers()
    for _ in range(4):
        with pytest.raises(MismatchError):
            layers.step(wrong={place})


def reads(step) -> int:
    """Return how many numbers a step reads from the device."""
    with Operators() as operators:
        step()
    return operators.counts["_local_scalar_dense"]


def test_once_all_pass_nothing_is_verified_any_more():
    layers = Layers()
    assert reads(lambda: layers.step(wrong=set())) > 0
    assert reads(lambda: layers.step(wrong=set())) == 0


def test_after_a_failure_nothing_is_verified_any_more_once_it_passed_a_few_times():
    layers = Layers()
    with pytest.raises(MismatchError):
        layers.step(wrong={1})
    verified = [reads(lambda: layers.step(wrong=set())) > 0 for _ in range(6)]
    assert verified == [True] * 4 + [False] * 2


def test_a_failure_in_a_backward_of_its_own_is_found_every_time():
    layers = Layers()
    for _ in range(3):
        x = torch.ones(4, 8)
        outputs = [layers.run(place, x, wrong=place == 1) for place in range(3)]
        outputs[0].sum().backward()
        with pytest.raises(MismatchError):
            outputs[1].sum().backward()
        outputs[2].sum().backward()


def test_a_run_that_passes_between_those_that_fail_does_not_hide_them():
    # As of a discriminator, which goes through what is real, then what is not.
    layers = Layers()
    for _ in range(6):
        with pytest.raises(MismatchError):
            layers.run(0, torch.ones(4, 8), wrong=True).sum().backward()
        layers.run(1, torch.ones(4, 8), wrong=False).sum().backward()


def test_a_run_whose_backward_comes_late_or_never_is_not_waited_for():
    layers = Layers()
    never = layers.run(0, torch.ones(4, 8), wrong=True)
    late = layers.run(1, torch.ones(4, 8), wrong=True)
    layers.step(wrong=set())
    assert reads(lambda: layers.step(wrong=set())) == 0
    with pytest.raises(MismatchError):
        late.sum().backward()
    assert reads(lambda: layers.step(wrong=set())) > 0
    del never


def test_a_backward_that_breaks_off_says_nothing():
    layers = Layers()
    x = torch.ones(4, 8, requires_grad=True)

    def fail(gradient: Tensor) -> Tensor:
        raise KeyError("on purpose")

    before = x * 2
    before.register_hook(fail)
    y = layers.run(0, before, wrong=False)
    with pytest.raises(KeyError):
        y.sum().backward()
    with pytest.raises(MismatchError):
        layers.step(wrong={2})


def test_threads_that_share_a_key_are_judged_each_by_its_own_backward():
    layers = Layers()
    outcomes: dict[bool, list[bool]] = {True: [], False: []}
    barrier = threading.Barrier(2)

    def work(*, wrong: bool) -> None:
        for _ in range(10):
            y = layers.run(int(wrong), torch.ones(4, 8), wrong=wrong)
            barrier.wait()  # both are run before either is judged
            try:
                y.sum().backward()
                outcomes[wrong].append(True)
            except MismatchError:
                outcomes[wrong].append(False)
            barrier.wait()

    threads = [
        threading.Thread(target=work, kwargs={"wrong": wrong})
        for wrong in (True, False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {True: [False] * 10, False: [True] * 10}


def test_a_function_that_is_called_again_is_verified_until_all_it_saves_is_right():
    drift = itertools.count()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        factor = 1 + next(drift)
        return x.exp().sin(), (x * factor).sin()

    compiled = torch.compile(torch.compiler.disable(function), backend="eager")
    for _ in range(3):
        steady, drifting = checkpoint(compiled, torch.ones(4, requires_grad=True))
        with pytest.raises(MismatchError):
            (steady + drifting).sum().backward()


def test_what_a_backward_does_not_ask_for_is_verified_with_the_rest():
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        factor = 2.0 if is_recomputing() else 1.0
        return x.exp().sin(), (x * factor).sin()

    compiled = torch.compile(torch.compiler.disable(function), backend="eager")
    steady, _ = checkpoint(compiled, torch.ones(4, requires_grad=True))
    with pytest.raises(MismatchError, match="1 of "):
        steady.sum().backward()


class TestWithoutContents:
    """Nothing can be verified on tensors that have no numbers, and nothing is."""

    def test_a_region_on_the_meta_device_runs_both_ways(self):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            x = torch.ones(2, 4)
        checkpoint_module(model)(x).sum().backward()
        for verify in ("first", "always", "full"):
            with CheckpointScope(f"meta {next(_names)}", verify=verify):
                y = model[0](x).tanh().exp().sin()
            y.sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_a_function_on_the_meta_device_is_called_again(self):
        x = torch.ones(2, 4, device="meta", requires_grad=True)
        compiled = torch.compile(lambda t: t.exp().sin(), backend="eager")
        checkpoint(compiled, x).sum().backward()
        assert x.grad is not None

    @pytest.mark.parametrize("device", ["meta", "cpu"])
    def test_it_does_not_count_as_verified(self, device):
        name = f"without contents {next(_names)}"

        def run(device: str, *, wrong: bool) -> None:
            x = torch.ones(4, device=device, requires_grad=True)
            scale = torch.ones(4, device=device)
            with CheckpointScope(name):
                y = (x * (scale * 2)).sin()
            if wrong:
                scale.data.add_(1)
            y.sum().backward()

        run(device, wrong=False)
        if device == "meta":
            with pytest.raises(MismatchError):
                run("cpu", wrong=True)
        else:
            run("cpu", wrong=True)


class TestLedger:
    def test_operators_that_come_by_turns_are_each_verified_once(self):
        ledger, verified = Ledger(), []
        for signature in (1, 2, 1, 2, 1, 2, 1, 2):
            if ledger.needs("key"):
                verified.append(signature)
                ledger.done("key", signature)
            else:
                ledger.ran("key", signature)
        # The second came unverified; what ran next was verified too, and then itself.
        assert verified == [1, 1, 2]

    def test_operators_that_never_come_again_are_not_waited_for_without_end(self):
        ledger = Ledger()
        ledger.done("key", 1)
        ledger.ran("key", 2)
        verified = 0
        while ledger.needs("key"):
            ledger.done("key", 1)
            verified += 1
        assert verified == 4

    def test_a_failure_undoes_what_was_verified(self):
        ledger = Ledger()
        ledger.passed("key", {1}, ledger.moment)
        ledger.passed("other", {1}, ledger.moment)
        ledger.failed("key")
        assert ledger.needs("key")
        assert not ledger.needs("other")

    def test_what_ran_before_a_failure_does_not_make_up_for_it(self):
        ledger = Ledger()
        before = ledger.moment
        ledger.failed("key")
        for _ in range(10):
            ledger.passed("key", {1}, before)
            ledger.done("key", 1)
        assert ledger.needs("key")

    def test_a_few_that_pass_in_a_row_make_up_for_a_failure(self):
        ledger = Ledger()
        for passes in (3, 3, 4):
            ledger.failed("key")
            for _ in range(passes):
                assert ledger.needs("key")
                ledger.passed("key", {1}, ledger.moment)
        assert not ledger.needs("key")

    def test_a_key_is_forgotten_with_its_owner(self):
        class Owner:
            pass

        ledger, owner = Ledger(), Owner()
        for _ in range(2):
            ledger.forget_with(owner, "key")
        ledger.passed("key", {1}, ledger.moment)
        assert len(ledger) == 1
        del owner
        assert len(ledger) == 0
        assert ledger.needs("key")


def test_nothing_is_remembered_of_modules_that_were_called_again_and_are_gone():
    def run() -> None:
        module = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        for function in (module, module.forward):
            rerun(function, torch.ones(4, requires_grad=True)).sum().backward()

    run()
    before = len(LEDGER)
    run()
    assert len(LEDGER) == before
