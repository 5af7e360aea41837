"""Modules: a region around every forward, and taking it off again."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from recoup import (
    CheckpointManager,
    CheckpointProfiler,
    KeepCostly,
    checkpoint_module,
    uncheckpoint_module,
)
from recoup.checkpointing import is_checkpointed
from recoup.engine.recording.active import open_regions
from recoup.errors import UsageError
from tests.support.steps import Block, Mlp, problems, step_differences
from tests.support.twin import leftovers
from tests.support.watching import CountingBackend, Memory, Replayed, saved_bytes

PROBLEMS = problems()


class Picky(nn.Module):
    """Fails when it is asked to."""

    def forward(self, x, *, fail=False):
        y = x.exp()
        if fail:
            raise KeyError("on purpose")
        return y.sin()


def regions_of(run) -> int:
    """How many regions run in a call."""
    with CheckpointProfiler() as profiler:
        run()
    return profiler.checkpoint_count()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(dropout=0.1), Block(dropout=0.1))


class TestForward:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_a_checkpointed_module_leaves_what_the_plain_one_leaves(self, name):
        def call(model, x):
            return checkpoint_module(model)(x)

        model, x = PROBLEMS[name]
        assert step_differences(model, call, x) == []

    def test_it_is_the_same_object_with_the_same_keys(self):
        model = network()
        keys, parameters = list(model.state_dict()), list(model.parameters())
        for block in model:
            assert checkpoint_module(block) is block
        assert list(model.state_dict()) == keys
        assert list(model.parameters()) == parameters

    def test_weights_go_both_ways_between_checkpointed_and_plain(self):
        plain, ours = Mlp(), checkpoint_module(Mlp())
        plain.load_state_dict(ours.state_dict())
        ours.load_state_dict(plain.state_dict())
        for left, right in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(left, right)

    def test_what_is_saved_inside_is_forgotten(self):
        model, x = Mlp(), torch.randn(256, 16)
        plain = saved_bytes(lambda: model(x))
        checkpoint_module(model)
        assert plain - saved_bytes(lambda: model(x)) == 4 * (
            2 * 256 * 64 - 64 * 16 - 64
        )

    def test_operators_run_twice_and_python_once(self):
        calls = []

        class Counting(nn.Module):
            def forward(self, x):
                calls.append(1)
                return x.exp().sin().tanh()

        y = checkpoint_module(Counting())(torch.ones(3, requires_grad=True))
        with Replayed() as replayed:
            y.sum().backward()
        assert len(calls) == 1
        assert replayed.total == 3

    def test_keyword_arguments_arrive(self):
        model = checkpoint_module(Picky())
        with pytest.raises(KeyError):
            model(torch.ones(3, requires_grad=True), fail=True)

    def test_options_arrive(self):
        model = Mlp()
        checkpoint_module(model, name="mine", policy=KeepCostly(), verify="always")
        manager = CheckpointManager()
        with manager:
            out = model(torch.randn(3, 16))
        assert [node.name for node in manager.nodes] == ["mine"]
        with Replayed() as replayed:
            out.sum().backward()
        assert replayed.operators["addmm"] == 0
        assert replayed.operators["gelu"] == 1

    def test_the_default_name_is_the_class(self):
        manager = CheckpointManager()
        model = checkpoint_module(Mlp())
        with manager:
            out = model(torch.randn(3, 16))
        assert [node.name for node in manager.nodes] == ["Mlp"]
        del out

    def test_a_cache_serves_several_backwards(self):
        model = checkpoint_module(Mlp(), cache=True)
        manager = CheckpointManager()
        with manager:
            out = model(torch.randn(3, 16))
        for _ in range(3):
            out.sum().backward(retain_graph=True)
        assert [node.replay_count for node in manager.nodes] == [1]

    def test_modules_nest(self):
        def call(model, x):
            for block in model:
                checkpoint_module(block.mlp)
                checkpoint_module(block)
            return checkpoint_module(model)(x)

        assert step_differences(network(), call, torch.randn(2, 8, 16)) == []

    def test_hooks_of_the_user_run_once_and_see_the_same(self):
        seen = []
        model = Mlp()
        model.register_forward_pre_hook(lambda module, args: seen.append("before"))
        model.register_forward_hook(lambda module, args, out: seen.append("after"))
        checkpoint_module(model)
        model.register_forward_hook(lambda *given: given[-1] * 2)
        x = torch.randn(3, 16)
        model(x).sum().backward()
        assert seen == ["before", "after"]
        twin = Mlp()
        twin.load_state_dict(model.state_dict())
        (twin(x) * 2).sum().backward()
        assert torch.equal(model.widen.weight.grad, twin.widen.weight.grad)

    def test_without_gradients_nothing_is_recorded(self):
        model, x = checkpoint_module(Mlp()), torch.randn(3, 16)
        with torch.no_grad():
            assert regions_of(lambda: model(x)) == 0

    def test_torch_func_inside_is_refused_and_leaves_nothing_behind(self):
        class Functional(nn.Module):
            def forward(self, x):
                return torch.func.grad(lambda t: t.sin().sum())(x)

        with pytest.raises(RuntimeError, match=r"saved.tensor hooks"):
            checkpoint_module(Functional())(torch.ones(3, requires_grad=True))
        assert list(leftovers()) == []


class TestTheFlag:
    def test_it_turns_regions_off_and_on_between_passes(self):
        model, x = checkpoint_module(Mlp()), torch.randn(3, 16)
        assert is_checkpointed(model)
        found = []
        for flag in (True, False, True):
            model.use_gradient_checkpointing = flag
            assert is_checkpointed(model) is flag
            found.append(regions_of(lambda: model(x)))
        assert found == [1, 0, 1]

    def test_it_changes_no_gradient(self):
        def call(model, x):
            checkpoint_module(model)
            model.use_gradient_checkpointing = False
            return model(x)

        model, x = PROBLEMS["attention"]
        assert step_differences(model, call, x) == []

    def test_a_pass_that_has_begun_is_not_disturbed(self):
        model, x = checkpoint_module(Mlp()), torch.randn(3, 16)
        out = model(x)
        model.use_gradient_checkpointing = False
        out.sum().backward()
        twin = uncheckpoint_module(copy.deepcopy(model))
        twin.zero_grad()
        twin(x).sum().backward()
        assert torch.equal(model.widen.weight.grad, twin.widen.weight.grad)


class TestTakingOff:
    def state(self, module):
        """Everything the module has, hooks included."""
        return {name: copy.copy(value) for name, value in vars(module).items()}

    def test_it_restores_exactly(self):
        model = Mlp()
        model.register_forward_hook(lambda module, args, out: None)
        before = self.state(model)
        checkpoint_module(model)
        assert uncheckpoint_module(model) is model
        assert self.state(model) == before
        assert not is_checkpointed(model)

    def test_an_attribute_of_the_same_name_comes_back(self):
        model = Mlp()
        model.use_gradient_checkpointing = "mine"
        checkpoint_module(model)
        assert is_checkpointed(model)
        uncheckpoint_module(model)
        assert model.use_gradient_checkpointing == "mine"

    def test_a_module_without_regions_is_left_alone(self):
        model = Mlp()
        before = self.state(model)
        uncheckpoint_module(model)
        assert self.state(model) == before

    def test_afterwards_it_can_be_put_on_again(self):
        model, x = Mlp(), torch.randn(3, 16)
        found = []
        for _ in range(2):
            checkpoint_module(model)
            found.append(regions_of(lambda: model(x)))
            uncheckpoint_module(model)
            found.append(regions_of(lambda: model(x)))
        assert found == [1, 0, 1, 0]

    def test_between_forward_and_backward_it_does_no_harm(self):
        model, x = checkpoint_module(Mlp()), torch.randn(3, 16)
        out = model(x)
        uncheckpoint_module(model)
        out.sum().backward()
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(x).sum().backward()
        assert torch.equal(model.widen.weight.grad, twin.widen.weight.grad)

    def test_putting_it_on_twice_is_refused(self):
        model = checkpoint_module(Mlp())
        with pytest.raises(UsageError, match=r"Mlp that is not.*uncheckpoint_module"):
            checkpoint_module(model)

    @pytest.mark.parametrize("call", [checkpoint_module, uncheckpoint_module])
    def test_what_is_no_module_is_refused(self, call):
        with pytest.raises(UsageError, match="expected a module, got function"):
            call(lambda x: x)

    def test_an_unknown_way_to_verify_is_refused_before_anything_is_done(self):
        model = Mlp()
        with pytest.raises(UsageError, match="expected verify to be one of"):
            checkpoint_module(model, verify="sometimes")
        assert not is_checkpointed(model)


class TestCopies:
    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["deepcopy", "pickle"],
    )
    def test_a_copy_is_checkpointed_and_independent(self, duplicate):
        model, x = network(), torch.randn(2, 8, 16)
        for block in model:
            checkpoint_module(block, name="block", policy=KeepCostly())
        other = duplicate(model)
        assert regions_of(lambda: other(x).sum().backward()) == 2
        for block in other:
            uncheckpoint_module(block)
            assert (len(block._forward_hooks), len(block._forward_pre_hooks)) == (0, 0)
        assert regions_of(lambda: other(x)) == 0
        assert regions_of(lambda: model(x)) == 2
        model[0].use_gradient_checkpointing = False
        assert regions_of(lambda: model(x)) == 1

    def test_a_copy_is_independent_when_the_original_is_taken_off(self):
        model, x = checkpoint_module(Mlp()), torch.randn(3, 16)
        other = copy.deepcopy(model)
        uncheckpoint_module(model)
        assert regions_of(lambda: other(x)) == 1

    def test_a_file_remembers_the_flag(self):
        model = checkpoint_module(Mlp())
        model.use_gradient_checkpointing = False
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert not is_checkpointed(loaded)
        loaded.use_gradient_checkpointing = True
        assert regions_of(lambda: loaded(torch.randn(3, 16))) == 1

    def test_a_copy_gives_the_gradients_of_the_original(self):
        model, x = checkpoint_module(Mlp()), torch.randn(3, 16)
        other = copy.deepcopy(model)
        model(x).sum().backward()
        other(x).sum().backward()
        assert torch.equal(model.widen.weight.grad, other.widen.weight.grad)


class TestExceptions:
    def test_an_exception_leaves_nothing_behind(self, recwarn):
        model = checkpoint_module(Picky())
        outside = torch.ones(1000, requires_grad=True) * 2
        memory = Memory(outside)
        with pytest.raises(KeyError, match="on purpose"):
            model(outside, fail=True)
        assert list(leftovers()) == []
        assert len(recwarn) == 0
        del outside
        assert memory.is_freed
        x = torch.ones(3, requires_grad=True)
        model(x).sum().backward()
        expected = torch.ones(3).exp() * torch.ones(3).exp().cos()
        assert torch.equal(x.grad, expected)

    def test_an_exception_in_a_module_inside_leaves_nothing_behind(self):
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = checkpoint_module(Picky())

            def forward(self, x):
                try:
                    return self.inner(x, fail=True)
                except KeyError:
                    return self.inner(x)

        x = torch.ones(3, requires_grad=True)
        checkpoint_module(Outer())(x).sum().backward()
        assert list(leftovers()) == []
        expected = torch.ones(3).exp() * torch.ones(3).exp().cos()
        assert torch.equal(x.grad, expected)

    @pytest.mark.parametrize("prepend", [True, False])
    def test_an_exception_in_a_hook_leaves_nothing_behind(self, prepend):
        def fail(module, args):
            raise KeyError("hook")

        model, x = checkpoint_module(Mlp()), torch.randn(3, 16)
        handle = model.register_forward_pre_hook(fail, prepend=prepend)
        with pytest.raises(KeyError, match="hook"):
            model(x)
        assert list(leftovers()) == []
        handle.remove()
        assert regions_of(lambda: model(x).sum().backward()) == 1


class TestCompiled:
    def counts(self, model, backend, x):
        """Graphs compiled and run after a forward and a backward."""
        out = model(x)
        forward = backend.counts
        out.sum().backward()
        return forward, backend.counts

    def test_a_module_compiled_in_place_stays_compiled(self):
        torch._dynamo.reset()
        backend = CountingBackend()
        model, x = Mlp(), torch.randn(3, 16)
        twin = copy.deepcopy(model)
        model.compile(backend=backend)
        checkpoint_module(model)
        assert self.counts(model, backend, x) == ((1, 1), (1, 2))
        twin(x).sum().backward()
        assert torch.equal(model.widen.weight.grad, twin.widen.weight.grad)
        assert list(model.state_dict()) == list(twin.state_dict())
        uncheckpoint_module(model)
        assert self.counts(model, backend, x) == ((1, 3), (1, 3))

    def test_a_compiled_wrapper_stays_compiled(self):
        torch._dynamo.reset()
        backend = CountingBackend()
        model, x = Mlp(), torch.randn(3, 16)
        twin = copy.deepcopy(model)
        compiled = torch.compile(model, backend=backend)
        checkpoint_module(compiled)
        assert self.counts(compiled, backend, x) == ((1, 1), (1, 2))
        twin(x).sum().backward()
        assert torch.equal(model.widen.weight.grad, twin.widen.weight.grad)
        uncheckpoint_module(compiled)
        assert self.counts(compiled, backend, x) == ((1, 3), (1, 3))

    # Dynamo itself looks at `.grad` of what a compiled part is given.
    @pytest.mark.filterwarnings("ignore:The .grad attribute")
    def test_a_compiled_part_stays_compiled(self):
        torch._dynamo.reset()
        backend = CountingBackend()
        model, x = Block(), torch.randn(2, 8, 16)
        twin = copy.deepcopy(model)
        model.mlp.compile(backend=backend)
        checkpoint_module(model)
        assert self.counts(model, backend, x) == ((1, 1), (1, 2))
        twin(x).sum().backward()
        assert torch.equal(model.mix.weight.grad, twin.mix.weight.grad)

    def test_the_flag_turns_it_off(self):
        torch._dynamo.reset()
        backend = CountingBackend()
        model, x = Mlp(), torch.randn(3, 16)
        model.compile(backend=backend)
        checkpoint_module(model)
        model.use_gradient_checkpointing = False
        assert self.counts(model, backend, x) == ((1, 1), (1, 1))

    def test_taking_it_off_restores_exactly(self):
        model = Mlp()
        model.compile(backend="eager")
        before = dict(vars(model))
        checkpoint_module(model)
        uncheckpoint_module(model)
        assert dict(vars(model)) == before

    def test_a_region_counts(self):
        model, x = Mlp(), torch.randn(3, 16)
        model.compile(backend="eager")
        checkpoint_module(model)
        assert regions_of(lambda: model(x)) == 1

    # Dynamo itself looks at `.grad` of what crosses a break in the graph.
    @pytest.mark.filterwarnings("ignore:The .grad attribute")
    def test_compiling_a_checkpointed_module_gives_right_gradients(self):
        torch._dynamo.reset()
        model, x = Mlp(), torch.randn(3, 16)
        twin = copy.deepcopy(model)
        compiled = torch.compile(checkpoint_module(model), backend="aot_eager")
        compiled(x).sum().backward()
        twin(x).sum().backward()
        assert torch.equal(model.widen.weight.grad, twin.widen.weight.grad)

    @pytest.mark.filterwarnings("ignore:The .grad attribute")
    def test_a_checkpointed_module_that_is_compiled_afterwards_keeps_its_region(self):
        torch._dynamo.reset()
        model, x = network(), torch.randn(2, 8, 16)
        for block in model:
            checkpoint_module(block)
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            assert regions_of(lambda: compiled(x).sum().backward()) == 2
        uncheckpoint_module(model[0])
        assert regions_of(lambda: compiled(x).sum().backward()) == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_region_that_is_taken_off_in_its_own_forward_is_ended(interrupted):
    class Leaving(nn.Linear):
        leaves = True

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
            y = super().forward(input).exp()
            if self.leaves:
                uncheckpoint_module(self)
            if self.leaves and interrupted:
                raise KeyboardInterrupt
            return y

    layer = checkpoint_module(Leaving(2, 2))
    x = torch.ones(2, requires_grad=True)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            layer(x)
        layer.leaves = False
        checkpoint_module(layer)(x).sum().backward()
        with CheckpointProfiler() as profiler:
            layer(x).sum().backward()
        assert profiler.checkpoint_count() == 1
        uncheckpoint_module(layer)
    else:
        layer(x).sum().backward()
    assert not layer._forward_hooks
    assert not open_regions()
    assert list(leftovers()) == []
