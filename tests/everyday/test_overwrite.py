"""Someone keeps the best model at one path, as `torch.save(…, "best.pt")` does, and saves over it again and again."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def training() -> dict[str, object]:
    model = torch.nn.Linear(8, 8)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}


def is_at(path: str, epoch: int) -> bool:
    """Return whether the checkpoint at a path is that of an epoch, after loading it into a new state."""
    state = training()
    holdfast.load(path, state, process_group=False)
    model = state["model"]
    assert isinstance(model, torch.nn.Linear) and bool((model.weight == epoch).all()) == (state["epoch"] == epoch)
    return state["epoch"] == epoch


def trained_to(state: dict[str, object], epoch: int) -> dict[str, object]:
    model = state["model"]
    assert isinstance(model, torch.nn.Linear)
    torch.nn.init.constant_(model.weight, float(epoch))
    return {**state, "epoch": epoch}


def test_best_is_saved_again_and_again(here: Path) -> None:
    state = training()
    for epoch in range(3):
        holdfast.save("checkpoints/best", trained_to(state, epoch), overwrite=True, process_group=False)
        assert is_at("checkpoints/best", epoch)
    # Nobody passes settings here: what was replaced a moment ago stays for half a minute.
    assert len([path for path in (here / "checkpoints/best").iterdir() if len(path.name) == 16]) == 3


def test_last_beside_best_in_the_background(here: Path) -> None:
    """As Lightning's `last.ckpt` and `best.ckpt`: two paths, saved while training goes on, none waited for."""
    state, handles = training(), []
    for epoch in range(6):
        trained_to(state, epoch)
        handles.append(holdfast.async_save("last", trained_to(state, epoch), overwrite=True, process_group=False))
        if epoch % 2 == 0:
            handles.append(holdfast.async_save("best", trained_to(state, epoch), overwrite=True, process_group=False))
    for handle in handles:
        handle.wait()
    assert is_at("last", 5) and is_at("best", 4)


def test_lazily_while_training_goes_on(here: Path) -> None:
    settings = holdfast.Settings(staging="lazy")
    state = training()
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, torch.nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    holdfast.save("best", trained_to(state, 1), overwrite=True, process_group=False)
    handle = holdfast.async_save("best", trained_to(state, 2), overwrite=True, process_group=False, settings=settings)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    handle.wait()
    assert is_at("best", 2)


def test_without_overwrite_the_message_says_how(here: Path) -> None:
    holdfast.save("best", trained_to(training(), 1), process_group=False)
    with pytest.raises(holdfast.ConflictError, match=r"already there; .*replace it with overwrite=True"):
        holdfast.save("best", trained_to(training(), 2), process_group=False)
    assert is_at("best", 1)


def test_the_path_of_a_torch_file_stays_as_it_is(here: Path) -> None:
    before = b"what torch.save wrote"
    (here / "best.pt").write_bytes(before)
    with pytest.raises(holdfast.InvalidError, match=r"best\.pt: is a file; expected a checkpoint of Holdfast"):
        holdfast.save("best.pt", training(), overwrite=True, process_group=False)
    assert (here / "best.pt").read_bytes() == before


def test_a_best_that_was_copied_out_of_a_run(here: Path) -> None:
    with holdfast.CheckpointManager("run", process_group=False) as manager:
        manager.save(7, trained_to(training(), 7)).wait()
    shutil.copytree("run/step-000000000007", "best")
    holdfast.save("best", trained_to(training(), 8), overwrite=True, process_group=False)
    assert is_at("best", 8) and is_at("run/step-000000000007", 7)
    with pytest.raises(holdfast.InvalidError, match="is a step of a run"):
        holdfast.save("run/step-000000000007", trained_to(training(), 9), overwrite=True, process_group=False)


def test_the_commands_see_one_checkpoint(here: Path) -> None:
    for epoch in range(2):
        holdfast.save("best", trained_to(training(), epoch), overwrite=True, process_group=False)
    for command in (["verify", "best"], ["inspect", "best"], ["trace", "best"], ["diff", "best", "best"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0 and "damage" not in done.output, (command, done.output)


def test_a_copy_goes_on_by_itself(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for epoch in range(2):
        holdfast.save("best", trained_to(training(), epoch), overwrite=True, process_group=False)
    shutil.copytree("best", "copied")
    shutil.move("best", "moved")
    for path in ("copied", "moved"):
        holdfast.save(path, trained_to(training(), 5), overwrite=True, process_group=False)
        assert is_at(path, 5)
    assert not caplog.records
