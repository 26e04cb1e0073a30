"""A redo log as the commands show it: its reach and bytes, its damage, and a step that is no checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast as hf
from tests.unit.cli.running import Ended, holdfast


def _train(root: Path, stop: int, every: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    options = hf.Differential()
    with hf.CheckpointManager(root, every=every, process_group=False, differential=options) as manager:
        for step in range(1, stop + 1):
            model(torch.ones(2, 30)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = manager.maybe_save(step, state)
            if handle is not None:
                handle.wait()
            assert manager._redo_log is not None and manager._redo_log._writer.drain()  # A segment for each record.


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("redo_log") / "run"
    _train(root, 9, every=5)
    return root


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A run with bases 1 and 5, and records 2 to 9."""
    return Path(shutil.copytree(recorded, tmp_path / "recorded"))


def _segment(run: Path, step: int) -> Path:
    (log,) = {path.parent for path in run.glob("log/*/r00000/*2.safetensors")}
    return log / f"{step:012d}.safetensors"


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _bytes(run: Path, steps: range) -> int:
    return sum(_segment(run, step).stat().st_size for step in steps)


def test_ls_says_how_far_the_log_reaches(run: Path) -> None:
    shown = holdfast("ls", run)
    assert shown.status == 0
    # The segment of step 5 may hold records after the base, as far as its name tells.
    count, size = 5, _bytes(run, range(5, 10))
    assert f"5 + log to 9: {size / 1024:.1f} KiB in {count} segments" in shown.out

    newest, before = holdfast("ls", run, "--json").json()["logs"]

    assert (newest["base"], newest["reach"], newest["segments"], newest["bytes"]) == (5, 9, count, size)
    assert (before["base"], before["reach"], before["segments"]) == (1, 9, 8)


def test_ls_of_a_run_without_a_log_shows_none(root: Path) -> None:
    assert "log" not in holdfast("ls", root).out
    assert holdfast("ls", root, "--json").json()["logs"] == []


def test_ls_passes_over_a_damaged_base(run: Path) -> None:
    _flip(run / "step-000000000005" / "manifest.json", 100)
    assert "1 + log to 9: " in holdfast("ls", run).out


@pytest.mark.parametrize(("step", "segments"), [(None, 5), ("1", 8)])
def test_inspect_shows_the_log_of_a_base(run: Path, step: str | None, segments: int) -> None:
    words = () if step is None else ("--step", step)
    shown = holdfast("inspect", run, *words)
    log = holdfast("inspect", run, *words, "--json").json()["log"]
    assert f"{log['id']}: to step 9, " in shown.out and f"in {segments} segments" in shown.out
    assert (log["reach"], log["segments"]) == (9, segments)
    by_path = holdfast("inspect", run / "step-000000000005", "--json").json()["log"]
    assert (by_path["base"], by_path["reach"]) == (5, 9)


def test_inspect_of_another_checkpoint_shows_no_log(root: Path) -> None:
    assert "redo log" not in holdfast("inspect", root).out
    assert holdfast("inspect", root, "--json").json()["log"] is None


def test_verify_reads_the_log_too(run: Path) -> None:
    shown = holdfast("verify", run)
    assert shown.status == 0
    assert f"redo log: {_bytes(run, range(2, 10)) / 1024:.1f} KiB in 8 segments read and checked" in shown.out
    assert holdfast("verify", run, "--json").json()["log"] == {
        "segments": 8, "bytes": _bytes(run, range(2, 10)), "torn": []
    }  # fmt: skip
    # A step that was named is one checkpoint.
    assert holdfast("verify", run, "--step", "5", "--json").json()["log"] is None


def test_verify_names_rank_segment_record_and_tensor(run: Path) -> None:
    segment = _segment(run, 7)
    _flip(segment, segment.stat().st_size - 1)

    shown = holdfast("verify", run)

    assert shown.status == 1
    assert f"{segment.relative_to(run)} bytes " in shown.out
    assert "rank 0, record of step 7: chunk 0, stored raw, hashes to " in shown.out
    (damage,) = holdfast("verify", run, "--json").json()["damages"]
    assert damage["file"] == str(segment.relative_to(run))
    assert damage["tensor"] in ("0/model.weight", "0/model.bias")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _without_header(path: Path) -> None:
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])


def _remove_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("tear", [_cut, _without_header, _remove_end])
def test_only_the_last_segment_may_be_torn(run: Path, tear: Callable[[Path], None]) -> None:
    tear(_segment(run, 9))
    shown = holdfast("verify", run)
    assert shown.status == 0
    assert f"{_segment(run, 9).relative_to(run)}: ends early, since the run was killed" in shown.out
    assert holdfast("ls", run, "--json").json()["logs"][0]["reach"] == 8

    tear(_segment(run, 8))
    (damage,) = holdfast("verify", run, "--json").json()["damages"]
    assert damage["file"] == str(_segment(run, 8).relative_to(run))
    assert damage["message"].startswith("rank 0: ")
    assert holdfast("ls", run, "--json").json()["logs"][0]["reach"] == 7


@pytest.mark.parametrize("at", [50, 4000])
def test_a_flipped_bit_in_a_header_or_record_is_damage(run: Path, at: int) -> None:
    segment = _segment(run, 9)
    _flip(segment, at)
    (damage,) = holdfast("verify", run, "--json").json()["damages"]
    assert damage["file"] == str(segment.relative_to(run)) and damage["message"].startswith("rank 0")


def test_gc_counts_the_segments_that_go(run: Path) -> None:
    assert holdfast("gc", run, "--dry-run", "--json").json()["removed"]["files"] == 0
    folder = run / "log" / ("0" * 16) / "r00000"  # No manifest states this log.
    folder.mkdir(parents=True)
    size = _bytes(run, range(3, 5))
    for segment in (_segment(run, 3), _segment(run, 4)):
        shutil.copy(segment, folder / segment.name)

    planned = holdfast("gc", run, "--dry-run", "--json").json()["removed"]

    assert (planned["files"], planned["bytes"], planned["steps"]) == (2, size, [])
    assert holdfast("gc", run, "--grace", "0", "--json").json()["removed"] == planned
    assert not list(folder.glob("*"))
    assert holdfast("ls", run, "--json").json()["logs"][0]["reach"] == 9


def _verbs(run: Path, tmp_path: Path) -> dict[str, Ended]:
    return {
        "inspect": holdfast("inspect", run, "--step", "8"),
        "tag": holdfast("tag", run, "8", "best"),
        "cp": holdfast("cp", run, tmp_path / "copy", "--step", "8"),
        "export": holdfast("export", run, tmp_path / "model", "--to", "torch", "--step", "8"),
        "rm": holdfast("rm", run, "8"),
        "repair": holdfast("repair", run, "--step", "8"),
        "trace": holdfast("trace", run, "--step", "8", "-o", tmp_path / "trace.json"),
        "verify": holdfast("verify", run, "--step", "8"),
    }


def test_verbs_refuse_a_step_that_only_the_log_reaches(run: Path, tmp_path: Path) -> None:
    for verb, ended in _verbs(run, tmp_path).items():
        assert ended.status != 0, verb
        assert "step 8 is in the redo log after step 5, and is no checkpoint" in ended.err, verb
        assert "CheckpointManager.load(state, step=8), which redoes the step" in ended.err, verb
    with pytest.raises(hf.errors.MissingError, match="step 3 is in the redo log after step 1"):
        hf.open_checkpoint(run, step=3)
    with pytest.raises(hf.errors.MissingError, match="no committed step 10"):
        hf.open_checkpoint(run, step=10)


def test_a_copy_of_a_run_says_that_it_has_no_log(run: Path, root: Path, tmp_path: Path) -> None:
    shown = holdfast("cp", run, tmp_path / "copy")
    assert shown.status == 0 and shown.out.rstrip().endswith("; the redo log is not copied")
    assert not (tmp_path / "copy" / "log").exists()
    assert "log" not in holdfast("ls", tmp_path / "copy").out
    assert "redo log" not in holdfast("cp", root, tmp_path / "other").out


def test_gc_leaves_a_log_whose_base_is_not_committed_yet(run: Path) -> None:
    """A run that has just started looks as this one does: its first base is being saved."""
    for step in (1, 5):
        (run / f"step-{step:012d}" / "manifest.json").unlink()
    before = len(list(run.glob("log/*/*/*")))
    planned = holdfast("gc", run, "--dry-run", "--json").json()["removed"]
    assert planned["files"] <= sum(path.is_file() for path in run.glob("step-*/**/*"))
    # The run was killed: its save goes first, and then its log.
    holdfast("gc", run, "--grace", "0")
    assert len(list(run.glob("log/*/*/*"))) == before
    holdfast("gc", run, "--grace", "0")
    assert not list(run.glob("log/*/*/*"))


def _damage(manifest: Path, *fields: str) -> None:
    """Damage the time of a manifest, and further fields, by more than one bit."""
    text = manifest.read_bytes()
    for field in ("created", *fields):
        text = text.replace(f'\n "{field}": "'.encode(), f'\n "{field}": ?'.encode())
    manifest.write_bytes(text)


def test_a_rebuilt_base_keeps_its_log(run: Path) -> None:
    _damage(run / "step-000000000005" / "manifest.json")
    _damage(run / "step-000000000001" / "manifest.json", "log")  # The first base gives a log its id.
    shown = holdfast("repair", run)
    assert shown.status == 0 and "rebuilt from 1 parts" in shown.out and "redo log" not in shown.out
    assert [log["reach"] for log in holdfast("ls", run, "--json").json()["logs"]] == [9, 9]


def test_a_rebuilt_base_whose_log_is_unknown_is_reported(run: Path) -> None:
    _damage(run / "step-000000000005" / "manifest.json", "log")
    assert "lost are parent, software, redo log" in holdfast("repair", run).out
    assert [log["reach"] for log in holdfast("ls", run, "--json").json()["logs"]] == [4]
