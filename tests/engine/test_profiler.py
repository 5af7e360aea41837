"""The profiler: bytes that autograd would have kept, minus bytes that are kept."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from recoup import (
    CheckpointGroup,
    CheckpointProfiler,
    CheckpointScope,
    KeepCostly,
    checkpoint,
    checkpoint_module,
    rerun,
)
from recoup.errors import UsageError
from tests.support.steps import Block, problems
from tests.support.twin import leftovers
from tests.support.watching import CPU_STATE_BYTES, Memory, saved_bytes

PROBLEMS = problems()
FLOAT_BYTES = 4


def leaf(count: int = 1000) -> Any:
    return torch.linspace(-1, 1, count, requires_grad=True)


def scoped(model, x):
    with CheckpointScope("model"):
        return model(x)


def twice_scoped(model, x):
    with CheckpointScope("outer"), CheckpointScope("inner"):
        return model(x)


def kept(model, x):
    with CheckpointScope("model", use_recomputation=False):
        return model(x)


def off(model, x):
    with CheckpointScope("model", enabled=False):
        return model(x)


def costly(model, x):
    with CheckpointScope("model", policy=KeepCostly()):
        return model(x)


def grouped(model, x):
    return CheckpointGroup().checkpoint_fn(x, model)


class TestExactness:
    @pytest.mark.parametrize(
        "call",
        [scoped, twice_scoped, kept, off, costly, grouped, checkpoint, rerun],
        ids=lambda call: call.__name__,
    )
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_it_saves_the_twins_bytes_minus_ours(self, name, call):
        model, x = PROBLEMS[name]
        model.eval()  # no generator states, which are counted by hand below
        plain = saved_bytes(lambda: model(x))
        ours = saved_bytes(lambda: call(model, x))
        with CheckpointProfiler() as profiler:
            out = call(model, x)
        model.train()
        # A call that is run again keeps the state of the generator in any case.
        states = CPU_STATE_BYTES if call is rerun else 0
        assert profiler.plain_bytes() == plain
        assert profiler.kept_bytes() == ours + states
        del out
        weights = list(model.parameters())
        model.eval()
        activations = saved_bytes(lambda: model(x), *weights)
        activations -= saved_bytes(lambda: call(model, x), *weights)
        model.train()
        assert profiler.memory_saved() == activations - states

    @pytest.mark.parametrize(("dropout", "states"), [(0.0, 0), (0.1, 2)])
    def test_states_of_the_generator_are_part_of_what_is_kept(self, dropout, states):
        model, x = Block(dropout=dropout), torch.randn(2, 8, 16)
        plain = saved_bytes(lambda: model(x), *model.parameters())
        ours = saved_bytes(lambda: scoped(model, x), *model.parameters())
        with CheckpointProfiler() as profiler:
            out = scoped(model, x)
        assert profiler.memory_saved() == plain - ours - states * CPU_STATE_BYTES
        del out

    def test_many_scopes_and_plain_code_between_them(self):
        blocks = [Block() for _ in range(4)]

        def forward(scopes):
            x = torch.randn(2, 8, 16)
            for index, block in enumerate(blocks):
                with CheckpointScope(f"block{index}", enabled=index in scopes):
                    x = block(x)
            return x

        weights = [weight for block in blocks for weight in block.parameters()]
        plain = saved_bytes(lambda: forward({}), *weights)
        ours = saved_bytes(lambda: forward({0, 3}), *weights)
        with CheckpointProfiler() as profiler:
            out = forward({0, 3})
        assert profiler.checkpoint_count() == 2
        assert profiler.memory_saved() == plain - ours
        assert profiler.memory_saved() > 0
        del out

    def test_scopes_in_a_scope(self):
        blocks = [Block() for _ in range(3)]

        def forward(enabled):
            x = torch.randn(2, 8, 16)
            with CheckpointScope("outer", enabled=enabled):
                for block in blocks:
                    with CheckpointScope("inner", enabled=enabled):
                        x = block(x)
            return x

        plain = saved_bytes(lambda: forward(False))
        ours = saved_bytes(lambda: forward(True))
        with CheckpointProfiler() as profiler:
            out = forward(True)
        assert profiler.checkpoint_count() == 4
        assert (profiler.plain_bytes(), profiler.kept_bytes()) == (plain, ours)
        del out

    def test_a_module_form(self):
        model, x = nn.Sequential(Block(), Block()), torch.randn(2, 8, 16)
        plain = saved_bytes(lambda: model(x), *model.parameters())
        for block in model:
            checkpoint_module(block)
        ours = saved_bytes(lambda: model(x), *model.parameters())
        with CheckpointProfiler() as profiler:
            out = model(x)
        assert profiler.checkpoint_count() == 2
        assert profiler.memory_saved() == plain - ours
        del out

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_compiled_function(self, backend):
        function = torch.compile(lambda t: t.exp().sin().tanh(), backend=backend)
        x = leaf()
        plain = saved_bytes(lambda: function(x))
        with CheckpointProfiler() as profiler:
            out = checkpoint(function, x)
        assert profiler.checkpoint_count() == 1
        assert profiler.plain_bytes() == plain
        assert profiler.kept_bytes() == x.nbytes + CPU_STATE_BYTES
        del out

    def test_a_tensor_of_a_scope_that_is_saved_outside_is_kept(self):
        x = leaf()
        with CheckpointProfiler() as profiler:
            with CheckpointScope("block"):
                y = x.exp()
            z = y.sin()
        # Plain autograd keeps y; here x is kept to recompute y, and y as well.
        assert profiler.plain_bytes() == y.nbytes
        assert profiler.kept_bytes() == x.nbytes + y.nbytes
        assert profiler.memory_saved() == -x.nbytes
        del z

    def test_several_steps_add_up(self):
        x = leaf()

        def step():
            with CheckpointScope("block"):
                y = torch.dropout(x.exp(), 0.5, train=True).sin()
            y.sum().backward()

        found = []
        for steps in (1, 2, 5):
            with CheckpointProfiler() as profiler:
                for _ in range(steps):
                    step()
            states = steps * CPU_STATE_BYTES
            found.append(profiler.plain_bytes() // steps)
            assert profiler.kept_bytes() == x.nbytes + states
        assert found[0] == found[1] == found[2]


class TestTracking:
    def test_a_new_profiler_has_counted_nothing(self):
        profiler = CheckpointProfiler()
        assert (profiler.memory_saved(), profiler.checkpoint_count()) == (0, 0)

    @pytest.mark.parametrize("count", [0, 1, 7])
    def test_every_region_counts_once(self, count):
        with CheckpointProfiler() as profiler:
            y = leaf()
            for _ in range(count):
                y = checkpoint(lambda t: t.sin().exp(), y)
        assert profiler.checkpoint_count() == count

    def test_the_calls_of_a_group_count_one_by_one(self):
        group = CheckpointGroup()
        with CheckpointProfiler() as profiler:
            y = leaf()
            for _ in range(3):
                y = group.checkpoint_fn(y, torch.sin)
        assert profiler.checkpoint_count() == 3

    def test_what_runs_before_and_after_does_not_count(self):
        profiler = CheckpointProfiler()
        group = CheckpointGroup()
        x = leaf()

        def run():
            with CheckpointScope("block"):
                y = x.exp().sin().tanh()
            return group.checkpoint_fn(y, lambda t: t.exp().sin().tanh()).exp()

        outputs = [run()]
        profiler.start_tracking()
        outputs.append(run())
        profiler.stop_tracking()
        found = profiler.plain_bytes(), profiler.kept_bytes()
        outputs.append(run())
        assert profiler.checkpoint_count() == 2
        assert (profiler.plain_bytes(), profiler.kept_bytes()) == found
        assert found == (saved_bytes(lambda: plain_run(x)), saved_bytes(run))

    def test_starting_again_sets_the_counts_back(self):
        profiler = CheckpointProfiler()
        for _ in range(2):
            profiler.start_tracking()
            y = checkpoint(lambda t: t.exp().sin().tanh(), leaf())
            profiler.stop_tracking()
            assert (profiler.checkpoint_count(), profiler.memory_saved()) == (1, 4000)
            del y
        profiler.reset_statistics()
        assert (profiler.checkpoint_count(), profiler.memory_saved()) == (0, 0)

    def test_resetting_while_tracking_goes_on_from_zero(self):
        with CheckpointProfiler() as profiler:
            outputs = [checkpoint(lambda t: t.exp().sin().tanh(), leaf())]
            profiler.reset_statistics()
            outputs.append(checkpoint(lambda t: t.exp().sin().tanh(), leaf()))
        assert (profiler.checkpoint_count(), profiler.memory_saved()) == (1, 4000)

    def test_starting_twice_is_refused(self):
        with (
            CheckpointProfiler() as profiler,
            pytest.raises(UsageError, match="expected a profiler that is not tracking"),
        ):
            profiler.start_tracking()
        assert list(leftovers()) == []

    def test_stopping_twice_does_nothing(self):
        profiler = CheckpointProfiler()
        profiler.stop_tracking()
        profiler.start_tracking()
        profiler.stop_tracking()
        profiler.stop_tracking()
        assert list(leftovers()) == []

    def test_an_exception_stops_it(self):
        with pytest.raises(KeyError), CheckpointProfiler() as profiler:
            raise KeyError("on purpose")
        checkpoint(torch.exp, leaf())
        assert profiler.checkpoint_count() == 0
        assert list(leftovers()) == []

    def test_gradients_are_those_of_the_plain_run(self):
        def forward(x):
            with CheckpointScope("block"):
                y = x.exp().sin()
            return y.tanh().exp()

        x, twin = leaf(), leaf()
        with CheckpointProfiler():
            forward(x).sum().backward()
        twin.exp().sin().tanh().exp().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_it_keeps_no_memory_alive(self):
        profiler = CheckpointProfiler()
        with profiler:
            outside = leaf() * 2
            with CheckpointScope("block"):
                y = outside.exp().sin()
            z = y.exp().tanh()
        memories = [Memory(tensor) for tensor in (outside, y, z)]
        del outside, y, z
        assert all(memory.is_freed for memory in memories)
        assert profiler.checkpoint_count() == 1


def plain_run(x):
    """What `run` above does, without regions."""
    return x.exp().sin().tanh().exp().sin().tanh().exp()


class TestSeveral:
    def test_nested_profilers_agree(self):
        with CheckpointProfiler() as outer, CheckpointProfiler() as inner:
            with CheckpointScope("block"):
                y = leaf().exp()
            z = y.sin()
        assert outer.checkpoint_count() == inner.checkpoint_count() == 1
        assert outer.plain_bytes() == inner.plain_bytes()
        assert outer.kept_bytes() == inner.kept_bytes()
        del z

    def test_an_outer_profiler_counts_more(self):
        x = leaf()
        with CheckpointProfiler() as outer:
            first = checkpoint(lambda t: t.exp().sin().tanh(), x)
            with CheckpointProfiler() as inner:
                second = checkpoint(lambda t: t.exp().sin().tanh(), x)
            third = checkpoint(lambda t: t.exp().sin().tanh(), x)
        assert (outer.checkpoint_count(), inner.checkpoint_count()) == (3, 1)
        assert inner.memory_saved() == x.nbytes
        assert outer.memory_saved() == 3 * 2 * x.nbytes - x.nbytes
        del first, second, third

    def test_a_profiler_that_ends_before_one_inside_it_is_refused_unharmed(self):
        outer, inner = CheckpointProfiler(), CheckpointProfiler()
        outer.start_tracking()
        inner.start_tracking()
        with pytest.raises(UsageError, match="entered since"):
            outer.stop_tracking()
        y = checkpoint(lambda t: t.exp().sin().tanh(), leaf())
        inner.stop_tracking()
        outer.stop_tracking()
        assert list(leftovers()) == []
        assert (outer.memory_saved(), inner.memory_saved()) == (4000, 4000)
        del y

    def test_stopping_it_inside_a_scope_is_refused_and_harmless(self):
        x, twin = leaf(), leaf()
        with CheckpointProfiler() as profiler, CheckpointScope("block"):
            y = x.exp()
            with pytest.raises(UsageError, match="entered since"):
                profiler.stop_tracking()
            y = y.sin().tanh()
        assert list(leftovers()) == []
        assert profiler.memory_saved() == x.nbytes
        y.sum().backward()
        twin.exp().sin().tanh().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_starting_it_inside_a_scope_is_refused_and_harmless(self):
        x, twin = leaf(), leaf()
        profiler = CheckpointProfiler()
        with CheckpointScope("block"):
            y = x.exp()
            with pytest.raises(UsageError, match="before the scope"):
                profiler.start_tracking()
            y = y.sin().tanh()
        assert list(leftovers()) == []
        assert profiler.checkpoint_count() == 0
        y.sum().backward()
        twin.exp().sin().tanh().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_stopping_it_on_another_thread_is_refused(self):
        profiler = CheckpointProfiler()
        profiler.start_tracking()
        errors = []

        def stop():
            try:
                profiler.stop_tracking()
            except UsageError as error:
                errors.append(str(error))

        thread = threading.Thread(target=stop)
        thread.start()
        thread.join()
        profiler.stop_tracking()
        assert len(errors) == 1
        assert "thread" in errors[0]
        assert list(leftovers()) == []

    def test_hooks_around_it_still_work(self):
        x = leaf()
        packed = []

        def pack(tensor):
            packed.append(tensor.shape)
            return tensor.detach()

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            CheckpointProfiler(),
        ):
            y = x.exp()
        assert len(packed) == 1
        y.sum().backward()


class TestTheClass:
    """The static form of the document: one profiler that the process shares."""

    def test_it_counts_as_a_profiler_does(self):
        CheckpointProfiler.start_tracking()
        y = leaf(100)
        with CheckpointProfiler() as profiler:
            for _ in range(3):
                with CheckpointScope("static"):
                    y = y.exp().sin().tanh()
        CheckpointProfiler.stop_tracking()
        checkpoint(torch.exp, leaf(100))
        assert CheckpointProfiler.checkpoint_count() == 3
        assert CheckpointProfiler.memory_saved() == profiler.memory_saved() > 0
        assert CheckpointProfiler.plain_bytes() == profiler.plain_bytes()
        CheckpointProfiler.reset_statistics()
        assert CheckpointProfiler.checkpoint_count() == 0
        assert profiler.checkpoint_count() == 3

    def test_starting_it_twice_is_refused(self):
        CheckpointProfiler.start_tracking()
        try:
            with pytest.raises(
                UsageError, match="expected a profiler that is not tracking"
            ):
                CheckpointProfiler.start_tracking()
        finally:
            CheckpointProfiler.stop_tracking()

    def test_its_methods_are_documented(self):
        assert "Reset the counts" in (CheckpointProfiler.start_tracking.__doc__ or "")


class TestThreads:
    def test_regions_of_all_threads_are_counted(self):
        start = threading.Barrier(4)
        outputs = []

        def work():
            start.wait()
            for _ in range(50):
                x = leaf(100)
                with CheckpointScope("thread"):
                    outputs.append(x.exp().sin().tanh())

        threads = [threading.Thread(target=work) for _ in range(4)]
        with CheckpointProfiler() as profiler:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert profiler.checkpoint_count() == 200
        assert profiler.plain_bytes() == 200 * 2 * 100 * FLOAT_BYTES
        assert profiler.kept_bytes() == 200 * 100 * FLOAT_BYTES

    def test_regions_of_a_thread_count_in_its_own_profilers_alone(self):
        start, found = threading.Barrier(4), {}

        def work(calls):
            with CheckpointProfiler() as outer, CheckpointProfiler() as inner:
                start.wait()  # all track
                for _ in range(calls):
                    y = checkpoint(lambda t: t.exp().sin().tanh(), leaf(100))
                    del y
                start.wait()
            for profiler in (outer, inner):
                table = profiler.statistics
                assert table.total.calls == profiler.checkpoint_count()
                assert profiler.plain_bytes() == calls * 2 * 100 * FLOAT_BYTES
            found[calls] = outer.checkpoint_count(), inner.checkpoint_count()

        threads = [threading.Thread(target=work, args=(n,)) for n in (10, 20, 30)]
        with CheckpointProfiler() as around:
            for thread in threads:
                thread.start()
            start.wait()
            start.wait()
            for thread in threads:
                thread.join()
        assert found == {10: (10, 10), 20: (20, 20), 30: (30, 30)}
        assert around.checkpoint_count() == 0

    def test_every_thread_may_have_its_own(self):
        start = threading.Barrier(4)
        errors = []

        def work():
            try:
                start.wait()
                for _ in range(20):
                    with CheckpointProfiler() as profiler:
                        y = checkpoint(lambda t: t.exp().sin().tanh(), leaf())
                    assert profiler.checkpoint_count() == 1
                    del y
            except Exception as error:  # noqa: BLE001 (shown below)
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert list(leftovers()) == []


class Collecting(nn.Module):
    """Blocks in regions; a list outside may get the activations inside them."""

    def __init__(self, *, collects: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.collects = collects
        self.collected: list[torch.Tensor] = []

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            with CheckpointScope(f"layer {number}"):
                hidden = torch.tanh(layer(x)).exp()
                x = x + torch.sin(hidden)
                if self.collects:
                    self.collected.append(hidden)
            del hidden
        return x.sum()


def test_tensors_that_somebody_outside_holds_are_named_with_a_warning():
    model = Collecting(collects=True)
    profiler = CheckpointProfiler()
    profiler.start_tracking()
    model(torch.ones(32, 64))
    with pytest.warns(UserWarning, match=r"3 tensors \(24 KiB\).*layer 0") as caught:
        profiler.stop_tracking()
    assert caught[0].filename == __file__
    held = profiler.held_outside()
    assert [each.region for each in held] == [f"layer {number}" for number in range(4)]
    assert {(each.shape, each.bytes) for each in held} == {((32, 64), 32 * 64 * 4)}
    model.collected.clear()
    assert profiler.held_outside() == ()


def test_the_warning_comes_from_a_block_too_and_not_after_an_error():
    model = Collecting(collects=True)
    with (
        pytest.warns(UserWarning, match="still referenced from outside"),
        CheckpointProfiler(),
    ):
        model(torch.ones(32, 64))

    def fail() -> None:
        with CheckpointProfiler():
            model(torch.ones(32, 64))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_model_that_holds_nothing_outside_is_not_warned_of():
    model = Collecting(collects=False)
    with CheckpointProfiler() as profiler:
        loss = model(torch.ones(32, 64))
    assert profiler.held_outside() == ()
    loss.backward()


def test_what_is_kept_anyway_is_not_held_outside():
    model = Collecting(collects=False)
    states = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        for layer in model.layers
    ]
    with CheckpointProfiler() as profiler:
        model(torch.ones(32, 64))
    # The inputs of the regions, which these keep for their replay.
    assert len(states) == len(handles) == 4
    assert profiler.held_outside() == ()
