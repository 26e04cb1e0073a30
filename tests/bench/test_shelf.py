"""The bench of a near tier in memory: its keys, a restart of killed ranks, and the peak of a process."""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest

from bench import job, shelf, shelf_memory, shelf_recovery, shelf_training
from bench.goals import GOALS

MIB = 1 << 20
LOADS = {"disk_load": 3.0, "disk_load_cpu": 2.0, "shelf_load": 2.0, "shelf_load_cpu": 1.0}
SAVED = {"memcpy": 1.0, "shelf_save": 2.0, "shelf_save_cpu": 3.0, "disk_save_cpu": 4.0, "stall": 1.5}
MEMORY = {"memory_vs_state": 2.0, "agent_rss_anon_mib": 30.0, "agent_idle_cpu_percent": 0.1}


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_what_is_measured_becomes_every_key_and_each_has_a_goal() -> None:
    found = {
        **shelf.keys([SAVED]),
        **shelf_recovery.keys([LOADS]),
        **shelf_memory.keys([MEMORY]),
        **shelf_training.keys([{"with": 3.0, "without": 2.0}, {"with": 1.0, "without": 2.0}], {}),
    }
    assert {name: (spread.low, spread.median, spread.high) for name, spread in found.items()} == {
        "shelf_save_vs_memcpy": (2.0, 2.0, 2.0),
        "shelf_cpu_vs_disk": (0.75, 0.75, 0.75),
        "shelf_stall_vs_memcpy": (1.5, 1.5, 1.5),
        "recover_vs_disk": (1.5, 1.5, 1.5),
        "recover_cpu_vs_disk": (2.0, 2.0, 2.0),
        **{name: (value, value, value) for name, value in MEMORY.items()},
        "near_train_slowdown": (0.5, 1.0, 1.5),
    }
    assert set(found) <= {goal.key for goal in GOALS}


def test_the_peak_counts_memory_of_the_process_and_files_without_a_name(memory: Path) -> None:
    peak = shelf_memory.Peak(memory)
    path = memory / "file"
    path.write_bytes(bytes(4 * MIB))
    file = path.open("rb")
    path.unlink()
    own = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE)
    own.write(b"\1" * (8 * MIB))
    time.sleep(10 * shelf_memory.SAMPLE_SECONDS)
    assert 12.0 <= peak.end() < 40.0
    file.close()


@pytest.mark.long
def test_ranks_that_were_killed_are_restarted_from_both_places(tmp_path: Path, memory: Path) -> None:
    variables = {shelf_recovery.DISK: str(tmp_path), shelf_recovery.MEMORY: str(memory)}
    with suppress(SystemExit):
        job.run(shelf_recovery.SAVED, {"mib": 32}, tmp_path / "job", variables=variables, progress=False)
    assert (memory / "recovery" / "job.json").exists(), "the ranks were killed before the end of their manager"
    found = {}
    for is_shelf in (1, 0):
        params = {"mib": 32, "is_shelf": is_shelf}
        (each,) = job.run(shelf_recovery.LOADED, params, tmp_path / "job", variables=variables, progress=False).rounds
        found |= each
    assert set(found) == set(LOADS) and min(found.values()) > 0
