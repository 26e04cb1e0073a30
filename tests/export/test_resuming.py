"""Exports that were killed, interrupted or refused: what is left, and what the next try makes of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api
from holdfast._face import export_wiring, wiring
from holdfast.base.clock import SystemClock
from holdfast.base.types.events import Progress
from holdfast.base.types.export import ExportOptions
from holdfast.errors import ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.offline.export import workers
from holdfast.offline.export.request import ExportRequest
from holdfast.settings import MIB, PAGE_BYTES
from tests.export import held
from tests.export.held import children, is_running, wait_until, written_down
from tests.export.sources import SMALL, bits, exported, noise

ROOT = Path(__file__).resolve().parents[2]

WORK = """
import sys, threading
from holdfast._face import wiring
from holdfast.offline.export.export import Export
from holdfast.offline.export.request import ExportRequest
from holdfast.base.clock import SystemClock
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.base.types.export import ExportOptions
from holdfast.backends.stores.local_place import LocalPlace
from tests.export.odd import OddWriter

class Fast(SystemClock):
    def monotonic_seconds(self):
        return super().monotonic_seconds() * 1000  # each window is made durable, and written down, on its own

class Told:
    told = 0
    def on_event(self, event):
        print(event.done_bytes, event.total_bytes, flush=True)
        self.told += 1
        if self.told == int(told_max):
            threading.Event().wait()  # To be killed, by somebody who may be slow.

source, target, told_max = sys.argv[1:]
checkpoint = wiring.checkpoint_at(source, Settings())
files = OddWriter().files(checkpoint.content, ExportOptions())
export = Export(checkpoint, LocalPlace(target), "odd", files, Fast())
request = ExportRequest(memory_bytes=64 * MIB, workers=1, window_bytes_max=16 * PAGE_BYTES)
report = export.run(request, observer=Told())
print("done", report.resumed_bytes, report.bytes, flush=True)
"""


def begun(source: Path, target: Path, told_max: int = 0) -> subprocess.Popen[str]:
    """Start an export in a process of its own, which goes no further than to have told of its progress so often."""
    command = [sys.executable, "-c", WORK, str(source), str(target), str(told_max)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def begun_and_held(arguments: list[str], workers: int) -> subprocess.Popen[str]:
    """Start a command that exports and holds, and return once it, or each of its workers, has written windows down."""
    command = [sys.executable, "-m", "tests.export.held", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    target = Path(arguments[2])
    work = target.with_name(f".{target.name}.holdfast-export")

    def is_held() -> bool:
        assert process.poll() is None, process.communicate()
        written = written_down(work)
        return len(written) == workers and all(written)

    wait_until(is_held)
    return process


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "saved"
    tensors = {f"layer{n}": noise((123, 1021), torch.float32, n) for n in range(12)}
    holdfast.save(path, {"model": tensors}, process_group=False, settings=SMALL)
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("whole") / "out"
    with begun(source, target) as process:
        assert process.wait() == 0
    return contents(target)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_an_export_killed_at_any_moment_goes_on_and_ends_the_same(
    tmp_path: Path, source: Path, whole: dict[str, bytes], seed: int
) -> None:
    chance = random.Random(seed)
    target = tmp_path / "out"
    kills = 0
    while True:
        wanted = chance.randrange(1, 60) if kills < 4 else 1 << 30
        process = begun(source, target, wanted + 9)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if len(lines) >= wanted:
                time.sleep(chance.random() / 100)
                process.kill()
                break
        lines += process.stdout.readlines()
        process.stdout.close()
        if process.wait() == 0:
            break
        kills += 1
        if target.exists():  # The kill came behind the publication: the files are whole, and the next try says so.
            assert contents(target) == whole
            if os.listdir(tmp_path) == ["out"]:
                return
    assert kills >= 1, "nothing was killed: the test proves nothing"
    word, resumed, total = lines[-1].split()
    assert word == "done"
    if kills == 4:
        assert 0 < int(resumed) <= int(total)
    assert contents(target) == whole
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.long
def test_a_command_killed_with_its_workers_at_work_goes_on(tmp_path: Path) -> None:
    tensors = {f"layer{n}": noise((8, MIB), torch.float32, n) for n in range(6)}
    holdfast.save(tmp_path / "saved", {"model": tensors}, process_group=False)
    arguments = ["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "safetensors"]
    arguments += ["--workers", "2", "--memory", "128MiB", "--shard-size", "100MB", "--json"]
    process = begun_and_held(arguments, workers=2)
    workers = children(process.pid)
    assert len(workers) == 2 and all(is_running(each) for each in workers)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_running(each) for each in workers))  # Nobody told them: they saw that it is gone.
    assert not (tmp_path / "out").exists()
    durable_bytes = sum(written_down(tmp_path / ".out.holdfast-export"))
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert 0 < document["resumed_bytes"] == durable_bytes < document["bytes"]
    again = api.open_checkpoint(tmp_path / "out")
    for name, tensor in tensors.items():
        assert bits(again.read(f"model.{name}", framework="torch")) == bits(tensor)  # type: ignore[arg-type]


def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path) -> None:
    tensors = {f"layer{n}": noise((8, MIB), torch.float32, n) for n in range(6)}
    holdfast.save(tmp_path / "saved", {"model": tensors}, process_group=False)
    arguments = ["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "safetensors", "--memory", "64MiB"]
    process = begun_and_held(arguments, workers=1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)  # Ends its input: it is held no longer.
    assert process.returncode == 130, said
    assert "Run the same command again: it resumes" in said
    assert not (tmp_path / "out").exists()
    durable_bytes = sum(written_down(tmp_path / ".out.holdfast-export"))
    command = [sys.executable, "-m", "holdfast.cli", *arguments, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["resumed_bytes"] == durable_bytes > 0


def test_no_thread_ends_while_an_export_goes_on(tmp_path: Path, source: Path) -> None:
    """Python discards a Ctrl-C that comes while it clears up after a thread."""
    seen: set[threading.Thread] = set()

    class Looks:
        def on_event(self, event: Progress) -> None:
            seen.update(each for each in threading.enumerate() if each.name.startswith("holdfast-read"))
            assert not [each.name for each in seen if not each.is_alive()]

    export = export_wiring.export_of(source, tmp_path / "out", "safetensors", ExportOptions(), wiring.DEFAULT_SETTINGS)
    report = export.run(
        ExportRequest(memory_bytes=64 * MIB, workers=1, window_bytes_max=16 * PAGE_BYTES), observer=Looks()
    )
    assert report.bytes > 50 * 16 * PAGE_BYTES and seen


class Stopped(Exception):
    """What an observer raises to stop an export."""


class StopsAt:
    """Stops an export that is so far."""

    def __init__(self, share: float) -> None:
        self._share = share

    def on_event(self, event: Progress) -> None:
        if event.done_bytes >= event.total_bytes * self._share:
            raise Stopped


def stopped(source: Path, target: Path, options: ExportOptions | None = None) -> None:
    """Leave half an export."""
    export = export_wiring.export_of(source, target, "safetensors", options or ExportOptions(), wiring.DEFAULT_SETTINGS)
    request = ExportRequest(memory_bytes=64 * MIB, workers=1, window_bytes_max=PAGE_BYTES)
    with pytest.raises(Stopped):
        export.run(request, observer=StopsAt(0.5))


@pytest.mark.long
def test_what_was_done_is_not_done_again(tmp_path: Path, source: Path) -> None:
    stopped(source, tmp_path / "out")
    larger = ExportRequest(memory_bytes=64 * MIB, workers=1, window_bytes_max=64 * PAGE_BYTES)
    report = exported(source, tmp_path / "out", request=larger)
    assert report.bytes * 0.4 < report.resumed_bytes < report.bytes
    assert report.read_bytes < report.bytes * 0.8
    exported(source, tmp_path / "straight")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_other_options_and_another_source_begin_anew_and_say_so(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {f"layer{n}": torch.randn(123, 1021) for n in range(12)}
    holdfast.save(tmp_path / "other", {"model": dict(other)}, process_group=False)
    stopped(source, tmp_path / "out")
    stopped(source, tmp_path / "out", ExportOptions(dtype="float16"))
    assert "other options; it is discarded" in caplog.text
    caplog.clear()
    report = exported(tmp_path / "other", tmp_path / "out", ExportOptions(dtype="float16"))
    assert report.begun_anew and not report.resumed_bytes
    assert "another source" in caplog.text
    again = api.open_checkpoint(tmp_path / "out")
    for name, tensor in other.items():
        assert bits(again.read(f"model.{name}", framework="torch")) == bits(tensor.half())  # type: ignore[arg-type]


def test_files_read_in_place_that_changed_begin_anew(tmp_path: Path, source: Path) -> None:
    exported(source, tmp_path / "first")
    stopped(tmp_path / "first", tmp_path / "out")
    path = tmp_path / "first" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = exported(tmp_path / "first", tmp_path / "out")
    assert report.begun_anew and not report.resumed_bytes
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == bytes(data)


def test_a_source_that_is_written_again_meanwhile_makes_nothing_appear(tmp_path: Path, source: Path) -> None:
    exported(source, tmp_path / "first")
    path = tmp_path / "first" / "model.safetensors"
    data = bytearray(path.read_bytes())

    class WritesAgain:
        def on_event(self, event: Progress) -> None:
            if path.read_bytes() != data:
                path.with_name("new").write_bytes(data)
                path.with_name("new").replace(path)

    for to in ("safetensors", "holdfast"):
        data[-1] ^= 1
        with pytest.raises(ConflictError, match=r"model\.safetensors: was written again"):
            api.export(tmp_path / "first", tmp_path / to, to=to, observer=WritesAgain())
        assert not (tmp_path / to / "manifest.json").exists() and not (tmp_path / to / "model.safetensors").exists()
    report = exported(tmp_path / "first", tmp_path / "safetensors")
    assert report.begun_anew
    assert (tmp_path / "safetensors" / "model.safetensors").read_bytes() == bytes(data)


def test_what_stands_at_the_destination_is_not_touched(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConflictError, match="exists already; it was not touched"):
        exported(source, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
    assert os.listdir(tmp_path) == ["out"]


def test_what_appears_at_the_destination_meanwhile_is_not_touched(tmp_path: Path, source: Path) -> None:
    class Meanwhile:
        def on_event(self, event: Progress) -> None:
            (tmp_path / "out").mkdir(exist_ok=True)

    export = export_wiring.export_of(source, tmp_path / "out", "safetensors", ExportOptions(), wiring.DEFAULT_SETTINGS)
    request = ExportRequest(memory_bytes=64 * MIB, workers=1)
    with pytest.raises(ConflictError, match="appeared there meanwhile; it was not touched"):
        export.run(request, observer=Meanwhile())
    (tmp_path / "out").rmdir()
    assert exported(source, tmp_path / "out").read_bytes == 0


def test_two_exports_to_one_place_do_not_mix(tmp_path: Path, source: Path) -> None:
    export = export_wiring.export_of(source, tmp_path / "out", "safetensors", ExportOptions(), wiring.DEFAULT_SETTINGS)
    with (
        export.place.claimed(export.fingerprint, export.files, SystemClock()),
        pytest.raises(ConflictError, match="another process is exporting to it"),
    ):
        exported(source, tmp_path / "out")


@pytest.mark.parametrize("inside", ["out", "deep/out"])
def test_a_destination_inside_the_source_is_refused(tmp_path: Path, source: Path, inside: str) -> None:
    with pytest.raises(InvalidError, match="which is exported; expected a path outside it"):
        exported(source, source / inside)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(InvalidError, match="which is exported; expected a path outside it"):
        exported(source, tmp_path / "link" / inside)


def test_bad_calls_are_refused(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out"
    for wrong, message in (
        ({"to": "safetensor"}, "to='safetensor'; expected one of safetensors"),
        ({"to": "safetensors", "dtype": "int8"}, "dtype='int8'; expected one of float32"),
        ({"to": "safetensors", "shard_bytes": 0}, "shard_bytes=0; expected a positive"),
        ({"to": "safetensors", "workers": -1}, "workers=-1; expected a positive"),
        ({"to": "safetensors", "memory_bytes": MIB}, "memory: 1048576 bytes for 1 workers; expected at least"),
        ({"to": "safetensors", "memory_bytes": 64 * MIB, "workers": 2}, "for 2 workers; expected at least"),
    ):
        with pytest.raises(InvalidError, match=message):
            api.export(source, target, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="no other process can open this store; expected workers=1"):
        holdfast.save("memory://exported", {"model": {"w": torch.ones(3)}}, process_group=False)
        api.export("memory://exported", target, to="safetensors", workers=2, memory_bytes=128 * MIB)
        api.export(source, "memory://there", to="safetensors", workers=2, memory_bytes=128 * MIB)
    with pytest.raises(InvalidError, match="make it first"):
        exported(source, tmp_path / "absent" / "out")
    assert os.listdir(tmp_path) == []


def test_room_is_looked_for_before_anything_is_written(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    length = free.f_bavail * free.f_frsize + (1 << 30)
    if length > 1 << 43:
        pytest.skip("no file of that length on most file systems")
    header = json.dumps({"w": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + length)
    with pytest.raises(UnavailableError, match=r"needs \d+ more bytes, and the file system has \d+ free"):
        exported(tmp_path / "large.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_damaged_is_named_and_nothing_appears(tmp_path: Path) -> None:
    tensors = {f"layer{n}": noise((64, 1024), torch.float32, n) for n in range(4)}
    holdfast.save(tmp_path / "saved", {"model": tensors}, process_group=False)
    (pack,) = (tmp_path / "saved").glob("*/r00000.safetensors")
    data = bytearray(pack.read_bytes())
    data[-7] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptError, match=r"model\.layer3: .*hash to"):
        exported(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_worker_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"layer{n}": noise((8, MIB), torch.float32, n) for n in range(4)}
    holdfast.save(tmp_path / "saved", {"model": tensors}, process_group=False)
    target = tmp_path / "out"
    known = children(os.getpid())

    class Kills:
        def on_event(self, event: Progress) -> None:
            if event.done_bytes:
                for each in children(os.getpid()) - known:
                    os.kill(each, signal.SIGKILL)

    monkeypatch.setattr(export_wiring, "WORKER_ENTRY", held.WORKER)  # None of them ends by itself before it is killed.
    with pytest.raises(UnavailableError, match=r"worker \d ended with status -9; durable windows are kept"):
        api.export(tmp_path / "saved", target, to="safetensors", workers=2, memory_bytes=128 * MIB, observer=Kills())
    assert not target.exists()
    assert not children(os.getpid()) - known
    monkeypatch.undo()
    api.export(tmp_path / "saved", target, to="safetensors")
    assert set(api.open_checkpoint(target).tensors) == {f"model.{name}" for name in tensors}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(1)", r"worker \d ended with status 1; durable windows are kept"),
        ("print('hello'); input()", r"worker \d printed 'hello'; expected a worker's report"),
        ("print(17); input()", r"worker \d printed '17'; expected a worker's report"),
    ],
)
def test_a_worker_that_is_none_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    def started(entry: str) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if "input" not in code:
            worker.wait()  # Before anything is told to it.
        return worker

    monkeypatch.setattr(workers, "start_worker", started)
    with pytest.raises(UnavailableError, match=message):
        api.export(source, tmp_path / "out", to="safetensors", workers=2, memory_bytes=128 * MIB)
