"""The wall clock is set a day forward and back while jobs write: nothing changes but what people read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest

import holdfast
from holdfast import api
from tests.crash.writers.epoch_processes import writers

LEASE_SECONDS = 9.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


def libfaketime(now: Path) -> Path | None:
    """Return the library that changes what time a process is told, as PyPI or Debian installs it.

    Under 0.9.10, which Debian 12 has, no process of Python can sleep: `time.sleep` fails with EINVAL.
    """
    package = find_spec("libfaketime")
    beside = Path(package.origin).parent if package is not None and package.origin is not None else None
    found = [] if beside is None else list(beside.rglob("libfaketime.so.1"))
    found += Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
    return next((library for library in found if _lets_sleep(library, now)), None)


def _lets_sleep(library: Path, now: Path) -> bool:
    tried = [sys.executable, "-c", "import time; time.sleep(0.001)"]
    return not subprocess.run(tried, env=os.environ | told_by(library, now), stderr=subprocess.DEVNULL).returncode


def told_by(library: Path, file: Path) -> Mapping[str, str]:
    """Return the environment of a process whose wall clock is what a file says, at every look."""
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def test_a_clock_that_is_set_changes_nothing(in_memory: Path) -> None:
    root, now = in_memory / "root", in_memory / "now"
    now.write_text("+1d")
    library = libfaketime(now)
    if library is None:
        pytest.skip("needs a libfaketime under which Python can sleep: pip install libfaketime")
    with writers(3, LEASE_SECONDS, told_by(library, now)) as (first, second, third):
        first.tell("race", root, 1, 0)
        assert first.answer()["said"] == "committed"
        require_created(root, 1, timedelta(days=1))
        for jump in ("-1d", "+1d"):
            now.write_text(jump)
            second.tell("race", root, 2, 0)
            answer = second.answer()
            assert answer["said"] == "ConflictError", answer
            assert "its heartbeat was renewed" in str(answer["message"])
            assert float(str(answer["seconds"])) < LEASE_SECONDS
        first.end()
        now.write_text("-1d")
        second.tell("race", root, 2, 0)
        answer = second.answer()
        assert answer["said"] == "committed", answer
        assert float(str(answer["seconds"])) < LEASE_SECONDS, "it waited for a corpse"
        require_created(root, 2, timedelta(days=-1))
        second.send(signal.SIGSTOP)
        second.wait_until_stopped()
        third.tell("race", root, 3, 0)
        now.write_text("+1d")
        answer = third.answer()
        assert answer["said"] == "committed", answer
        assert LEASE_SECONDS <= float(str(answer["seconds"])) < LEASE_SECONDS + 20
        assert [record.step for record in api.list_steps(root).steps if record.committed] == [1, 2, 3]


def require_created(root: Path, step: int, offset: timedelta) -> None:
    """Require that the writer really saw another time."""
    created = datetime.fromisoformat(holdfast.open_checkpoint(root / f"step-{step:012d}").manifest.created)
    assert abs(created - datetime.now(UTC) - offset) < timedelta(hours=1)
