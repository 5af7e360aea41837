"""Lightning's Trainer and Fabric: the same training, within the budget."""

# pyright: reportMissingImports=false

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import recoup
from recoup.backend.memory.meters import StorageMeter
from recoup.errors import InfeasibleError, UnsupportedError
from recoup.fitting import closed_loop, decision
from recoup.fitting.compiled_fit import CompiledFit
from tests.support.bits import tree_differences
from tests.support.processes import together
from tests.support.trainings import Rows, small_stack

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from recoup.integrations.lightning import RecoupCallback, fit_once

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:ModelCheckpoint.*:RuntimeWarning"),
    pytest.mark.filterwarnings("error::recoup.errors.BudgetWarning"),
    # Lightning's trainer holds all signal handlers: by one of pytest-timeout the step
    # would reach, and its measurement count, the tensors of every test's module.
    pytest.mark.timeout(method="thread"),
]

STEPS = 20


class Regression(lightning.LightningModule):
    """Logs, counts and draws, so that a rehearsal that leaves a trace is detected."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_stack()
        self.peaks: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("checked", nn.functional.mse_loss(self.model(inputs), targets))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Metered(lightning.Callback):
    """Measures forward and backward of every training batch."""

    def __init__(self) -> None:
        self.meter: StorageMeter | None = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.meter = StorageMeter("cpu").__enter__()
        self.meter.track(pl_module)
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                self.meter.track(parameter.grad)
        for state in trainer.optimizers[0].state.values():
            for value in state.values():
                self.meter.track(value)
        for tensor in batch:
            self.meter.track(tensor)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.meter is None:
            return  # a rehearsal
        self.meter.__exit__(None, None, None)
        pl_module.peaks.append(self.meter.peak_bytes)


def train(
    folder: Path,
    callback: RecoupCallback | None = None,
    *,
    resume: Path | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> tuple[Any, Any]:
    lightning.seed_everything(7, verbose=False)
    module = Regression()
    # The meter comes last: it does not see the rehearsals of the other.
    callbacks = [*([callback] if callback else []), Metered()]
    options: dict[str, Any] = {
        "max_steps": steps,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
        **settings,
    }
    trainer = lightning.Trainer(
        default_root_dir=folder,
        callbacks=[*callbacks, *options.pop("callbacks", [])],
        **options,
    )
    data = DataLoader(Rows(), batch_size=64, shuffle=True)
    check = DataLoader(Rows(32), batch_size=16)
    trainer.fit(module, data, check, ckpt_path=resume and str(resume))
    return trainer, module


def assert_same_run(ours: tuple[Any, Any], plain: tuple[Any, Any]) -> None:
    (trainer, module), (other, expected) = ours, plain
    states = dict(expected.state_dict()), dict(module.state_dict())
    assert list(tree_differences(*states, where="")) == []
    assert trainer.callback_metrics == other.callback_metrics


def test_a_run_is_bitwise_the_plain_one_and_within_the_budget(tmp_path):
    settings = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    plain = train(tmp_path, **settings)
    callback = RecoupCallback(0.8)
    logger = CSVLogger(tmp_path, name="log")
    ours = train(tmp_path, callback, **settings, logger=logger)
    report = callback.report
    assert report is not None
    assert_same_run(ours, plain)
    assert ours[1].losses == plain[1].losses, "rehearsals leave no trace"
    assert max(ours[1].peaks) <= report.budget_bytes < max(plain[1].peaks)
    assert not any(each._forward_hooks for each in ours[1].modules())
    logged = Path(logger.log_dir, "metrics.csv").read_text()
    assert "recoup_budget_bytes" in logged


def interrupted(folder: Path, budget: float | None) -> Any:
    """A run that is saved at step 12 and resumed with new objects."""
    saving = ModelCheckpoint(folder, every_n_train_steps=12, save_last=True)
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    callbacks = [RecoupCallback(budget) if budget else None for _ in range(2)]
    begun = train(
        folder,
        callbacks[0],
        steps=12,
        enable_checkpointing=True,
        callbacks=[saving],
        **settings,
    )
    resumed = train(folder, callbacks[1], resume=folder / "last.ckpt", **settings)
    return begun, resumed, callbacks


def test_a_run_that_is_saved_and_resumed_is_bitwise_the_plain_one(tmp_path):
    # Lightning itself does not resume the order of the data within an epoch.
    begun, plain, _ = interrupted(tmp_path / "plain", None)
    ours, resumed, callbacks = interrupted(tmp_path / "ours", 0.8)
    saved = torch.load(tmp_path / "ours" / "last.ckpt", weights_only=False)
    assert saved["callbacks"]["RecoupCallback"] == callbacks[0].state_dict() != {}
    assert_same_run(ours, begun)
    assert_same_run(resumed, plain)
    assert resumed[1].losses == plain[1].losses
    # 25 batches are an epoch, whose last one is a step by itself.
    assert len(resumed[1].losses) == 2 * (STEPS - 12) - 1
    for each, callback in zip((ours, resumed), callbacks, strict=True):
        assert max(each[1].peaks) <= callback.report.budget_bytes
    assert callbacks[0].report.budget_bytes < max(plain[1].peaks)


@pytest.mark.sweep
def test_the_largest_batch_is_logged(tmp_path):
    plain = train(tmp_path, steps=2)
    callback = RecoupCallback(2 * max(plain[1].peaks), slowdown=100.0)
    logger = CSVLogger(tmp_path, name="log")
    ours = train(tmp_path, callback, steps=2, logger=logger)
    assert_same_run(ours, plain)
    assert callback.largest_batch is not None
    assert callback.largest_batch.size > 64
    assert "recoup_largest_batch" in Path(logger.log_dir, "metrics.csv").read_text()


class Skipping(Regression):
    """Skips its first batch, as Lightning allows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 0 else loss


def test_a_skipped_batch_is_not_planned(tmp_path):
    found = []
    for callback in (None, RecoupCallback(0.8)):
        lightning.seed_everything(7, verbose=False)
        module = Skipping()
        lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[] if callback is None else [callback],
        ).fit(module, DataLoader(Rows(), batch_size=64, shuffle=True))
        found.append((callback, module))
    (_, plain), (callback, ours) = found
    assert ours.losses == plain.losses, "rehearsals leave no trace"
    assert len(ours.losses) == STEPS
    assert callback is not None
    assert callback.report is not None


class AnyArguments(Regression):
    """Its step takes what Lightning gives."""

    def training_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *given: Any
    ) -> Tensor:
        batch, number = given
        return super().training_step(batch, number)


class NamedArguments(Regression):
    """Its step takes a batch; Lightning gives it no name."""

    def training_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: Any, **given: Any
    ) -> Tensor:
        assert not given
        return super().training_step(batch, 0)


@pytest.mark.parametrize("kind", [AnyArguments, NamedArguments])
def test_a_step_gets_the_arguments_that_lightning_gives_it(kind):
    plain, ours = kind(), kind()
    train_alone(plain, None, steps=4)
    train_alone(ours, callback := RecoupCallback(0.8), steps=4)
    assert ours.losses == plain.losses
    assert callback.report is not None


def test_the_error_for_a_batch_that_does_not_fit_names_the_largest_that_does(tmp_path):
    with pytest.raises(InfeasibleError) as caught:
        train(tmp_path, RecoupCallback(1 << 12), steps=2)
    callback = RecoupCallback(caught.value.floor_bytes - 1, slowdown=1e9)
    with pytest.raises(InfeasibleError) as caught:
        train(tmp_path, callback, steps=2)
    assert callback.report is None
    assert callback.largest_batch is not None
    size = callback.largest_batch.size
    assert size < 64
    assert caught.value.__notes__ == [f"The largest batch that fits is {size}."]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def train_alone(
    module: Any, callback: RecoupCallback | None, steps: int = STEPS
) -> None:
    lightning.seed_everything(7, verbose=False)
    lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if callback else [],
    ).fit(module, DataLoader(Rows(), batch_size=64))


def test_a_compiled_module_is_refused_without_compile():
    data = DataLoader(Rows(), batch_size=64)
    with pytest.raises(UnsupportedError, match="compile="):
        train_alone(compiled(Regression()), RecoupCallback(0.8))
    fabric = lightning.Fabric(accelerator="cpu")
    model = fabric.setup(compiled(small_stack()))
    batch, loss = next(iter(data)), nn.functional.mse_loss
    with pytest.raises(UnsupportedError, match="compile="):
        fit_once(fabric, model, batch, 0.8, loss=loss)


def test_the_blocks_of_a_compiled_module_are_compiled_anew():
    plain, ours = Regression(), Regression()
    train_alone(plain, None)
    callback = RecoupCallback(0.9, compile="exact")
    train_alone(compiled(ours), callback)
    assert ours.losses == plain.losses
    states = dict(ours.state_dict()), dict(plain.state_dict())
    assert list(tree_differences(*states, where="")) == []
    report = callback.report
    assert isinstance(report, CompiledFit)
    assert report.measured_peak_bytes <= report.budget_bytes < report.plain_peak_bytes
    for name in ("training_step", "forward"):
        assert hasattr(vars(ours)[name], "_torchdynamo_orig_callable"), "put back"


def test_the_blocks_of_a_compiled_model_of_fabric_are_compiled_anew():
    found = []
    for is_ours in (False, True):
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        model = compiled(small_stack()) if is_ours else small_stack()
        model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
        report, losses = None, []
        for inputs, targets in DataLoader(Rows(), 64):
            if is_ours:
                report = fit_once(
                    fabric,
                    model,
                    (inputs, targets),
                    0.9,
                    loss=nn.functional.mse_loss,
                    optimizer=optimizer,
                    compile="exact",
                )
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    assert found[1] == found[0]
    assert isinstance(report, CompiledFit)
    assert report.measured_peak_bytes <= report.budget_bytes < report.plain_peak_bytes


@pytest.mark.parametrize("rerun", [None, True, False])
def test_rerun_decides_whether_blocks_may_be_called_again(rerun, monkeypatch):
    asked = []

    def may_repeat_calls(*given: Any) -> bool:
        asked.append(given)
        return decision.may_repeat_calls(*given)

    monkeypatch.setattr(closed_loop, "may_repeat_calls", may_repeat_calls)
    plain, ours = Regression(), Regression()
    train_alone(plain, None)
    train_alone(ours, RecoupCallback(0.8, rerun=rerun))
    assert ours.losses == plain.losses
    assert bool(asked) == bool(rerun), "by itself only where an accelerator waits"


def test_manual_optimization_is_refused():
    module = Regression()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="step="):
        RecoupCallback(0.5).on_train_start(None, module)


class Gan(lightning.LightningModule):
    """Two models and their optimizers; fits them in its first step."""

    def __init__(self, budget: float | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = small_stack(), small_stack()
        self.budget = budget
        self.report: Any = None
        self.peaks: list[int] = []
        self.losses: list[float] = []

    def backwards(self, inputs: Tensor, targets: Tensor) -> Tensor:
        made = self.critic(self.generator(inputs).detach())
        self.manual_backward(made.mean() - self.critic(targets).mean())
        self.critic.zero_grad()
        loss = -self.critic(self.generator(inputs)).mean()
        self.manual_backward(loss)
        return loss.detach()

    def training_step(self, batch: Any) -> None:
        optimizers: Any = self.optimizers()
        if self.budget is not None and self.report is None:
            models = [self.generator, self.critic]
            _, self.report = recoup.fit(
                models,
                step=lambda: self.backwards(*batch),
                budget=self.budget,
                optimizer=optimizers,
            )
        with StorageMeter("cpu") as meter:
            meter.track(self.generator, self.critic, *batch)
            for each in optimizers:
                meter.track(
                    *(s for found in each.state.values() for s in found.values())
                )
            self.losses.append(self.backwards(*batch).item())
        self.peaks.append(meter.peak_bytes)
        for each in optimizers:
            each.step()
            each.zero_grad()

    def configure_optimizers(self) -> Any:
        models = self.generator, self.critic
        return [torch.optim.Adam(each.parameters()) for each in models]


def test_two_models_by_manual_optimization_are_fitted_in_their_first_step():
    plain, ours = Gan(None), Gan(0.8)
    for module in (plain, ours):
        train_alone(module, None, steps=2 * STEPS)  # Lightning counts optimizers
    assert ours.losses == plain.losses
    assert len(ours.losses) == STEPS
    states = dict(ours.state_dict()), dict(plain.state_dict())
    assert list(tree_differences(*states, where="")) == []
    # Two moments and a count for each parameter.
    expected = sum(2 * each.nbytes + 4 for each in ours.parameters())
    assert ours.report.reserved_bytes == expected
    assert max(ours.peaks) <= ours.report.budget_bytes < max(plain.peaks)


def train_in_process(rank: int, folder: str) -> Any:
    """Train without and with the callback; return parameters, peaks and the plan."""
    for name, value in (("LOCAL_RANK", rank), ("NODE_RANK", 0), ("WORLD_SIZE", 2)):
        os.environ[name] = str(value)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settings: dict[str, Any] = {
        "devices": 2,
        "strategy": DDPStrategy(process_group_backend="gloo"),
        "limit_val_batches": 0,
    }
    _, plain = train(Path(folder), **settings)
    # In its second step DDP replaces its buckets, and the meter sees the new ones only.
    del plain.peaks[1]
    callback = RecoupCallback(int(0.85 * max(plain.peaks)))
    settings["strategy"] = DDPStrategy(process_group_backend="gloo")
    _, ours = train(Path(folder), callback, **settings)
    del ours.peaks[1]
    report: Any = callback.report
    states = dict(plain.state_dict()), dict(ours.state_dict())
    return {
        "differences": list(tree_differences(*states, where="")),
        "losses": (plain.losses, ours.losses),
        "peaks": (max(ours.peaks), report.budget_bytes, max(plain.peaks)),
        "plan": report.plan.to_json(),
    }


def assert_agreed(found: list[Any]) -> None:
    """Both trained as without recoup, on data of their own, by one plan."""
    for each in found:
        assert not isinstance(each, str), each
        assert each["differences"] == []
        assert each["losses"][0] == each["losses"][1]
        ours, budget, plain = each["peaks"]
        assert ours <= budget < plain
    assert found[0]["plan"] == found[1]["plan"]
    assert found[0]["losses"] != found[1]["losses"], "each has data of its own"


def test_two_processes_agree_and_train_bitwise_as_without_recoup(tmp_path):
    found = together(train_in_process, tmp_path, str(tmp_path), seconds=200)
    assert_agreed(found)
    assert len(found[0]["losses"][0]) == STEPS


def train_with_fabric(
    budget: float | None,
    *,
    save: Path | None = None,
    resume: Path | None = None,
    stop: int = 24,
    **settings: Any,
) -> dict[str, Any]:
    """Train an epoch in pairs of batches, or the part before or after a saved state."""
    fabric = lightning.Fabric(accelerator="cpu", **{"devices": 1, **settings})
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    model = small_stack()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    loader: Any = fabric.setup_dataloaders(DataLoader(Rows(), 64))
    start = 0
    kept: dict[str, Any] = {"model": model, "optimizer": optimizer, "random": None}
    if resume is not None:
        fabric.load(resume, kept)
        start = 12
    found: dict[str, Any] = {"losses": [], "peaks": [], "reports": []}
    for number, batch in enumerate(loader):
        if not start <= number < stop:
            continue
        if number == start > 0:  # the loader has drawn
            torch.set_rng_state(kept["random"])
        if budget is not None:
            found["reports"].append(
                fit_once(
                    fabric,
                    model,
                    batch,
                    budget,
                    loss=nn.functional.mse_loss,
                    optimizer=optimizer,
                    accumulate=True,
                )
            )
        is_last = number % 2 == 1
        with (
            fabric.no_backward_sync(model, enabled=not is_last),
            StorageMeter("cpu") as meter,
        ):
            meter.track(model, *batch)
            meter.track(*(p.grad for p in model.parameters() if p.grad is not None))
            for state in optimizer.state.values():
                meter.track(*state.values())
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            fabric.backward(loss / 2)
        found["peaks"].append(meter.peak_bytes)
        found["losses"].append(loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        random = torch.get_rng_state()
        fabric.save(save, {"model": model, "optimizer": optimizer, "random": random})
    found["state"] = dict(model.state_dict())
    return found


def test_a_loop_with_fabric_that_is_saved_and_resumed_is_bitwise_the_plain_one(
    tmp_path,
):
    file = tmp_path / "state.ckpt"
    plain = train_with_fabric(None, precision="bf16-mixed")
    begun = train_with_fabric(0.8, save=file, stop=12, precision="bf16-mixed")
    resumed = train_with_fabric(0.8, resume=file, precision="bf16-mixed")
    assert len(plain["losses"]) >= STEPS
    assert begun["losses"] + resumed["losses"] == plain["losses"]
    states = plain["state"], resumed["state"]
    assert list(tree_differences(*states, where="")) == []
    for part in (begun, resumed):
        report = part["reports"][0]
        assert all(each is report for each in part["reports"]), "it was fitted once"
        assert max(part["peaks"]) <= report.budget_bytes < max(plain["peaks"])


def fabric_in_process(rank: int) -> Any:
    """Train without and with recoup; return losses, peaks and the plan."""
    for name, value in (("LOCAL_RANK", rank), ("NODE_RANK", 0), ("WORLD_SIZE", 2)):
        os.environ[name] = str(value)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settings: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    plain = train_with_fabric(None, **settings)
    budget = int(0.85 * max(plain["peaks"]))
    ours = train_with_fabric(budget, **settings)
    states = plain["state"], ours["state"]
    return {
        "differences": list(tree_differences(*states, where="")),
        "losses": (plain["losses"], ours["losses"]),
        "peaks": (max(ours["peaks"]), budget, max(plain["peaks"])),
        "plan": ours["reports"][0].plan.to_json(),
    }


def test_two_processes_with_fabric_agree_and_train_bitwise_as_without_recoup(tmp_path):
    assert_agreed(together(fabric_in_process, tmp_path, seconds=200))
