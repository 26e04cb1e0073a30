"""Trainer's own verbs with checkpoints of Holdfast, on one device."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning")

import torch  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.environments import SLURMEnvironment  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: E402

import holdfast  # noqa: E402
from holdfast.errors import InvalidError  # noqa: E402
from holdfast.integrations.lightning import HoldfastCheckpointIO, load_from_checkpoint  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Lightning warns of loaders, loggers and folders; none of that is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Model(lightning.LightningModule):
    """A model whose loss falls at first and then rises, so that the best checkpoint is not the last."""

    def __init__(self, width: int = 4, loss: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(width, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if getattr(self, "signal_at", None) == self.trainer.global_step:
            self.signal_at = None
            os.kill(os.getpid(), signal.SIGUSR1)
        self.log("score", float(abs(self.trainer.global_step + 1 - 4)))
        # By the step alone: Lightning begins a plain loader anew when it resumes within an epoch.
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.trainer.global_step))
        return self.norm(self.layer(batch)).square().sub(1).square().mean()

    def test_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("tested", self.norm(self.layer(batch)).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def loader() -> Any:
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=8)


def trainer_with(folder: Path, steps: int, *callbacks: Any, plugins: Any = None, **more: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=folder,
        callbacks=[*callbacks] or None,
        plugins=[HoldfastCheckpointIO()] if plugins is None else plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def checkpoints_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


KEEPERS = {
    "at once": lambda: HoldfastCheckpointIO(),
    "background": lambda: HoldfastCheckpointIO(background=True),
    "lazy": lambda: HoldfastCheckpointIO(background=True, settings=holdfast.Settings(staging="lazy")),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_best_and_the_last_are_kept_and_a_resumed_training_is_the_same(tmp_path: Path, keeper: str) -> None:
    def saving() -> Any:
        return ModelCheckpoint(
            tmp_path / "kept", "{step}", monitor="score", save_top_k=2, save_last=True, every_n_train_steps=1
        )

    whole = Model()
    trainer_with(tmp_path / "whole", 8, plugins=[KEEPERS[keeper]()], enable_checkpointing=False).fit(whole, loader())

    first = saving()
    trainer_with(tmp_path, 6, first, plugins=[KEEPERS[keeper]()]).fit(Model(), loader())
    assert checkpoints_in(tmp_path / "kept") == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert first.best_model_path == str(tmp_path / "kept" / "step=4.ckpt")

    resumed, second = Model(), saving()
    trainer = trainer_with(tmp_path, 8, second, plugins=[KEEPERS[keeper]()])
    trainer.fit(resumed, loader(), ckpt_path="last")
    assert trainer.global_step == 8 and same(weights(resumed), weights(whole))
    assert second.best_model_score == 0 and first.best_k_models == second.best_k_models
    assert checkpoints_in(tmp_path / "kept") == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]


class LooksAtLink(lightning.Callback):
    """Notes at each step whether the link to the last checkpoint points to a whole one."""

    def __init__(self, link: Path) -> None:
        self.link, self.found = link, {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.found[trainer.global_step] = (self.link / "manifest.json").exists()


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_link_to_the_last_resumes(tmp_path: Path, keeper: str) -> None:
    saving = ModelCheckpoint(tmp_path / "kept", "{step}", save_last="link", every_n_train_steps=1)
    trained, link = Model(), LooksAtLink(tmp_path / "kept" / "last.ckpt")
    trainer_with(tmp_path, 4, saving, link, plugins=[KEEPERS[keeper]()]).fit(trained, loader())
    assert link.found[2] and link.found[3], "from the second save on it is whole as soon as it is there"
    assert (tmp_path / "kept" / "last.ckpt").is_symlink()
    resumed = Model()
    trainer = trainer_with(tmp_path, 4, ModelCheckpoint(tmp_path / "kept", save_last="link"))
    trainer.fit(resumed, loader(), ckpt_path="last")
    assert trainer.global_step == 4 and same(weights(resumed), weights(trained))


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_a_test_loads_the_model_of_a_path_or_the_best(tmp_path: Path, weights_only: bool | None) -> None:
    saving = ModelCheckpoint(tmp_path / "kept", "{step}", monitor="score", every_n_train_steps=1)
    trainer = trainer_with(tmp_path, 6, saving)
    model = Model()
    trainer.fit(model, loader())
    trained = weights(model)
    for path in ("best", saving.best_model_path):
        trainer.test(model, loader(), ckpt_path=path, weights_only=weights_only, verbose=False)
        found = holdfast.read(saving.best_model_path)["state_dict"]
        assert same(weights(model), dict(found)) and not same(weights(model), trained)


def test_weights_alone_are_saved_and_tested_and_refused_for_a_training(tmp_path: Path) -> None:
    model = Model()
    trainer = trainer_with(tmp_path, 2, ModelCheckpoint(tmp_path / "kept", save_weights_only=True, save_last=True))
    trainer.fit(model, loader())
    trainer.test(Model(), loader(), ckpt_path="last", verbose=False)
    with pytest.raises(KeyError, match="save_weights_only"):
        trainer_with(tmp_path, 4, ModelCheckpoint(tmp_path / "kept", save_last=True)).fit(
            Model(), loader(), ckpt_path="last"
        )


def test_load_from_checkpoint_makes_the_module_with_its_hyperparameters(tmp_path: Path) -> None:
    model = Model()
    trainer = trainer_with(tmp_path, 2)
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(IsADirectoryError):
        Model.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded = load_from_checkpoint(Model, tmp_path / "a.ckpt")
    assert loaded.hparams.width == 4 and same(weights(loaded), weights(model))
    holdfast.export(tmp_path / "a.ckpt", tmp_path / "file.ckpt", to="torch", model_only=False)
    assert same(weights(Model.load_from_checkpoint(tmp_path / "file.ckpt", weights_only=True)), weights(model))


def test_hyperparameters_that_are_objects_are_refused_before_anything_is_saved(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, 2)
    with pytest.raises(InvalidError, match=r"hyper_parameters\.loss.*save_hyperparameters\(ignore="):
        trainer.fit(Model(loss=torch.nn.MSELoss()), loader())
    trainer = trainer_with(tmp_path, 2, plugins=[HoldfastCheckpointIO(skip="hyper_parameters.loss")])
    trainer.fit(Model(loss=print), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert load_from_checkpoint(Model, tmp_path / "a.ckpt").hparams.loss is None


def test_the_state_of_callbacks_comes_back(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [
            EarlyStopping("score", patience=50, check_on_train_epoch_end=True),
            EMAWeightAveraging(decay=0.5),
            ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_train_steps=2),
        ]

    whole = Model()
    trainer_with(tmp_path / "whole", 6, *callbacks()[:2], enable_checkpointing=False).fit(whole, loader())
    found = []
    for plugins in ([], [HoldfastCheckpointIO()]):
        shutil.rmtree(tmp_path / "kept", ignore_errors=True)
        trainer_with(tmp_path, 4, *callbacks(), plugins=plugins).fit(Model(), loader())
        resumed, again = Model(), callbacks()
        trainer = trainer_with(tmp_path, 6, *again, plugins=plugins)
        trainer.fit(resumed, loader(), ckpt_path="last", weights_only=False)
        assert same(weights(resumed), weights(whole))
        found.append([each.state_dict() for each in again])
    assert str(found[0]) == str(found[1]), "what Lightning's own checkpoints give back"


def test_a_training_of_lightnings_own_goes_on_with_holdfast(tmp_path: Path) -> None:
    def saving() -> Any:
        return ModelCheckpoint(tmp_path / "kept", save_top_k=1, save_last=True, every_n_train_steps=2)

    whole = Model()
    trainer_with(tmp_path / "whole", 6, enable_checkpointing=False).fit(whole, loader())
    trainer_with(tmp_path, 4, saving(), plugins=[]).fit(Model(), loader())
    assert (tmp_path / "kept" / "last.ckpt").is_file()
    resumed = Model()
    trainer_with(tmp_path, 6, saving()).fit(resumed, loader(), ckpt_path="last", weights_only=False)
    assert same(weights(resumed), weights(whole))
    kept = [path for path in (tmp_path / "kept").iterdir() if path.name.startswith("last")]
    assert [path.is_dir() for path in kept] == [True], "the file of Lightning's is replaced"


def test_the_position_of_a_loader_comes_back(tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            while self.at < 100:
                self.at += 1
                yield torch.full((1,), float(self.at))

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "kind": ("counted", None)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["kind"] == ("counted", None)
            self.at = state["at"]

    class Reads(Model):
        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            seen.append(int(batch))
            return super().training_step(batch, number)

    def saving() -> Any:
        return ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_train_steps=2)

    seen: list[int] = []
    trainer_with(tmp_path, 4, saving()).fit(Reads(), Loader())
    trainer_with(tmp_path, 6, saving()).fit(Reads(), Loader(), ckpt_path="last")
    assert seen[:4] == [1, 2, 3, 4] and seen[4:] == list(range(seen[4], seen[4] + 2)) and seen[4] >= 5


def test_a_training_that_fails_saves_if_asked_to(tmp_path: Path) -> None:
    class Fails(Model):
        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if self.trainer.global_step == 3:
                raise ValueError("of the model")
            return super().training_step(batch, number)

    saving = ModelCheckpoint(tmp_path / "kept", "failed", save_on_exception=True, every_n_epochs=100)
    with pytest.raises(ValueError, match="of the model"):
        trainer_with(tmp_path, 6, saving, plugins=[HoldfastCheckpointIO(background=True)]).fit(Fails(), loader())
    assert holdfast.open_checkpoint(tmp_path / "kept" / "failed.ckpt").objects["global_step"] == 3


def test_a_failed_save_in_the_background_is_raised_at_the_end(tmp_path: Path) -> None:
    class Fails(lightning.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if trainer.global_step == 2:
                trainer.strategy.checkpoint_io.wait()  # One is committed: a refusal ends no training any more.
                checkpoint["mine"] = print

    saving = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, save_top_k=1)
    trainer = trainer_with(tmp_path, 3, Fails(), saving, plugins=[HoldfastCheckpointIO(background=True)])
    with pytest.raises(InvalidError, match="mine"):
        trainer.fit(Model(), loader())
    assert trainer.global_step == 3, "the training went on"
    assert checkpoints_in(tmp_path / "kept") == ["step=1.ckpt", "step=3.ckpt"], "the one before the failed save stays"


def test_lightnings_own_saves_in_the_background_are_refused(tmp_path: Path) -> None:
    """AsyncCheckpointIO removes a checkpoint before the next is saved, and misses one that is not saved yet."""
    saving = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, save_top_k=1)
    trainer = trainer_with(tmp_path, 3, saving, plugins=[AsyncCheckpointIO(HoldfastCheckpointIO())])
    with pytest.raises(InvalidError, match=r"AsyncCheckpointIO.*HoldfastCheckpointIO\(background=True\)"):
        trainer.fit(Model(), loader())


def test_slurm_requeues_and_the_next_job_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"NTASKS": "1", "JOB_ID": "7", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NAME", "training")

    def job(model: Any, steps: int) -> Any:
        environment = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)
        keeper = HoldfastCheckpointIO(background=True)
        trainer = trainer_with(tmp_path, steps, plugins=[environment, keeper], enable_checkpointing=False)
        trainer.fit(model, loader())
        return trainer

    model = Model()
    model.signal_at = 3
    assert job(model, 4).global_step == 4
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert holdfast.open_checkpoint(tmp_path / "hpc_ckpt_1.ckpt").objects["global_step"] == 3
    again = Model()
    assert job(again, 4).global_step == 4
    assert same(weights(again), weights(model))


class Accumulating(lightning.LightningModule):
    """One weight, whose gradient is the sum of the batch."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer, self.fails_at = torch.nn.Linear(1, 1, bias=False), fails_at

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if number == self.fails_at:
            raise RuntimeError("preempted")
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


AMID = {
    "two of three batches": (5, {"accumulate_grad_batches": 3}, True),
    "a batch fails after a step": (3, {"accumulate_grad_batches": 3}, False),
    "no accumulation": (4, {}, False),
    "validation in between": (None, {"accumulate_grad_batches": 3, "val_check_interval": 2}, True),
    "validation at a step": (None, {"accumulate_grad_batches": 3, "val_check_interval": 3}, False),
}


@pytest.mark.parametrize("case", AMID)
def test_a_checkpoint_amid_accumulation_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    fails_at, options, is_amid = AMID[case]
    saving = ModelCheckpoint(tmp_path / "kept", "c", save_on_exception=fails_at is not None, save_top_k=-1)
    trainer = trainer_with(tmp_path, -1, saving, max_epochs=1, num_sanity_val_steps=0, **options)
    batches = torch.utils.data.DataLoader(torch.arange(6.0).reshape(6, 1))
    model = Accumulating(fails_at)
    if fails_at is None:
        trainer.fit(model, batches, batches)
    else:
        with pytest.raises(RuntimeError, match="preempted"):
            trainer.fit(model, batches)
    assert list((tmp_path / "kept").iterdir()), "it is saved in any case"
    assert ("saved in the middle of gradient accumulation" in caplog.text) is is_amid


def test_a_script_begins_anew_where_no_checkpoint_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing is there"):
        trainer_with(tmp_path, 1).fit(Model(), loader(), ckpt_path=tmp_path / "absent.ckpt")


def test_names_of_a_loaded_checkpoint_are_in_the_order_of_the_model(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "kept", "a")
    model = Model()
    trainer_with(tmp_path, 1, saving).fit(model, loader())
    found = HoldfastCheckpointIO().load_checkpoint(tmp_path / "kept" / "a.ckpt")
    assert list(found["state_dict"]) == list(model.state_dict())
    assert list(load_from_checkpoint(Model, tmp_path / "kept" / "a.ckpt").state_dict()) == list(model.state_dict())
