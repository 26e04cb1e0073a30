"""Exports that died where their files appear, and work of which a part is gone: nothing untrue is believed of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import holdfast
from holdfast._face import export_wiring, wiring
from holdfast.backends.stores.local_place import LocalPlace
from holdfast.base.clock import SystemClock
from holdfast.base.types.export import Claim, DoneWindow, ExportFile, ExportOptions, ExportWindow
from holdfast.errors import ConflictError, InvalidError, UnavailableError
from holdfast.offline.export.request import ExportReport, ExportRequest, ExportShare
from holdfast.settings import MIB, PAGE_BYTES
from tests.export.sources import SMALL, noise

REQUEST = ExportRequest(memory_bytes=64 * MIB, workers=1, window_bytes_max=4 * PAGE_BYTES)
FORMATS = ["safetensors", "torch", "dcp"]


class Died(BaseException):
    """The process did not live on."""


class DiesOnce(LocalPlace):
    """A destination whose process dies where it is told to."""

    def __init__(self, path: Path, *, before_publishing: bool = False, clearing: Callable[[Path], None]) -> None:
        super().__init__(path)
        self._before_publishing, self._clearing = before_publishing, clearing

    def publish(self) -> None:
        if self._before_publishing:
            raise Died
        super().publish()

    def clear(self) -> None:
        if os.path.lexists(self.url):
            self._clearing(Path(self.work_url))
            raise Died
        super().clear()


def nothing(_: Path) -> None:
    """Remove nothing."""


def made(source: Path, target: Path, to: str = "safetensors", destination: LocalPlace | None = None) -> ExportReport:
    """Export in files of few tensors."""
    options = ExportOptions(shard_bytes=600_000)
    export = export_wiring.export_of(source, target, to, options, wiring.DEFAULT_SETTINGS)
    export.place = destination or export.place
    return export.run(REQUEST)


def dead(source: Path, target: Path, to: str = "safetensors", clearing: Callable[[Path], None] = nothing) -> None:
    """Leave an export that died as soon as its files had appeared."""
    export = export_wiring.export_of(source, target, to, ExportOptions(shard_bytes=600_000), wiring.DEFAULT_SETTINGS)
    export.place = DiesOnce(target, clearing=clearing)
    with pytest.raises(Died):
        export.run(REQUEST)
    assert target.exists()


def done_but_hidden(source: Path, target: Path) -> Path:
    """Leave an export that died before its files appeared; return where they lie."""
    with pytest.raises(Died):
        made(source, target, destination=DiesOnce(target, before_publishing=True, clearing=nothing))
    return target.parent / f".{target.name}.holdfast-export"


def claimed(path: Path, files: Sequence[ExportFile] = ()) -> AbstractContextManager[Claim]:
    return LocalPlace(path).claimed("fingerprint", files, SystemClock())


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "saved"
    tensors = {f"layer{n}": noise((100, 1000), torch.float32, n) for n in range(4)}
    holdfast.save(path, {"model": tensors}, process_group=False, settings=SMALL)
    return path


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_that_died_just_after_it_appeared_is_done(tmp_path: Path, source: Path, to: str) -> None:
    dead(source, tmp_path / "out", to)
    before = contents(tmp_path / "out")
    report = made(source, tmp_path / "out", to)
    assert report.resumed_bytes == report.bytes
    assert contents(tmp_path / "out") == before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("to", FORMATS)
def test_what_appeared_and_was_taken_away_is_made_again(tmp_path: Path, source: Path, to: str) -> None:
    dead(source, tmp_path / "out", to)
    (tmp_path / "out").rename(tmp_path / "taken")
    report = made(source, tmp_path / "out", to)
    assert report.begun_anew and not report.resumed_bytes
    assert contents(tmp_path / "out") == contents(tmp_path / "taken")


def test_work_that_lost_a_file_begins_anew(tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(source, tmp_path / "straight")
    work = done_but_hidden(source, tmp_path / "out")
    next((work / "files").glob("model-00001-*")).unlink()
    report = made(source, tmp_path / "out")
    assert report.begun_anew and not report.resumed_bytes
    assert "has lost files" in caplog.text
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_work_that_lost_a_journal_goes_on(tmp_path: Path, source: Path) -> None:
    made(source, tmp_path / "straight", "torch")
    made_half = DiesOnce(tmp_path / "out", before_publishing=True, clearing=nothing)
    with pytest.raises(Died):
        made(source, tmp_path / "out", "torch", made_half)
    work = tmp_path / ".out.holdfast-export"
    (journal,) = work.glob("journal-*")
    windows = [window for line in journal.read_text().splitlines() if line for window in json.loads(line)]
    journal.unlink()
    journal.with_name(f"{journal.name}9").write_text(json.dumps(windows[::2]))
    report = made(source, tmp_path / "out", "torch")
    assert 0 < report.resumed_bytes < report.bytes
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_what_took_the_place_of_what_appeared_is_not_reported_as_ours(tmp_path: Path, source: Path) -> None:
    dead(source, tmp_path / "out", "torch")
    length = (tmp_path / "out").stat().st_size
    (tmp_path / "out").unlink()
    (tmp_path / "out").write_bytes(b"x" * length)
    with pytest.raises(ConflictError, match="exists already; it was not touched"):
        made(source, tmp_path / "out", "torch")
    assert (tmp_path / "out").read_bytes() == b"x" * length
    assert os.listdir(tmp_path) == ["out"], "the work is of no use to anybody"


def test_a_clearing_cut_short_leaves_nothing_that_stays(tmp_path: Path, source: Path) -> None:
    dead(source, tmp_path / "out", clearing=lambda work: (work / "plan.json").unlink())
    before = contents(tmp_path / "out")
    assert made(source, tmp_path / "out").resumed_bytes
    assert contents(tmp_path / "out") == before
    assert os.listdir(tmp_path) == ["out"]


def test_an_index_that_points_elsewhere_is_another_source(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for number in (1, 2):
        tensors = {"w": torch.full((1000,), float(number)), f"own{number}": torch.zeros(3)}
        save_file(tensors, folder / f"m-{number}.safetensors")

    def point(number: int) -> None:
        where = {"w": f"m-{number}.safetensors", "own1": "m-1.safetensors", "own2": "m-2.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))

    point(1)
    done_but_hidden(folder, tmp_path / "out")
    point(2)
    report = made(folder, tmp_path / "out")
    assert report.begun_anew and not report.resumed_bytes
    assert load_file(tmp_path / "out" / "model.safetensors")["w"][0] == 2


def test_a_file_written_again_under_its_old_times_is_another_source(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"w": torch.zeros(1000)}, path)
    before = path.stat()
    done_but_hidden(path, tmp_path / "out")
    with path.open("r+b") as file:
        file.write(save({"w": torch.ones(1000)}))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    report = made(path, tmp_path / "out")
    assert report.begun_anew
    assert load_file(tmp_path / "out" / "model.safetensors")["w"][0] == 1


def test_a_worker_refuses_a_source_that_was_written_again(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"w": torch.zeros(1000)}, path)
    export = export_wiring.export_of(path, tmp_path / "out", "safetensors", ExportOptions(), wiring.DEFAULT_SETTINGS)
    with export.place.claimed(export.fingerprint, export.files, SystemClock()) as claim:
        share = ExportShare(
            number=0,
            count=1,
            window_bytes=PAGE_BYTES,
            memory_bytes=64 * MIB,
            done=(),
            journal=claim.journal,
            fingerprint=export.fingerprint,
        )
        path.write_bytes(save({"w": torch.ones(1000)}))
        with pytest.raises(ConflictError, match="was written again while it was read"):
            export.execute(share, lambda *_: None)


def test_work_goes_before_what_vouches_for_it(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = done_but_hidden(source, tmp_path / "out")
    removed: list[str] = []
    for module, name in ((os, "unlink"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, lambda path: removed.append(os.path.basename(path)))
    (work / "published.json").write_bytes(b"{}")
    LocalPlace(tmp_path / "out").clear()
    assert removed[0] == "plan.json"
    assert removed[-2:] == ["files", "published.json"]


def test_a_begin_that_fails_leaves_nothing(tmp_path: Path) -> None:
    files = [ExportFile(name="a", bytes=10), ExportFile(name="n" * 300, bytes=10)]
    with pytest.raises(InvalidError, match="File name too long"), claimed(tmp_path / "out", files):
        pass
    assert os.listdir(tmp_path) == []


def test_the_folder_that_is_claimed_is_the_one_at_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    target, lock = tmp_path / "out", fcntl.flock

    def flock(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        # Between opening and locking, whoever had it was done and took it away.
        os.rmdir(tmp_path / ".out.holdfast-export")
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with claimed(target):
        with pytest.raises(ConflictError, match="another process is exporting to it"), claimed(target):
            pass
        LocalPlace(target).clear()
    assert os.listdir(tmp_path) == []


def test_a_claim_ends_without_taking_anothers_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "out"):
        shutil.rmtree(tmp_path / ".out.holdfast-export")
        os.mkdir(tmp_path / ".out.holdfast-export")
    assert os.listdir(tmp_path) == [".out.holdfast-export"]


def test_nothing_is_lost_behind_a_line_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LocalPlace(tmp_path / "out")
    first, second, third = (DoneWindow(ExportWindow(0, n, n + 1), ((0, n, n + 1, 7),)) for n in range(3))
    with place.claimed("fingerprint", [ExportFile(name="a", bytes=10)], SystemClock()) as claim:
        place.record(claim.journal, [first])
        (journal,) = (tmp_path / ".out.holdfast-export").glob("journal-*")

        def full(fd: int) -> None:
            os.truncate(journal, journal.stat().st_size - 3)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(UnavailableError, match=r"could not write .*journal-.*: ENOSPC"):
                place.record(claim.journal, [second])
        assert place.recorded(claim.journal) == [first]
        place.record(claim.journal, [third])
        assert place.recorded(claim.journal) == [first, third]


def test_windows_of_a_damaged_line_are_written_again(tmp_path: Path, source: Path) -> None:
    made(source, tmp_path / "straight")
    work = done_but_hidden(source, tmp_path / "out")
    for journal in work.glob("journal-*"):
        journal.write_bytes(b"\n[{}]\n7\n\xff" + journal.read_bytes()[:-3])
    report = made(source, tmp_path / "out")
    assert not report.resumed_bytes and not report.begun_anew
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_workers_read_a_url_as_the_caller_wrote_it(tmp_path: Path) -> None:
    """Without the slash at the end, the URL names one file."""
    folder = tmp_path / "from.ckpt"
    folder.mkdir()
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors")
    holdfast.export(f"local://{folder}/", tmp_path / "out", to="safetensors", workers=2)
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].equal(torch.ones(3))
