"""Lightning's plug-in points against recorded shapes of its classes; the real ones are in tests/integrations."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import ConflictError, InvalidError, MissingError
from holdfast.integrations.host import MARK
from tests.support.object_server import ObjectServer
from tests.unit.integrations.recorded_lightning import (
    VERSION,
    LightningOptimizer,
    TrainerFn,
    recorded_modules,
)

KEPT = ("lightning", "holdfast.integrations.lightning")
"""Modules that these tests import anew: another test may have imported the real ones."""


@contextmanager
def without_lightning() -> Iterator[None]:
    """Forget Lightning and the integration, and remember at the end what was there before."""

    def names() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == KEPT[0] or name.startswith(KEPT[1])]

    before = {name: sys.modules.pop(name) for name in names()}
    try:
        yield
    finally:
        for name in names():
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture(scope="module")
def ours() -> Iterator[ModuleType]:
    """The integration over the recorded shapes."""
    with without_lightning(), pytest.MonkeyPatch.context() as patch:
        real = importlib.metadata.version
        patch.setattr(importlib.metadata, "version", lambda name: VERSION if name == "lightning" else real(name))
        for name, module in recorded_modules():
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("holdfast.integrations.lightning")


def test_without_lightning_the_import_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    with without_lightning(), pytest.raises(InvalidError, match=r"pip install 'holdfast\[lightning\]'"):
        importlib.import_module("holdfast.integrations.lightning")


@pytest.mark.parametrize("version", ["2.6.5", "2.7.0"])
def test_another_version_is_named_with_the_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with without_lightning(), pytest.raises(InvalidError, match=rf"{version} is outside.*lightning>=2\.6\.6,<2\.7"):
        importlib.import_module("holdfast.integrations.lightning")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def dumped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: object) -> dict[str, Any]:
    """A checkpoint as `dump_checkpoint` of Trainer puts it together."""
    saving = {
        "monitor": "loss",
        "best_model_score": torch.tensor(0.5),
        "best_model_path": "/runs/epoch=1.ckpt",
        "best_k_models": {"/runs/epoch=1.ckpt": torch.tensor(0.5), "/runs/epoch=0.ckpt": torch.tensor(0.7)},
        "kth_value": torch.tensor(0.7),
        "dirpath": "/runs",
    }
    return {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": VERSION,
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1, "completed": 0}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss', 'mode': 'min'}": saving},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 7, "_last_lr": [0.1]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 4, "betas": (0.9, 0.99), "root": Path("data")},
        **more,
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(type(one) is type(other) and one == other)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------------------------------- CheckpointIO


def test_what_lightning_saved_is_what_it_loads(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = dumped(model, optimizer)
    keeper = ours.HoldfastCheckpointIO()
    keeper.save_checkpoint(checkpoint, tmp_path / "epoch=1.ckpt")
    for weights_only in (None, True, False):
        loaded = keeper.load_checkpoint(str(tmp_path / "epoch=1.ckpt"), weights_only=weights_only)
        assert equal(checkpoint, loaded)
    assert loaded["state_dict"]._metadata == checkpoint["state_dict"]._metadata

    fresh, empty = trained()[0], torch.optim.AdamW(model.parameters(), lr=0.5)
    fresh.load_state_dict(loaded["state_dict"])
    empty.load_state_dict(loaded["optimizer_states"][0])
    assert equal(empty.state_dict(), optimizer.state_dict())


def test_the_model_of_a_checkpoint_loads_without_lightning(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    ours.HoldfastCheckpointIO().save_checkpoint(dumped(model, optimizer), tmp_path / "a.ckpt")
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    holdfast.load(tmp_path / "a.ckpt", {"state_dict": fresh}, process_group=False)
    assert equal(dict(fresh.state_dict()), dict(model.state_dict()))
    mark = holdfast.open_checkpoint(tmp_path / "a.ckpt").objects[MARK]
    assert mark == {"name": "lightning", "version": f"lightning {VERSION}", "model": "state_dict"}


def folders() -> ModuleType:
    return sys.modules["holdfast.integrations.lightning.folders"]


def test_a_save_replaces_the_checkpoint_at_its_path(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO()
    for step in (1, 2, 3):
        keeper.save_checkpoint({"global_step": step}, tmp_path / "last.ckpt")
        assert keeper.load_checkpoint(tmp_path / "last.ckpt") == {"global_step": step}
    keeper.teardown()
    assert names_in(tmp_path) == ["last.ckpt"]


def test_a_save_that_fails_leaves_the_path_as_it_was(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO()
    with pytest.raises(InvalidError):
        keeper.save_checkpoint({"f": print}, tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").exists()
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "last.ckpt")
    with pytest.raises(InvalidError):
        keeper.save_checkpoint({"f": print}, tmp_path / "last.ckpt")
    assert keeper.load_checkpoint(tmp_path / "last.ckpt") == {"global_step": 1}


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_with_the_next(ours: ModuleType, tmp_path: Path) -> None:
    begun = sys.modules["holdfast.integrations.lightning.folders"].destination(tmp_path / "last.ckpt")
    left = Path(begun.written_at)
    left.mkdir()
    (left / "r00000.safetensors").write_bytes(b"half")
    keeper = ours.HoldfastCheckpointIO()
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "last.ckpt")
    assert not left.exists() and keeper.load_checkpoint(tmp_path / "last.ckpt") == {"global_step": 1}


def test_a_link_at_the_path_is_replaced_and_not_what_it_points_to(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO()
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "best.ckpt")
    os.symlink("best.ckpt", tmp_path / "last.ckpt")  # ModelCheckpoint(save_last="link")
    assert keeper.load_checkpoint(tmp_path / "last.ckpt") == {"global_step": 1}
    keeper.save_checkpoint({"global_step": 2}, tmp_path / "last.ckpt")
    assert keeper.load_checkpoint(tmp_path / "best.ckpt") == {"global_step": 1}
    assert keeper.load_checkpoint(tmp_path / "last.ckpt") == {"global_step": 2}


class Killed(BaseException):
    """Ends a save as a kill would."""


@pytest.mark.parametrize("swaps", [True, False], ids=["swapped", "two renames"])
@pytest.mark.parametrize("is_link", [True, False], ids=["link", "file"])
def test_a_kill_while_a_checkpoint_takes_the_place_of_a_link_or_file_loses_neither(
    ours: ModuleType, tmp_path: Path, swaps: bool, is_link: bool
) -> None:
    keeper, last, done = ours.HoldfastCheckpointIO(), tmp_path / "last.ckpt", [0]
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "best.ckpt")
    if is_link:
        last.symlink_to("best.ckpt")
    else:
        last.write_bytes(b"of torch.save")
    rename, sync = os.rename, folders()._make_durable

    def counted(call: Any, number: int) -> Any:
        def killed(*arguments: Any) -> None:
            done[0] += 1
            if done[0] == number:
                raise Killed
            call(*arguments)

        return killed

    with pytest.MonkeyPatch.context() as patch:
        if swaps:
            patch.setattr(folders(), "_make_durable", counted(sync, 1))  # Right after the swap.
        else:
            patch.setattr(folders(), "_RENAMEAT2", None)
            patch.setattr(os, "rename", counted(rename, 2))
        with pytest.raises(Killed):
            keeper.save_checkpoint({"global_step": 2}, last)
        assert last.exists() == swaps, "with two renames there is nothing in between"
        again = ours.HoldfastCheckpointIO()
        read = {"global_step": 1} if is_link else {"read_by_lightning": str(last), "weights_only": None}
        assert again.load_checkpoint(last) == ({"global_step": 2} if swaps else read)
        again.save_checkpoint({"global_step": 3}, last)
        assert again.load_checkpoint(last) == {"global_step": 3}
        again.teardown()
    assert names_in(tmp_path) == ["best.ckpt", "last.ckpt"]


def test_what_a_killed_replacement_left_is_tidied_once_its_place_is_taken(ours: ModuleType, tmp_path: Path) -> None:
    left = {name: Path(folders()._hidden(str(tmp_path / name), ".holdfast-replaced-")) for name in ("a", "b")}
    for path in left.values():
        path.write_bytes(b"of torch.save")
    saved = Path(folders()._hidden(str(tmp_path / "a"), ".holdfast-saving-"))
    saved.symlink_to("elsewhere")
    keeper = ours.HoldfastCheckpointIO()
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "c")
    (tmp_path / "a").mkdir()
    keeper.teardown()
    assert names_in(tmp_path) == sorted(["a", "c", left["b"].name]), "b's own is its only copy"


def test_a_save_beside_links_to_checkpoints_is_whole_when_it_returns(
    ours: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning moves `last.ckpt` to the checkpoint at once: a failed save would leave a link to nothing."""
    monkeypatch.setattr(holdfast, "async_save", lambda *_, **__: pytest.fail("saved in the background"))
    for beside in (tmp_path, tmp_path / "epoch=1"):
        keeper = ours.HoldfastCheckpointIO(background=True)
        beside.mkdir(exist_ok=True)
        (tmp_path / "last.ckpt").unlink(missing_ok=True)
        (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
        keeper.save_checkpoint({"global_step": 2}, beside / "step=2.ckpt")
        assert keeper.load_checkpoint(beside / "step=2.ckpt") == {"global_step": 2}


def test_a_file_of_lightnings_is_read_by_it_and_replaced_once_the_new_checkpoint_is_whole(
    ours: ModuleType, tmp_path: Path
) -> None:
    keeper, path = ours.HoldfastCheckpointIO(), tmp_path / "last.ckpt"
    path.write_bytes(b"of torch.save")
    assert keeper.load_checkpoint(path, weights_only=True) == {"read_by_lightning": str(path), "weights_only": True}
    with pytest.raises(InvalidError):
        keeper.save_checkpoint({"f": print}, path)
    assert path.read_bytes() == b"of torch.save"
    keeper.save_checkpoint({"global_step": 1}, path)
    assert keeper.load_checkpoint(path) == {"global_step": 1}


def test_a_folder_of_something_else_is_refused_and_not_touched(ours: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidError, match=r"last\.ckpt"):
        ours.HoldfastCheckpointIO().save_checkpoint({"global_step": 1}, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt" / "notes.txt").read_text() == "mine"


def test_checkpoints_of_others_are_named_and_neither_read_nor_replaced(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO()
    other = {"name": "accelerate", "version": "accelerate 1.15.0", "model": "models.0"}
    holdfast.save(tmp_path / "other.ckpt", {"step": 3, MARK: other}, process_group=False)
    with pytest.raises(InvalidError, match=r'integrations\.accelerate wrote.*\{"models\.0": model\}'):
        keeper.load_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ConflictError, match=r"integrations\.accelerate saved here.*Choose another folder"):
        keeper.save_checkpoint({"global_step": 1}, tmp_path / "other.ckpt")
    assert holdfast.open_checkpoint(tmp_path / "other.ckpt").objects["step"] == 3

    holdfast.save(tmp_path / "plain.ckpt", {"step": 3}, process_group=False)
    with pytest.raises(InvalidError, match="no integration wrote this checkpoint"):
        keeper.load_checkpoint(tmp_path / "plain.ckpt")


def test_a_checkpoint_of_a_users_own_plugin_is_read(ours: ModuleType, tmp_path: Path) -> None:
    checkpoint = dumped(*trained())
    holdfast.save(tmp_path / "before.ckpt", checkpoint, process_group=False)
    assert equal(ours.HoldfastCheckpointIO().load_checkpoint(tmp_path / "before.ckpt"), checkpoint)


def test_an_absent_checkpoint_is_named(ours: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"none\.ckpt"):
        ours.HoldfastCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("kind", ["HoldfastCheckpointIO", "HoldfastModelParallelStrategy"])
def test_an_absent_checkpoint_is_a_file_that_is_not_found(ours: ModuleType, tmp_path: Path, kind: str) -> None:
    loads = getattr(ours, kind)()
    loads.model, loads.optimizers = trained()[0], []
    with pytest.raises(FileNotFoundError, match="nothing is there"):
        loads.load_checkpoint(tmp_path / "absent.ckpt")


def test_names_of_the_model_come_back_in_its_order(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = dumped(model, optimizer)
    ours.HoldfastCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    loaded = ours.HoldfastCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert list(loaded["state_dict"]) == list(model.state_dict()) and list(loaded) == list(checkpoint)
    moved = ours.HoldfastCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", map_location="meta")
    assert list(moved["state_dict"]) == list(model.state_dict())
    strategy = strategy_with(ours, model, optimizer)
    strategy.save_checkpoint(dumped_by(strategy), tmp_path / "b.ckpt")
    loaded = ours.HoldfastCheckpointIO().load_checkpoint(tmp_path / "b.ckpt")
    assert list(loaded["state_dict"]) == list(model.state_dict())


def progress_of(batches: int, steps: int, cleared: int) -> dict[str, Any]:
    """The progress in a checkpoint of Trainer: batches, optimizer steps and cleared gradients of this epoch."""
    step, zero_grad = ({"total": {"completed": 9}, "current": {"ready": n, "completed": n}} for n in (steps, cleared))
    return {
        "fit_loop": {
            "epoch_loop.batch_progress": {"current": {"ready": batches, "processed": batches, "completed": batches}},
            "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": step, "zero_grad": zero_grad}},
        }
    }


ACCUMULATED = {
    "two of three batches": (progress_of(5, 1, 2), True),
    "the first of three": (progress_of(1, 0, 1), True),
    "after a step": (progress_of(6, 2, 2), False),
    "a batch that failed, without accumulation": (progress_of(4, 4, 5), False),
    "an epoch that begins": (progress_of(0, 0, 0), False),
    "no training": ({}, False),
}


@pytest.mark.parametrize("case", ACCUMULATED)
def test_a_save_amid_accumulation_is_a_warning(
    ours: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    loops, is_amid = ACCUMULATED[case]
    ours.HoldfastCheckpointIO().save_checkpoint(
        {"global_step": 7, "optimizer_states": [], "loops": loops}, tmp_path / "a.ckpt"
    )
    assert (f"{tmp_path}/a.ckpt: saved in the middle of gradient accumulation" in caplog.text) is is_amid
    assert holdfast.open_checkpoint(tmp_path / "a.ckpt").objects["global_step"] == 7, "it is saved in any case"


def test_a_strategy_warns_too_but_not_of_weights_alone(
    ours: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loops = progress_of(5, 1, 2)
    ours.HoldfastCheckpointIO().save_checkpoint({"global_step": 7, "loops": loops}, tmp_path / "weights.ckpt")
    assert "accumulation" not in caplog.text
    strategy = strategy_with(ours, *trained())
    strategy.save_checkpoint(dumped_by(strategy, loops=loops), tmp_path / "b.ckpt")
    assert f"{tmp_path}/b.ckpt: saved in the middle of gradient accumulation" in caplog.text


@pytest.mark.parametrize("background", [False, True])
def test_a_training_leaves_no_thread(ours: ModuleType, tmp_path: Path, background: bool) -> None:
    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("holdfast")}

    before, keeper = threads(), ours.HoldfastCheckpointIO(background=background)
    for number in range(2):  # The second training starts threads anew.
        keeper.save_checkpoint(dumped(*trained()), tmp_path / f"{number}.ckpt")
        keeper.load_checkpoint(tmp_path / f"{number}.ckpt")
        keeper.teardown()
        assert threads() <= before


def test_what_a_load_would_not_return_is_refused_with_its_path(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO()
    parameters = {"net": torch.nn.Linear(2, 2), "layers": [torch.nn.ReLU()], "width": 2}
    with pytest.raises(InvalidError, match=r"hyper_parameters\.net: .*Linear.*ignore=\['net'\].*layers\.0"):
        keeper.save_checkpoint({"hyper_parameters": parameters}, tmp_path / "a.ckpt")
    with pytest.raises(InvalidError, match=r"callbacks\.mine: a PerRank; one rank saves for all"):
        keeper.save_checkpoint({"callbacks": {"mine": holdfast.PerRank(1)}}, tmp_path / "a.ckpt")
    with pytest.raises(InvalidError, match=r"hyper_parameters\.loss.*skip is an argument of HoldfastCheckpointIO"):
        keeper.save_checkpoint({"hyper_parameters": {"loss": torch.nn.functional.relu}}, tmp_path / "a.ckpt")
    with pytest.raises(InvalidError, match="which Holdfast uses"):
        keeper.save_checkpoint({MARK: 1}, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_skip_leaves_out_what_is_named(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO(skip="hyper_parameters.loss")
    keeper.save_checkpoint({"hyper_parameters": {"loss": print, "width": 2}}, tmp_path / "a.ckpt")
    assert keeper.load_checkpoint(tmp_path / "a.ckpt") == {"hyper_parameters": {"width": 2}}


def test_arguments_that_mean_nothing_here_are_refused(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO()
    with pytest.raises(InvalidError, match=r"storage_options.*object_store"):
        keeper.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt", storage_options={"key": 1})
    keeper.save_checkpoint({"weight": torch.ones(2), "more": [torch.ones(1), (torch.ones(1),)]}, tmp_path / "a.ckpt")
    with pytest.raises(InvalidError, match=r"map_location.*expected a device"):
        keeper.load_checkpoint(tmp_path / "a.ckpt", map_location={"cuda:0": "cpu"})
    loaded = keeper.load_checkpoint(tmp_path / "a.ckpt", map_location="meta")
    assert loaded["weight"].is_meta and loaded["more"][0].is_meta and loaded["more"][1][0].is_meta


@pytest.mark.parametrize("is_link", [False, True])
def test_a_removed_checkpoint_is_gone_and_an_absent_one_is_no_error(
    ours: ModuleType, tmp_path: Path, is_link: bool
) -> None:
    keeper = ours.HoldfastCheckpointIO()
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    (tmp_path / "file.ckpt").write_bytes(b"of torch.save")
    removed = tmp_path / "a.ckpt"
    if is_link:
        removed = tmp_path / "link.ckpt"
        removed.symlink_to("a.ckpt")
    for path in (removed, tmp_path / "file.ckpt", tmp_path / "none.ckpt"):
        keeper.remove_checkpoint(str(path))
    keeper.teardown()
    assert names_in(tmp_path) == (["a.ckpt"] if is_link else [])


def test_a_removal_goes_on_while_another_rank_tidies(
    ours: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def late(*arguments: Any, **options: Any) -> None:
        unlink(*arguments, **options)
        raise FileNotFoundError("another was faster")

    keeper = ours.HoldfastCheckpointIO()
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", late)
        keeper.remove_checkpoint(tmp_path / "a.ckpt")
    assert names_in(tmp_path) == []


def test_the_plugin_goes_to_spawned_processes_without_its_saves(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO(background=True, skip="x")
    keeper.save_checkpoint({"x": 1, "global_step": 1}, tmp_path / "a.ckpt")
    keeper.wait()
    other = copy.deepcopy(keeper)
    assert other.load_checkpoint(tmp_path / "a.ckpt") == {"global_step": 1}


def test_a_url_holds_checkpoints_too(ours: ModuleType, tmp_path: Path) -> None:
    keeper, url = ours.HoldfastCheckpointIO(), f"local://{tmp_path}/kept/last.ckpt"
    for step in (1, 2):
        keeper.save_checkpoint({"global_step": step, "weight": torch.full((3,), float(step))}, url)
        assert equal(keeper.load_checkpoint(url), {"global_step": step, "weight": torch.full((3,), float(step))})
    keeper.remove_checkpoint(url)
    keeper.teardown()
    assert not (tmp_path / "kept" / "last.ckpt").exists()
    with pytest.raises(MissingError):
        keeper.load_checkpoint(url)


def test_an_object_store_holds_checkpoints_too(
    ours: ModuleType, objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", objects.endpoint)
    objects.client().create_bucket(Bucket="lightning")
    keeper = ours.HoldfastCheckpointIO()
    for step in (1, 2):
        keeper.save_checkpoint({"global_step": step}, "s3://lightning/run/last.ckpt")
        assert keeper.load_checkpoint("s3://lightning/run/last.ckpt") == {"global_step": step}
    holdfast.save("s3://lightning/run/other.ckpt", {"step": 3}, process_group=False)
    with pytest.raises(ConflictError, match="a job without an integration saved here"):
        keeper.save_checkpoint({"global_step": 1}, "s3://lightning/run/other.ckpt")


# ---------------------------------------------------------------------------------------------- background


def test_a_removal_waits_for_the_save_before_it(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO(background=True)
    weight = torch.zeros(1 << 16)
    for step in (1, 2, 3):
        weight += 1
        keeper.save_checkpoint({"weight": weight, "global_step": step}, tmp_path / f"step={step}.ckpt")
        if step > 1:
            keeper.remove_checkpoint(tmp_path / f"step={step - 1}.ckpt")
    weight += 1  # After the copy.
    keeper.teardown()
    assert names_in(tmp_path) == ["step=3.ckpt"]
    loaded = keeper.load_checkpoint(tmp_path / "step=3.ckpt")
    assert loaded["global_step"] == 3 and torch.equal(loaded["weight"], torch.full((1 << 16,), 3.0))


def test_saves_to_one_path_follow_each_other(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO(background=True)
    for step in range(5):
        keeper.save_checkpoint({"weight": torch.full((1 << 14,), float(step))}, tmp_path / "last.ckpt")
    assert keeper.load_checkpoint(tmp_path / "last.ckpt")["weight"][0] == 4  # A load waits for them.
    keeper.teardown()
    assert names_in(tmp_path) == ["last.ckpt"]


def test_a_checkpoint_stays_if_the_save_after_it_fails(
    ours: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = ours.HoldfastCheckpointIO(background=True)
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "step=1.ckpt")
    keeper.wait()
    with caplog.at_level(logging.WARNING):
        keeper.save_checkpoint({"f": print}, tmp_path / "step=2.ckpt")  # It agreed on one before: nothing is raised.
        keeper.remove_checkpoint(tmp_path / "step=1.ckpt")
        with pytest.raises(
            InvalidError, match=r"f: .*cannot be saved.*skip is an argument of HoldfastCheckpointIO"
        ) as failed:
            keeper.teardown()
    # What Holdfast names is the hidden name.
    assert f"is the hidden name of {tmp_path / 'step=2.ckpt'}" in failed.value.__notes__[0]
    assert "step=2.ckpt: its save failed" in caplog.text
    assert "step=1.ckpt: stays" in caplog.text and "1 in a row" in caplog.text
    assert names_in(tmp_path) == ["step=1.ckpt"]
    keeper.teardown()  # Raised once.
    keeper.save_checkpoint({"global_step": 3}, tmp_path / "step=3.ckpt")
    keeper.remove_checkpoint(tmp_path / "step=1.ckpt")
    keeper.teardown()
    assert names_in(tmp_path) == ["step=3.ckpt"]


@pytest.fixture
def held(ours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event for which the thread waits that moves a checkpoint to its path."""
    path_type = sys.modules["holdfast.integrations.lightning.folders"].CheckpointPath
    event, publish = threading.Event(), path_type.publish
    monkeypatch.setattr(path_type, "publish", lambda path: (event.wait(60), publish(path)))
    yield event
    event.set()


def test_what_is_saved_again_before_its_removal_stays(ours: ModuleType, tmp_path: Path, held: threading.Event) -> None:
    # ModelCheckpoint(enable_version_counter=False) comes back to a name.
    keeper = ours.HoldfastCheckpointIO(background=True)
    held.set()
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "acc=0.5.ckpt")
    keeper.wait()
    held.clear()
    keeper.save_checkpoint({"global_step": 2}, tmp_path / "acc=0.6.ckpt")
    keeper.remove_checkpoint(tmp_path / "acc=0.5.ckpt")
    again = threading.Thread(
        target=keeper.save_checkpoint, args=({"global_step": 3}, tmp_path / "acc=0.5.ckpt"), daemon=True
    )
    again.start()
    held.set()
    again.join()
    keeper.teardown()
    assert names_in(tmp_path) == ["acc=0.5.ckpt", "acc=0.6.ckpt"]
    assert keeper.load_checkpoint(tmp_path / "acc=0.5.ckpt") == {"global_step": 3}


def test_an_error_of_a_store_in_a_removal_does_not_keep_others_waiting(
    ours: ModuleType,
    tmp_path: Path,
    held: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(path: object) -> None:
        raise RuntimeError("the store said no")

    monkeypatch.setattr(sys.modules["holdfast.integrations.lightning.saves"], "remove", refuse)
    keeper = ours.HoldfastCheckpointIO(background=True)
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    keeper.remove_checkpoint(tmp_path / "b.ckpt")
    waiting = threading.Thread(target=keeper.wait, daemon=True)
    waiting.start()
    held.set()
    waiting.join(60)
    assert not waiting.is_alive() and "b.ckpt: could not be removed: the store said no" in caplog.text


def test_a_failed_save_does_not_hide_the_error_that_ended_the_training(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO(background=True)
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "step=1.ckpt")
    keeper.wait()
    keeper.save_checkpoint({"f": print}, tmp_path / "step=2.ckpt")
    try:
        raise RuntimeError("the loss is NaN")
    except RuntimeError as error:
        keeper.teardown()
        assert "a save in the background also failed" in error.__notes__[0]


def test_so_many_failures_in_a_row_end_the_training(ours: ModuleType, tmp_path: Path) -> None:
    settings = holdfast.Settings(failed_saves_max=2)
    keeper = ours.HoldfastCheckpointIO(background=True, settings=settings)
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "step=1.ckpt")
    keeper.wait()
    keeper.save_checkpoint({"f": print}, tmp_path / "step=2.ckpt")
    with pytest.raises(InvalidError, match="cannot be saved"):
        keeper.save_checkpoint({"f": print}, tmp_path / "step=3.ckpt")
    with pytest.raises(InvalidError, match="cannot be saved"):
        keeper.teardown()


def test_a_requeue_finds_its_checkpoint_durable(ours: ModuleType, tmp_path: Path) -> None:
    keeper = ours.HoldfastCheckpointIO(background=True)
    keeper.save_checkpoint({"global_step": 1}, tmp_path / "hpc_ckpt_1.ckpt")
    assert holdfast.open_checkpoint(tmp_path / "hpc_ckpt_1.ckpt").objects["global_step"] == 1
    # Lightning counts what it lists here to name the next one.
    assert not [path.name for path in tmp_path.iterdir() if "hpc_ckpt_" in path.name and path.suffix != ".ckpt"]


# ---------------------------------------------------------------------------------------------- load_from_checkpoint


def test_load_from_checkpoint_gets_one_file(ours: ModuleType, tmp_path: Path) -> None:
    class Module:
        @classmethod
        def load_from_checkpoint(cls, checkpoint_path: str, **arguments: object) -> Any:
            return holdfast.read(checkpoint_path), arguments

    checkpoint = dumped(*trained())
    ours.HoldfastCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    read, arguments = ours.load_from_checkpoint(Module, tmp_path / "a.ckpt", strict=False)
    assert equal(dict(read["state_dict"]), dict(checkpoint["state_dict"]))
    assert read["hyper_parameters"]["width"] == 4 and arguments == {"strict": False, "weights_only": False}
    with pytest.raises(InvalidError, match="no load_from_checkpoint"):
        ours.load_from_checkpoint(int, tmp_path / "a.ckpt")


# ---------------------------------------------------------------------------------------------- Trainer's strategy


def strategy_with(ours: ModuleType, model: Any, optimizer: Any, **options: Any) -> Any:
    strategy = ours.HoldfastModelParallelStrategy(**options)
    strategy.model, strategy.optimizers = model, [optimizer]
    return strategy


def dumped_by(strategy: Any, **more: object) -> dict[str, Any]:
    """A checkpoint as Trainer puts it together: it asks the strategy for model and optimizers."""
    return {
        "global_step": 7,
        "pytorch-lightning_version": VERSION,
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [strategy.optimizer_state(LightningOptimizer(each)) for each in strategy.optimizers],
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        **more,
    }


@pytest.mark.parametrize("background", [False, True])
def test_a_strategy_fills_model_and_optimizer_in_place(ours: ModuleType, tmp_path: Path, background: bool) -> None:
    model, optimizer = trained()
    strategy = strategy_with(ours, model, optimizer, background=background)
    checkpoint = dumped_by(strategy)
    assert checkpoint["state_dict"]["0.weight"].data_ptr() == model[0].weight.data_ptr()  # Not copied.
    strategy.save_checkpoint(checkpoint, tmp_path / "last.ckpt")
    saved, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    torch.nn.init.zeros_(model[0].weight)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    strategy.optimizers = [fresh]
    rest = strategy.load_checkpoint(str(tmp_path / "last.ckpt"))
    assert equal(dict(model.state_dict()), dict(saved)) and equal(fresh.state_dict(), moments)
    assert rest == {
        "global_step": 7,
        "pytorch-lightning_version": VERSION,
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
    }
    strategy.remove_checkpoint(tmp_path / "last.ckpt")
    strategy.teardown()
    assert strategy.is_torn_down and names_in(tmp_path) == []


def test_a_strategy_loads_the_model_alone_outside_of_fit(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    strategy = strategy_with(ours, model, optimizer)
    strategy.save_checkpoint(dumped_by(strategy), tmp_path / "a.ckpt")
    untouched = torch.optim.AdamW(model.parameters(), lr=0.5)
    strategy.optimizers = [untouched]
    strategy.lightning_module.trainer.state.fn = TrainerFn.TESTING
    strategy.load_checkpoint(tmp_path / "a.ckpt")
    assert not untouched.state and untouched.param_groups[0]["lr"] == 0.5


def test_names_that_a_hook_removed_are_not_saved_and_others_are_refused(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    strategy = strategy_with(ours, model, optimizer)
    checkpoint = dumped_by(strategy)
    del checkpoint["state_dict"]["1.running_mean"]
    strategy.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    assert "state_dict.1.running_mean" not in holdfast.open_checkpoint(tmp_path / "a.ckpt").tensors
    with pytest.raises(InvalidError, match=r"1\.running_mean"):
        strategy.load_checkpoint(tmp_path / "a.ckpt")
    strategy.lightning_module.strict_loading = False
    strategy.load_checkpoint(tmp_path / "a.ckpt")

    averaged = dumped_by(strategy)
    averaged["state_dict"]["0.weight"] = torch.zeros(3, 4)
    with pytest.raises(InvalidError, match=r"put in 0\.weight; expected entries of the model alone"):
        strategy.save_checkpoint(averaged, tmp_path / "b.ckpt")
    assert not (tmp_path / "b.ckpt").exists()


def test_optimizers_that_cannot_be_filled_are_refused_before_anything_changes(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    strategy = strategy_with(ours, model, optimizer)
    weights = dumped_by(strategy)
    del weights["optimizer_states"]  # ModelCheckpoint(save_weights_only=True)
    strategy.save_checkpoint(weights, tmp_path / "weights.ckpt")
    torch.nn.init.zeros_(model[0].weight)
    with pytest.raises(InvalidError, match=r"has no 'optimizer_states'.*save_weights_only=True"):
        strategy.load_checkpoint(tmp_path / "weights.ckpt")
    assert not model[0].weight.any()


def test_ddp_resumes_what_a_strategy_saved(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    strategy = strategy_with(ours, model, optimizer)
    strategy.save_checkpoint(dumped_by(strategy), tmp_path / "a.ckpt")
    loaded = ours.HoldfastCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    fresh.load_state_dict(loaded["optimizer_states"][0])
    assert equal(fresh.state_dict(), optimizer.state_dict())


def test_a_strategy_resumes_what_ddp_saved(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = dumped(model, optimizer)
    saved, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    ours.HoldfastCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    torch.nn.init.zeros_(model[0].weight)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    rest = strategy_with(ours, model, fresh).load_checkpoint(tmp_path / "a.ckpt")
    assert equal(dict(model.state_dict()), dict(saved)) and equal(fresh.state_dict(), moments)
    del checkpoint["state_dict"], checkpoint["optimizer_states"]
    assert equal(rest, checkpoint)


def test_a_strategy_leaves_lightnings_own_checkpoints_to_it(ours: ModuleType, tmp_path: Path) -> None:
    strategy = strategy_with(ours, *trained())
    (tmp_path / "file.ckpt").write_bytes(b"of torch.save")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt" / ".metadata").write_bytes(b"of DCP")
    for name in ("file.ckpt", "folder.ckpt"):
        found = strategy.load_checkpoint(tmp_path / name, weights_only=True)
        assert found == {"read_by_lightning": str(tmp_path / name), "weights_only": True}
    with pytest.raises(InvalidError, match=r"folder\.ckpt: is a folder that Lightning wrote.*another name"):
        strategy.save_checkpoint(dumped_by(strategy), tmp_path / "folder.ckpt")
    assert names_in(tmp_path / "folder.ckpt") == [".metadata"]


def test_values_that_cannot_be_saved_are_refused_by_a_strategy_too(ours: ModuleType, tmp_path: Path) -> None:
    strategy = strategy_with(ours, *trained())
    with pytest.raises(InvalidError, match=r"hyper_parameters\.net.*ignore=\['net'\]"):
        strategy.save_checkpoint(dumped_by(strategy, hyper_parameters={"net": torch.nn.ReLU()}), tmp_path / "a.ckpt")
    with pytest.raises(InvalidError, match=r"skip is an argument of HoldfastModelParallelStrategy"):
        strategy.save_checkpoint(dumped_by(strategy, hyper_parameters={"f": print}), tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_a_checkpoint_in_one_file_is_refused(ours: ModuleType) -> None:
    for make in (
        lambda: ours.HoldfastModelParallelStrategy(save_distributed_checkpoint=False),
        lambda: ours.HoldfastFabricModelParallelStrategy(print, save_distributed_checkpoint=False),
    ):
        with pytest.raises(InvalidError, match=r"save_distributed_checkpoint=False.*export"):
            make()


def test_fsdp1_hands_out_nothing_that_would_gather_parameters(ours: ModuleType, tmp_path: Path) -> None:
    model, optimizer = trained()
    strategy = ours.HoldfastFSDPStrategy(background=True)
    strategy.model, strategy.optimizers = model, [optimizer]
    assert strategy.lightning_module_state_dict() == {}
    strategy.save_checkpoint(dumped_by(strategy), tmp_path / "a.ckpt")
    saved = copy.deepcopy(model.state_dict())
    torch.nn.init.zeros_(model[0].weight)
    strategy.load_checkpoint(tmp_path / "a.ckpt")
    assert equal(dict(model.state_dict()), dict(saved))
    strategy.teardown()


# ---------------------------------------------------------------------------------------------- Fabric's strategy


class Schedule:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_fabric_fills_its_state_and_returns_the_rest(ours: ModuleType, tmp_path: Path) -> None:
    strategy = ours.HoldfastFabricModelParallelStrategy(lambda model, mesh: model)
    (model, optimizer), schedule = trained(), Schedule()
    schedule.at = 3
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 7, "best": 0.5}
    strategy.save_checkpoint(tmp_path / "a.ckpt", state)
    saved = copy.deepcopy(model.state_dict())
    torch.nn.init.zeros_(model[0].weight)
    schedule.at = 0
    filled = {"model": model, "schedule": schedule, "step": 0}
    assert strategy.load_checkpoint(tmp_path / "a.ckpt", filled) == {"best": 0.5}
    assert equal(dict(model.state_dict()), dict(saved)) and filled["step"] == 7 and schedule.at == 3
    # The optimizer was not asked for: its tensors are not read to be returned.


def test_fabric_is_strict_about_keys_and_names(ours: ModuleType, tmp_path: Path) -> None:
    strategy = ours.HoldfastFabricModelParallelStrategy(print)
    model, optimizer = trained()
    strategy.save_checkpoint(tmp_path / "a.ckpt", {"model": model, "step": 7})
    with pytest.raises(MissingError, match=r"has no .optimizer.; it has .*model.*strict=False"):
        strategy.load_checkpoint(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
    strategy.load_checkpoint(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer}, strict=False)
    larger = torch.nn.Sequential(*model, torch.nn.Linear(3, 3))
    with pytest.raises(InvalidError, match=r"2\.weight"):
        strategy.load_checkpoint(tmp_path / "a.ckpt", {"model": larger})
    strategy.load_checkpoint(tmp_path / "a.ckpt", {"model": larger}, strict=False)
    for state in (None, {}, model):
        with pytest.raises(InvalidError, match=r"fabric\.load.*holdfast\.read"):
            strategy.load_checkpoint(tmp_path / "a.ckpt", state)


def test_a_filter_leaves_names_out(ours: ModuleType, tmp_path: Path) -> None:
    strategy = ours.HoldfastFabricModelParallelStrategy(print)
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "seen": {"a": 1, "b": 2}}
    wanted = {"model": lambda name, value: value.ndim == 2, "seen": lambda name, value: name == "a"}
    strategy.save_checkpoint(tmp_path / "a.ckpt", {"model": model, "seen": state["seen"]}, filter=wanted)
    found = holdfast.open_checkpoint(tmp_path / "a.ckpt")
    assert list(found.tensors) == ["model.0.weight"] and found.objects["seen"] == {"a": 1}
    with pytest.raises(InvalidError, match=r"filter\['optimizer'\]: is for AdamW"):
        strategy.save_checkpoint(tmp_path / "b.ckpt", state, filter={"optimizer": lambda name, value: True})


def test_a_failure_of_rank_0_is_one_of_every_rank(ours: ModuleType) -> None:
    ranks_of = sys.modules["holdfast.integrations.lightning.sharded"].StrategyRanks
    sent: list[Any] = []
    first = ranks_of(0, 2, lambda value: sent.append(value) or value, lambda: None)
    with pytest.raises(MissingError, match="gone"):
        first.from_first(lambda: (_ for _ in ()).throw(MissingError("gone")))
    second = ranks_of(1, 2, lambda value: sent[-1], lambda: None)
    with pytest.raises(MissingError, match="gone"):
        second.from_first(lambda: pytest.fail("called on rank 0 alone"))
    with pytest.raises(holdfast.UnavailableError, match="rank 0: OSError"):
        first.from_first(lambda: (_ for _ in ()).throw(OSError(5, "broken")))
    assert first.from_first(lambda: SimpleNamespace(a=1)).a == 1
