"""Blocks of a plan that are recomputed by calling them again: bitwise, or a region."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup import CheckpointScope, Plan
from recoup.backend.memory.storages import StorageWatch
from recoup.core.plan import Place, Span
from recoup.engine.applied.applied_plan import Applied
from recoup.errors import BudgetWarning, CaptureError, ChangedTensorError, PlanError

SCALE = 1.0


class Block(nn.Module):
    """Draws random numbers, reads an attribute, a global and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.4)
        self.factor = 0.5
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor, option: object = None) -> Tensor:
        assert option is None or isinstance(option, list | str)
        hidden = torch.tanh(self.linear(x) * self.factor * SCALE)
        return x + self.dropout(hidden.exp()) * self.shift


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor, option: object = None) -> Tensor:
        for block in self.blocks:
            x = block(x, option=option)
        return x


class Table:
    def __init__(self, scale: float = 0.5) -> None:
        self.scales = [scale]
        self.more: list[float] = []
        self.offset = 0.0


class Config:
    def __init__(self) -> None:
        self.table = Table()
        self.tables = (self.table, Table())


class Configured(Block):
    """Reads what is far away in objects, and in containers that are empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.extra: dict[str, float] = {}

    def forward(self, x: Tensor, option: object = None) -> Tensor:
        table, other = self.config.tables
        hidden = (x * table.scales[0] * other.scales[0] + table.offset).exp()
        return super().forward(hidden + sum(table.more) + self.extra.get("shift", 0.0))


CHANGES_INSIDE = [
    lambda block: block.config.table.scales.__setitem__(0, 0.75),
    lambda block: block.config.tables[1].scales.__setitem__(0, 0.75),
    lambda block: setattr(block.config.table, "offset", 1.0),
    lambda block: block.config.table.more.append(1.0),
    lambda block: block.extra.update(shift=1.0),
    lambda block: setattr(block.config, "tables", (Table(2.0), Table())),
]


def whole_span() -> Span:
    return Span(Place("", 0, True), Place("", 0, False), by_call=True)


def repeating(*numbers: int) -> Plan:
    return Plan(
        tuple(
            Span(
                Place(f"blocks.{n}", 0, True),
                Place(f"blocks.{n}", 0, False),
                by_call=True,
            )
            for n in numbers
        )
    )


def step(
    model: nn.Module,
    between: Callable[[], object] = lambda: None,
    *,
    option: object = None,
    run: Callable[[Tensor], None] = lambda loss: loss.backward(),
) -> list[Tensor]:
    """Return the output and all gradients of a step."""
    torch.manual_seed(3)
    model.zero_grad()
    x = torch.randn(5, 8, requires_grad=True)
    out = model(x, option)
    between()
    run(out.square().sum())
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [out.detach().clone(), x.grad, *grads, torch.rand(1)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def calls_of(monkeypatch: pytest.MonkeyPatch, block: type[nn.Module]) -> list[int]:
    """Return a list that gets an item for each call of the class's forward."""
    calls: list[int] = []
    own = block.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(block, "forward", forward)
    return calls


def double_backward(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


class TestGradients:
    @pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (0, 2), (3,)])
    def test_they_are_bitwise_those_of_the_plain_model(self, model, numbers):
        expected = step(model)
        recoup.apply_plan(model, repeating(*numbers))
        assert all(equal(step(model), expected) for _ in range(3))

    def test_several_backwards_through_one_graph(self, model):
        expected = step(model, run=double_backward)
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        assert equal(step(model, run=double_backward), expected)

    def test_gradients_of_gradients(self, model):
        def penalty(model: nn.Module) -> list[Tensor]:
            torch.manual_seed(3)
            x = torch.randn(5, 8, requires_grad=True)
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            model.zero_grad()
            grad.square().sum().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        expected = penalty(model)
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        assert equal(penalty(model), expected)

    def test_under_autocast(self, model):
        def cast() -> list[Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return step(model)

        expected = cast()
        recoup.apply_plan(model, repeating(0, 1, 2))
        assert equal(cast(), expected)

    def test_without_gradients_nothing_is_called_again(self, model, monkeypatch):
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        calls = calls_of(monkeypatch, Block)
        with torch.no_grad():
            model(torch.ones(1, 8))
        with torch.inference_mode():
            model(torch.ones(1, 8))
        assert len(calls) == 8

    def test_each_block_is_called_once_more_and_no_other(self, model, monkeypatch):
        recoup.apply_plan(model, repeating(0, 2))
        calls = calls_of(monkeypatch, Block)
        step(model)
        assert len(calls) == 4 + 2


class TestMemory:
    def test_of_a_block_only_its_input_is_held_until_backward(self, model):
        hidden: list[StorageWatch] = []

        def watch(module: nn.Module, args: object, out: Tensor) -> None:
            hidden.append(StorageWatch(out))

        for block in model.blocks:
            block.linear.register_forward_hook(watch)
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        out = model(torch.randn(5, 8))
        assert [each.is_alive for each in hidden] == [False] * 4
        out.sum().backward()
        # Called again in backward, from the last to the first; nothing is left of it.
        assert [each.is_alive for each in hidden] == [False] * 8

    @pytest.mark.parametrize("run", [lambda loss: loss.backward(), lambda loss: None])
    def test_nothing_stays_after_backward_or_without_it(self, model, run):
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        x = torch.randn(5, 8)
        watch = StorageWatch(x)
        run(model(x).sum())
        del x
        assert not watch.is_alive


class TestStateOfTheCall:
    @pytest.mark.parametrize(
        "change",
        [
            lambda model: model.eval(),
            lambda model: setattr(model.blocks[1], "factor", 7.0),
            lambda model: setattr(model.blocks[0], "dropout", nn.Identity()),
            lambda model: model.blocks[2].shift.zero_(),
            lambda model: setattr(model.blocks[2], "shift", torch.zeros(8)),
            lambda model: torch.manual_seed(99),
            lambda model: torch.set_default_dtype(torch.float64),
        ],
    )
    def test_what_is_changed_before_backward_is_put_back_for_the_second_call(
        self, model, change
    ):
        # Plain autograd goes by what forward saw. A buffer that is written to is an
        # error there, so the block is compared with one that is left alone.
        expected = step(copy.deepcopy(model))
        changed = copy.deepcopy(model)
        recoup.apply_plan(changed, repeating(0, 1, 2, 3))
        step(changed)
        try:
            found = step(changed, lambda: change(changed))
        finally:
            torch.set_default_dtype(torch.float32)
        assert equal(found[:-1], expected[:-1])

    @pytest.mark.parametrize("change", CHANGES_INSIDE)
    def test_so_is_what_is_changed_inside_of_objects(self, change):
        torch.manual_seed(0)
        block = Configured()
        expected = step(copy.deepcopy(block))
        recoup.apply_plan(block, Plan((whole_span(),)))
        step(block)
        assert equal(step(block, lambda: change(block)), expected)
        assert not equal(step(block), expected), "the change itself stays"

    @pytest.mark.parametrize("change", CHANGES_INSIDE)
    def test_and_inside_of_objects_that_were_put_there_later(self, change):
        torch.manual_seed(0)
        block = Configured()
        expected = step(copy.deepcopy(block))
        recoup.apply_plan(block, Plan((whole_span(),)))
        step(block)
        block.config, block.extra = Config(), {}
        for _ in range(2):  # the second one is not verified
            assert equal(step(block), expected)
        assert equal(step(block, lambda: change(block)), expected)

    def test_and_of_an_object_that_has_the_identity_of_a_dead_one(self):
        torch.manual_seed(0)
        block = Configured()
        expected = step(copy.deepcopy(block))
        recoup.apply_plan(block, Plan((whole_span(),)))
        for _ in range(3):
            step(block)
        dead = id(block.config)
        del block.config
        configs = [Config()]
        # As it happens now and then.
        while id(configs[-1]) != dead and len(configs) < 10_000:
            configs.append(Config())
        block.config = configs.pop()
        for _ in range(2):
            assert equal(step(block), expected)
        change = CHANGES_INSIDE[1]
        assert equal(step(block, lambda: change(block)), expected)

    def test_a_dictionary_that_makes_its_items_is_not_asked_for_them(self, model):
        asked: list[str] = []

        class Lazy(dict[str, float]):
            def __getitem__(self, name: str) -> float:
                asked.append(name)
                return super().__getitem__(name)

        model.blocks[0].lazy = Lazy(scale=0.5)
        expected = step(copy.deepcopy(model))
        recoup.apply_plan(model, repeating(0))
        for _ in range(3):
            assert equal(step(model), expected)
        assert asked == []

    def test_the_change_itself_stays(self, model):
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        step(model, lambda: setattr(model.blocks[1], "factor", 7.0))
        step(copy.deepcopy(model))
        assert model.blocks[1].factor == 7.0

    def test_a_parameter_that_is_written_to_is_an_error(self, model):
        recoup.apply_plan(model, repeating(0, 1, 2, 3))

        def write() -> None:
            with torch.no_grad():
                model.blocks[2].linear.weight.mul_(2)

        with pytest.raises(ChangedTensorError, match=r"blocks\.2"):
            step(model, write)

    def test_a_step_of_a_fused_optimizer_is_an_error(self, model):
        step(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        torch.manual_seed(0)
        loss = model(torch.randn(2, 8)).sum()
        optimizer.step()
        with pytest.raises((ChangedTensorError, RuntimeError)):
            loss.backward()

    def test_a_global_variable_that_is_assigned_is_an_error(self, model, monkeypatch):
        recoup.apply_plan(model, repeating(0))
        with pytest.raises(CaptureError, match="SCALE"):
            step(model, lambda: monkeypatch.setitem(globals(), "SCALE", 3.0))


class TestFallback:
    """Where a call may not be repeated a region recomputes: code runs once."""

    def check(
        self,
        model: Model,
        monkeypatch: pytest.MonkeyPatch,
        run: Callable[[nn.Module], list[Tensor]] = step,
    ) -> None:
        expected = run(copy.deepcopy(model))
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        calls = calls_of(monkeypatch, Block)
        assert equal(run(model), expected)
        assert len(calls) == 4

    def test_with_an_argument_that_can_change(self, model, monkeypatch):
        class Options(str):
            __slots__ = ()

        self.check(model, monkeypatch, lambda m: step(m, option=Options("x")))

    def test_after_an_item_went_from_one_list_to_another(self):
        torch.manual_seed(0)
        block = Configured()
        block.config.table.scales, block.config.table.more = [0.5, 0.25], [1.0]
        plain = copy.deepcopy(block)
        recoup.apply_plan(block, Plan((whole_span(),)))
        for each in (plain, block):
            step(each)
            step(each)
            table = each.config.table
            table.more.append(table.scales.pop())
        assert equal(step(block), step(plain))

    def test_inside_a_scope(self, model, monkeypatch):
        def scoped(model: nn.Module) -> list[Tensor]:
            with CheckpointScope("all"):
                return step(model)

        expected = step(copy.deepcopy(model))
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        calls = calls_of(monkeypatch, Block)
        assert equal(scoped(model), expected)
        assert len(calls) == 4

    def test_after_a_hook_was_added(self, model, monkeypatch):
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        expected = step(model)
        seen: list[int] = []
        for block in model.blocks:
            block.linear.register_forward_hook(lambda *_: seen.append(1))
        calls = calls_of(monkeypatch, Block)
        assert equal(step(model), expected)
        assert len(calls) == len(seen) == 4

    def test_after_a_hook_took_the_place_of_another_one(self, model):
        handle = model.blocks[1].linear.register_forward_hook(lambda *_: None)
        recoup.apply_plan(model, repeating(1))
        for _ in range(2):
            step(model)
        handle.remove()
        calls: list[int] = []
        model.blocks[1].linear.register_forward_hook(lambda *_: calls.append(1))
        step(model)
        assert calls == [1]

    def test_after_the_forward_was_replaced_there_is_a_warning_once(self, model):
        recoup.apply_plan(model, repeating(0, 1))
        expected = step(model)
        block = model.blocks[1]
        block.__dict__["forward"] = lambda x, option: Block.forward(block, x, option)
        with pytest.warns(BudgetWarning, match="'blocks.1' was replaced"):
            assert equal(step(model), expected)
        assert equal(step(model), expected)

    def test_an_error_in_the_block_leaves_nothing_behind(self, model):
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        expected = step(model)
        with pytest.raises(AssertionError):
            step(model, option=3)
        assert equal(step(model), expected)


class TestPlans:
    def test_they_are_written_and_read(self):
        plan = repeating(0, 3)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.repeated_calls == 2

    def test_a_repeated_call_holds_nothing(self):
        held = '{"operator": "a", "nth": 0, "bytes": 1, "action": "keep"}'
        text = repeating(0).to_json().replace('"held": []', f'"held": [{held}]')
        with pytest.raises(PlanError, match="called again"):
            Plan.from_json(text)

    def test_a_copy_has_its_own(self, model):
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        expected = step(model)
        twin = copy.deepcopy(model)
        del model
        assert equal(step(twin), expected)

    def test_a_model_is_saved_and_loaded_with_them(self, model):
        recoup.apply_plan(model, repeating(0, 1, 2, 3))
        expected = step(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert equal(step(loaded), expected)

    def test_removing_gives_the_blocks_their_own_forward(self, model, monkeypatch):
        applied = recoup.apply_plan(model, repeating(0, 1, 2, 3))
        assert isinstance(applied, Applied)
        names = set(model.state_dict())
        step(model)
        assert set(model.state_dict()) == names
        applied.remove()
        assert all("forward" not in vars(block) for block in model.blocks)
        calls = calls_of(monkeypatch, Block)
        step(model)
        assert len(calls) == 4

    def test_verification_finds_a_call_that_differs(self):
        counter = [0.0]

        class Odd(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                counter[0] += 1
                return (x * counter[0]).exp()

        model = nn.Sequential(Odd())
        plan = Plan((Span(Place("0", 0, True), Place("0", 0, False), by_call=True),))
        recoup.apply_plan(model, plan)
        with pytest.raises(recoup.errors.MismatchError):
            model(torch.ones(2, requires_grad=True)).sum().backward()
