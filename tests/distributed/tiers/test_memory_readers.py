"""Bytes of a near tier in memory that another process reads never change, whatever the jobs save meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import holdfast
from holdfast.backends.stores.syscalls import Syscalls
from tests.distributed.tiers.reader_cases import (
    digest_of,
    manager_at,
    packs_of,
    refuse_lease,
    state_of,
)
from tests.support.forked_processes import REPOSITORY, Work, environment, start_ranks

ROUNDS = int(os.environ.get("MEMORY_READS", "1"))
"""Rounds of each case."""

CALLS = 12
"""A copy is stopped at one of its first calls."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(120 + 20 * ROUNDS),
    pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to"),
]


class Reader:
    """A process that reads; see `reader_cases`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def asks(self, order: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    command = [sys.executable, "-m", "tests.distributed.tiers.reader_cases"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Reader(process)
        process.kill()


@pytest.fixture
def near() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name) / "near"


@pytest.fixture(params=["leases", "no leases"])
def has_leases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no leases":
        monkeypatch.setattr(Syscalls, "lease", refuse_lease)
    return request.param == "leases"


def folder_of(near: Path, step: int) -> Path:
    return near / f"step-{step:012d}"


def saved(manager: holdfast.CheckpointManager, near: Path, step: int) -> set[int]:
    """Save a step, and await the collection of the one before; return the inodes of its packs."""
    handle = manager.maybe_save(step, state_of(step))
    assert handle is not None
    handle.wait("near")
    deadline = time.monotonic() + 30.0
    while [path.parent.name for path in near.glob("step-*/manifest.json")] != [f"step-{step:012d}"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return {pack.stat().st_ino for pack in packs_of(folder_of(near, step))}


@pytest.mark.parametrize("way", ["safetensors", "mmap", "cp -l"])
def test_bytes_that_a_process_reads_never_change(
    tmp_path: Path,
    near: Path,
    reader: Reader,
    way: str,
    has_leases: bool,
    record_property: Callable[[str, object], None],
) -> None:
    again, step = 0, 0
    with manager_at(tmp_path / "root", near) as manager:
        manager.load(state_of(0))
        for _ in range(ROUNDS):
            step += 1
            held, copy = saved(manager, near, step), near.parent / "copy"
            if way == "cp -l":
                subprocess.run(["cp", "-rl", folder_of(near, step), copy], check=True)
                before = [digest_of(pack) for pack in packs_of(copy)]
            else:
                before = [reader.asks(f"open {way} {folder_of(near, step)}")]
            assert all(len(digest) == 64 for digest in before) and before
            for _ in range(2):
                step += 1
                assert not held & saved(manager, near, step), "a pack that is read was written into"
            if way == "cp -l":
                assert [digest_of(pack) for pack in packs_of(copy)] == before
                shutil.rmtree(copy)
            else:
                assert [reader.asks("again")] == before
                assert reader.asks("drop") == "dropped"
            known = set[int]()
            for _ in range(3):  # Nobody reads: the memory goes from step to step.
                step += 1
                inodes = saved(manager, near, step)
                again += bool(known & inodes)
                known |= inodes
        manager.close(wait=False)
    assert again > 0 if has_leases else again == 0
    record_property(f"bytes that were read stayed: {way}, {'leases' if has_leases else 'no leases'}", ROUNDS)
    record_property("memory used again", again)


def test_a_writer_that_stops_in_its_copy_changes_no_step_of_the_next_job(
    tmp_path: Path, near: Path, has_leases: bool, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("CAMPAIGN_SEED") or random.randrange(2**32))
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(ROUNDS):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        place = near.with_name(f"near-{number}")
        _stopped_once(folder, place, chance, has_leases)
        shutil.rmtree(place)
    record_property(f"writers stopped in their copy, {'leases' if has_leases else 'no leases'}", ROUNDS)


def _stopped_once(folder: Path, near: Path, chance: random.Random, has_leases: bool) -> None:
    at, delay_seconds = chance.randrange(1, CALLS + 1), chance.random() * 0.0005
    function = "tests.distributed.tiers.reader_cases:stopped"
    arguments = folder / "root", near, folder, at, delay_seconds, int(has_leases)
    (process,) = start_ranks([Work.of_rank(0, folder, function, *arguments)])
    try:
        deadline = time.monotonic() + 60.0
        while ") T " not in Path(f"/proc/{process.pid}/stat").read_text():
            assert time.monotonic() < deadline and process.poll() is None, (folder / "log.0").read_text()
            time.sleep(0.005)
        with manager_at(folder / "root", near) as manager:
            resumed = manager.load(state_of(0))
            # The timer may be late by the rest of the copy.
            assert resumed in (3, 4), resumed
            for step in (resumed + 1, resumed + 2):
                handle = manager.maybe_save(step, state_of(step))
                assert handle is not None
                handle.wait("near")
            packs = {pack: digest_of(pack) for pack in packs_of(folder_of(near, resumed + 2))}
            os.kill(process.pid, signal.SIGCONT)
            assert process.wait(60) == 0, (folder / "log.0").read_text()
            said = (folder / "said").read_text().split("\n")
            assert packs and {pack: digest_of(pack) for pack in packs} == packs, said
            assert [each.startswith("saved") for each in said] == [resumed == 4, False, False], said
            assert any(each.startswith("ConflictError") for each in said), said
            assert list(holdfast.open_checkpoint(folder_of(near, resumed + 2)).verify()) == []
            found = state_of(0)
            assert manager.load(found) == resumed + 2
            assert all((found[name] == value).all() for name, value in state_of(resumed + 2).items())  # type: ignore
            manager.close(wait=False)
    finally:
        process.send_signal(signal.SIGKILL)
