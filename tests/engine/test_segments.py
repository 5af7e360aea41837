"""Segments: so many blocks in a row are one region, whatever forward does with them."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from recoup import (
    CheckpointProfiler,
    CheckpointScope,
    apply_plan,
    checkpoint_module,
    uncheckpoint_module,
)
from recoup.checkpointing import is_checkpointed
from recoup.core.plan import Place, Plan, Span
from recoup.engine.recording.active import open_regions
from recoup.engine.recording.observers import subscribe, unsubscribe
from recoup.errors import UnsupportedError, UsageError
from tests.support.bits import tree_differences
from tests.support.counting import Alive
from tests.support.steps import Block, Residual
from tests.support.twin import leftovers
from tests.support.watching import CountingBackend, Replayed, saved_bytes

WIDTH = 8


def chain(count: int, *, width: int = WIDTH) -> nn.Sequential:
    """Blocks of which autograd saves the input and the output, and nothing else."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count))
    return nn.Sequential(*blocks).double()


class Dropping(nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.norm(self.layer(x))))


class Stack(nn.Module):
    """A stem, blocks in the order it is told, and a head; sees who is in a region."""

    def __init__(self, make, count: int, order=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Identity()
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Identity()
        self.order = list(range(count)) if order is None else order
        self.sizes: list[int] = []
        self.outside: list[bool] = []
        self._last = None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes, self._last, self.outside = [], None, [not open_regions()]
        x = self.stem(x)
        for number in self.order:
            x = self.run(number, x)
        self.outside.append(not open_regions())
        return self.head(x).square()

    def run(self, number: int, x: Tensor) -> Tensor:
        handle = self.blocks[number].register_forward_hook(self.see, prepend=True)
        try:
            return self.blocks[number](x)
        finally:
            handle.remove()

    def see(self, *_) -> None:
        """Count the blocks of each region, from inside of them."""
        region = (open_regions() or [None])[0]
        if region is None or region is not self._last:
            self.sizes.append(0)
        self.sizes[-1] += 1
        self._last = region

    def __getstate__(self):
        return {**super().__getstate__(), "_last": None}


class Watcher:
    """Keeps the regions that run."""

    def __enter__(self):
        self.regions = []
        subscribe(self)
        return self

    def __exit__(self, *_):
        unsubscribe(self)

    def began(self, region):
        self.regions.append(region)

    def ended(self, region):
        pass


def regions_of(run) -> int:
    with CheckpointProfiler() as profiler:
        run()
    return profiler.checkpoint_count()


def step(model, x):
    """Everything a step leaves: outputs, gradients, buffers, random state."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_(x.is_floating_point())
    out = model(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    gradients = torch.autograd.grad(
        (out * weights).sum(), [x, *model.parameters()], allow_unused=True
    )
    return out.detach(), gradients, list(model.buffers()), torch.get_rng_state()


def differences(model, x, size, *, steps=2):
    """How steps with segments differ from those of a plain twin."""
    twin = copy.deepcopy(model)
    checkpoint_module(model, segment_size=size)
    found = []
    for _ in range(steps):
        expected = step(twin, x)
        found += tree_differences(expected, step(model, x), where="")
    uncheckpoint_module(model)
    return [*found, *leftovers()]


class TestHowMany:
    @pytest.mark.parametrize(
        ("count", "size", "sizes"),
        [
            (12, 4, [4] * 3),
            (100, 10, [10] * 10),
            (10, 4, [4, 4, 2]),
            (5, 1, [1] * 5),
            (5, 5, [5]),
            (5, 9, [5]),
        ],
    )
    def test_so_many_blocks_in_a_row_are_one_region(self, count, size, sizes):
        model = checkpoint_module(Stack(Dropping, count), segment_size=size)
        x = torch.randn(4, WIDTH).double()
        for _ in range(2):
            found = regions_of(lambda: model(x).sum().backward())
            assert found == len(sizes)
            assert model.sizes == sizes
        assert model.outside == [True, True], "neither stem nor head is in a region"

    @pytest.mark.parametrize(
        ("order", "sizes"),
        [
            (range(9, -1, -1), [4, 4, 2]),
            ([0, 5, 1, 6, 2, 7, 3, 8, 4, 9], [4, 4, 2]),
            ([*range(10)] * 2, [4, 4, 2, 4, 4, 2]),
            ([0, 1, 2, 4, 5, 6, 7, 8], [4, 4]),
        ],
        ids=["backwards", "in turns", "twice", "some left out"],
    )
    def test_blocks_are_taken_as_forward_runs_them(self, order, sizes):
        model, x = Stack(Dropping, 10, list(order)), torch.randn(4, WIDTH).double()
        assert differences(model, x, 4) == []
        assert model.sizes == sizes
        assert model.outside == [True, True]

    def test_layers_of_a_plain_sequence_are_blocks(self):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
        checkpoint_module(model, segment_size=4)
        assert regions_of(lambda: model(torch.ones(2, WIDTH)).sum().backward()) == 3

    def test_a_block_with_a_region_of_its_own_keeps_it_and_does_not_count(self):
        model, x = Stack(Dropping, 7), torch.randn(4, WIDTH).double()
        expected = step(copy.deepcopy(model), x)
        checkpoint_module(model.blocks[2], name="mine")
        checkpoint_module(model, segment_size=3)
        with Watcher() as watcher:
            found = step(model, x)
        names = ["segment at blocks.0", "mine", "segment at blocks.4"]
        assert [region.name for region in watcher.regions] == names
        assert list(tree_differences(expected, found, where="")) == []

    def test_two_parts_of_a_model_may_be_cut_each_in_its_way(self):
        model = nn.Sequential(chain(6), chain(8))
        checkpoint_module(model[0], segment_size=3)
        checkpoint_module(model[1], segment_size=4)
        x = torch.randn(2, WIDTH).double()
        assert regions_of(lambda: model(x).sum().backward()) == 4


class TestBits:
    @pytest.mark.parametrize("size", [1, 2, 3, 5])
    @pytest.mark.parametrize(
        ("make", "shape"),
        [
            (Dropping, (6, WIDTH)),
            (Residual, (2, 4, 5, 5)),
            (lambda: Block(dropout=0.2), (2, 4, 16)),
        ],
        ids=["BatchNorm and dropout", "in place", "attention"],
    )
    def test_a_step_is_bitwise_that_of_the_plain_twin(self, make, shape, size):
        model = Stack(make, 5)
        assert differences(model, torch.randn(shape).double(), size) == []

    @given(
        order=st.lists(st.integers(0, 4), max_size=9),
        size=st.integers(1, 6),
        scope=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    )
    def test_whatever_forward_runs_and_wherever_a_scope_lies(self, order, size, scope):
        class Scoped(Stack):
            def run(self, number, x):
                if self._count == min(scope):
                    self._scope = CheckpointScope("mine").__enter__()
                self._count += 1
                x = super().run(number, x)
                if self._count == max(scope) and self._scope is not None:
                    self._scope.__exit__(None, None, None)
                    self._scope = None
                return x

            def forward(self, x):
                self._count, self._scope = 0, None
                x = super().forward(x)
                if self._scope is not None:
                    self._scope.__exit__(None, None, None)
                return x

        model = Scoped(Dropping, 5, order)
        assert differences(model, torch.randn(3, WIDTH).double(), size) == []

    def test_two_calls_before_one_backward(self):
        model, x = Stack(Dropping, 5), torch.randn(4, WIDTH).double()

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x):
                return self.model(self.model(x))

        twice = Twice()
        expected = step(copy.deepcopy(twice), x)
        checkpoint_module(model, segment_size=2)
        assert list(tree_differences(expected, step(twice, x), where="")) == []

    def test_beside_torch_checkpointing_inside_the_model(self):
        class Mixed(Stack):
            def run(self, number, x):
                if number in (1, 4):
                    return torch_checkpoint(self.blocks[number], x, use_reentrant=False)
                return super().run(number, x)

        class Tanh(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        x = torch.randn(4, WIDTH).double()
        assert differences(Mixed(Tanh, 6), x, 2) == []


class TestCosts:
    @pytest.mark.parametrize(("count", "size"), [(12, 4), (100, 10), (10, 4), (6, 1)])
    def test_one_input_is_held_for_each_region(self, count, size):
        model, x = chain(count), torch.randn(16, WIDTH).double()
        one = x.nbytes
        with Alive() as alive:
            out = model(x)
            # Every block's output is there; its input is the output before.
            assert alive.total_bytes == count * one
            del out
            checkpoint_module(model, segment_size=size)
            model(x).sum().backward()  # the first time is verified
            model.zero_grad()
            before = alive.total_bytes
            out = model(x)
            regions = -(-count // size)
            # The inputs of all regions but the first, whose input is ours; the output.
            assert alive.total_bytes - before == regions * one
            assert out.shape == x.shape

    @pytest.mark.parametrize(("size", "regions"), [(1, 12), (4, 3), (5, 3), (6, 2)])
    def test_what_is_saved_falls_to_one_input_for_each_region(self, size, regions):
        model, x = chain(12), torch.randn(16, WIDTH).double().requires_grad_()
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        matrices = sum(block[0].weight.nbytes for block in model)
        # The input, every output, and what it is multiplied by.
        plain = (12 + 1) * x.nbytes + matrices
        assert saved_bytes(lambda: model(x)) == plain
        checkpoint_module(model, segment_size=size)
        with CheckpointProfiler() as profiler:
            model(x)
        assert profiler.plain_bytes() == plain
        # What a replay starts from: inputs, and parameters, which are there anyway.
        assert profiler.kept_bytes() == regions * x.nbytes + parameters

    def test_every_region_is_replayed_once_in_each_backward(self):
        model, x = chain(12), torch.randn(4, WIDTH).double()
        checkpoint_module(model, segment_size=4)
        with Watcher() as watcher, Replayed() as replayed:
            out = model(x).sum()
            assert replayed.total == 0
            out.backward(retain_graph=True)
            assert [region.replays for region in watcher.regions] == [1, 1, 1]
            once = replayed.operators.copy()
            out.backward()
        assert [region.replays for region in watcher.regions] == [2, 2, 2]
        assert once["tanh"] <= 12
        assert replayed.operators["tanh"] == 2 * once["tanh"]

    def test_without_gradients_there_are_no_regions(self):
        model = checkpoint_module(chain(4), segment_size=2)
        with torch.no_grad():
            assert regions_of(lambda: model(torch.randn(2, WIDTH).double())) == 0


class TestPuttingOnAndTakingOff:
    def state(self, module):
        return [
            {name: copy.copy(value) for name, value in vars(part).items()}
            for part in module.modules()
        ]

    def test_it_is_the_same_object_with_the_same_keys_and_comes_off_exactly(self):
        model = chain(4)
        before, keys = self.state(model), list(model.state_dict())
        assert checkpoint_module(model, segment_size=2) is model
        assert is_checkpointed(model)
        assert not any(is_checkpointed(block) for block in model)
        assert list(model.state_dict()) == keys
        assert uncheckpoint_module(model) is model
        assert self.state(model) == before

    def test_the_flag_turns_it_off_and_on_between_passes(self):
        model, x = checkpoint_module(chain(4), segment_size=2), torch.ones(2, WIDTH)
        found = []
        for flag in (True, False, True):
            model.use_gradient_checkpointing = flag
            found.append(regions_of(lambda: model(x.double())))
        assert found == [2, 0, 2]

    def test_between_forward_and_backward_taking_off_does_no_harm(self):
        model, x = chain(4), torch.randn(2, WIDTH).double()
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        checkpoint_module(model, segment_size=2)
        out = model(x).sum()
        uncheckpoint_module(model)
        found = torch.autograd.grad(out, list(model.parameters()))
        assert all(map(torch.equal, expected, found))

    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["deepcopy", "pickle"],
    )
    def test_a_copy_has_segments_of_its_own(self, duplicate):
        model, x = chain(4), torch.randn(2, WIDTH).double()
        checkpoint_module(model, segment_size=2)
        model(x).sum().backward()
        other = duplicate(model)
        other.use_gradient_checkpointing = False
        assert regions_of(lambda: model(x)) == 2
        other.use_gradient_checkpointing = True
        assert regions_of(lambda: other(x).sum().backward()) == 2
        uncheckpoint_module(other)
        assert regions_of(lambda: other(x)) == 0
        assert regions_of(lambda: model(x)) == 2

    def test_a_copy_is_verified_for_itself(self):
        model = checkpoint_module(chain(4), segment_size=2)
        marks = {
            id(part.__dict__["_recoup_attached"][0].applied._plan.mark)
            for part in (model, copy.deepcopy(model))
        }
        assert len(marks) == 2

    @pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
    def test_an_exception_in_the_middle_of_a_segment_leaves_nothing_behind(self, error):
        model, x = Stack(Dropping, 6), torch.randn(4, WIDTH).double()
        expected = step(copy.deepcopy(model), x)
        buffers = copy.deepcopy(model.state_dict())
        checkpoint_module(model, segment_size=4)

        def fail(*_):
            raise error("on purpose")

        handle = model.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(error):
            model(x)
        handle.remove()
        model.load_state_dict(buffers)
        found = step(model, x)  # which closes what an interrupt left open
        assert list(leftovers()) == []
        assert list(tree_differences(expected, found, where="")) == []
        assert model.sizes == [4, 2]


class TestRefusals:
    @pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
    def test_a_size_that_is_none(self, size):
        model = chain(4)
        with pytest.raises(UsageError, match="segment_size of at least 1"):
            checkpoint_module(model, segment_size=size)
        assert not is_checkpointed(model)
        assert regions_of(lambda: model(torch.ones(1, WIDTH).double())) == 0

    @pytest.mark.parametrize(
        ("module", "words"),
        [
            (nn.Linear(2, 2), "got a Linear with 0"),
            (nn.Sequential(nn.Linear(2, 2)), "got a Sequential with 1"),
            (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "has none"),
        ],
        ids=["a layer", "one block", "a list"],
    )
    def test_a_module_that_runs_no_blocks_in_a_row(self, module, words):
        with pytest.raises(UsageError, match=words):
            checkpoint_module(module, segment_size=2)
        assert not is_checkpointed(module)

    def test_a_compiled_module(self):
        model = chain(4)
        model[1].compile(backend=CountingBackend())
        with pytest.raises(UnsupportedError, match="compiled parts"):
            checkpoint_module(model, segment_size=2)
        assert not is_checkpointed(model)

    def test_what_has_a_plan_gets_no_segments_nor_the_other_way_round(self):
        model = chain(4)
        plan = Plan((Span(Place("0", 0, True), Place("1", 0, False)),))
        applied = apply_plan(model, plan)
        with pytest.raises(UsageError, match="got one that has them on it already"):
            checkpoint_module(model, segment_size=2)
        assert not is_checkpointed(model)
        applied.remove()
        checkpoint_module(model, segment_size=2)
        with pytest.raises(UsageError, match=r"For segments, .*uncheckpoint_module"):
            apply_plan(model, plan)
        with pytest.raises(UsageError, match="that is not checkpointed, got one"):
            checkpoint_module(model, segment_size=2)
