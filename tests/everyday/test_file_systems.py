"""Someone keeps runs and checkpoints in file systems of fsspec, by URL."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

import holdfast
from holdfast.errors import ConflictError, InvalidError
from holdfast.settings import ObjectSettings, Settings
from tests.support.fsspec_file_systems import CARELESS, IN_MEMORY, QUIET, READABLE
from tests.unit.cli.running import holdfast as command

ALONE = Settings(object_store=ObjectSettings(single_writer=True))


@pytest.fixture(params=("local", IN_MEMORY, QUIET))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}://{'' if request.param == IN_MEMORY else tmp_path}/{uuid.uuid4().hex}"


def state_of(step: int) -> dict[str, object]:
    return {"head": torch.full((1000,), float(step)), "backbone": torch.ones(100_000), "step": step}


def loaded_step(url: str, step: int | None = None, **options: object) -> int:
    state: dict[str, object] = {"head": torch.zeros(1000), "backbone": torch.zeros(100_000), "step": 0}
    with holdfast.CheckpointManager(url, process_group=False, **options) as manager:  # type: ignore[arg-type]
        assert manager.load(state, step) == state["step"]
    expected = state_of(state["step"])  # type: ignore[arg-type]
    assert torch.equal(state["head"], expected["head"])  # type: ignore[arg-type]
    assert torch.equal(state["backbone"], expected["backbone"])  # type: ignore[arg-type]
    return state["step"]  # type: ignore[return-value]


def names(url: str) -> list[str]:
    system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    return sorted(name.removeprefix(root).lstrip("/") for name in system.find(root))


def test_a_run_lives_there(url: str) -> None:
    settings = Settings(collect_grace_seconds=0)
    with holdfast.CheckpointManager(url, process_group=False, keep_last=3, settings=settings) as manager:
        for step in range(1, 5):
            manager.save(step, state_of(step)).wait()
        manager.tag(2, "best")
    assert loaded_step(url) == 4
    assert loaded_step(url, 2) == 2
    listed = command("ls", url)
    assert listed.status == 0 and "best" in listed.out, listed.err
    assert command("verify", url).status == 0
    assert command("rm", url, 3, "--grace", 0).status == 0
    assert command("gc", url, "--keep-last", 1, "--grace", 0).status == 0
    kept = [name for name in names(url) if name.endswith("/manifest.json")]
    assert kept == ["step-000000000002/manifest.json", "step-000000000004/manifest.json"]
    assert loaded_step(url) == 4
    assert not any("/." in name or "probe" in name for name in names(url))


def test_a_checkpoint_at_a_path(url: str) -> None:
    holdfast.save(f"{url}/model", state_of(1), process_group=False)
    with pytest.raises(ConflictError):
        holdfast.save(f"{url}/model", state_of(2), process_group=False)
    checkpoint = holdfast.open_checkpoint(f"{url}/model")
    assert checkpoint.read("head")[0] == 1
    if url.startswith(QUIET):
        with pytest.raises(InvalidError, match=r"cannot replace a file at once.*overwrite=False"):
            holdfast.save(f"{url}/model", state_of(2), process_group=False, overwrite=True)
        expected = 1
    else:
        holdfast.save(f"{url}/model", state_of(2), process_group=False, overwrite=True)
        expected = 2
    checkpoint = holdfast.open_checkpoint(f"{url}/model")
    assert checkpoint.read("head")[0] == expected
    assert list(checkpoint.verify()) == []


def test_what_takes_every_create_needs_one_writer(tmp_path: Path) -> None:
    url = f"{CARELESS}://{tmp_path}/run"
    with pytest.raises(InvalidError, match=r"let two writers create one object.*single_writer=True"):
        holdfast.save(url, state_of(1), process_group=False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with holdfast.CheckpointManager(url, process_group=False, settings=ALONE) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step)).wait()
    assert loaded_step(url, settings=ALONE) == 2


def test_what_can_only_be_read_is_read(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step)).wait()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    url = f"{READABLE}://{tmp_path}/run"
    assert loaded_step(url) == 2
    checkpoint = holdfast.open_checkpoint(url, step=1)
    assert list(checkpoint.verify()) == []
    assert command("ls", url).status == 0
    with pytest.raises(InvalidError, match="can only be read"):
        holdfast.save(f"{url}-2", state_of(1), process_group=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_folder_is_the_same_as_a_url_and_as_a_path(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(f"local://{tmp_path}/run", process_group=False) as manager:
        manager.save(1, state_of(1)).wait()
    assert loaded_step(str(tmp_path / "run")) == 1
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert loaded_step(f"local://{tmp_path}/copy") == 1
