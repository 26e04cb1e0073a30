"""The processes of the suite itself: each one that ends is told of, however close together they end."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import asdict
from pathlib import Path

from tests.support.forked_processes import Work, _connected, _folder, start_ranks

ROUNDS = 100
LONGEST_GAP_SECONDS = 0.0012


def test_an_origin_tells_of_two_forks_that_end_at_one_time(tmp_path: Path) -> None:
    gaps = random.Random(47)
    for turn in range(ROUNDS):
        scratch = tmp_path / str(turn)
        scratch.mkdir()
        # First ranks are of one origin.
        forks = [start_ranks([Work.of_rank(rank, scratch, "signal:pause")])[0] for rank in range(2)]
        for fork in forks:
            os.kill(fork.pid, signal.SIGKILL)
            # A sleep is longer than the whole gap.
            end = time.perf_counter() + gaps.uniform(0.0, LONGEST_GAP_SECONDS)
            while time.perf_counter() < end:
                pass
        assert [fork.wait(10.0) for fork in forks] == [-signal.SIGKILL] * 2


def test_an_origin_survives_those_that_ask_and_go(tmp_path: Path) -> None:
    fork = start_ranks([Work.of_rank(0, tmp_path, "signal:pause")])[0]
    line = json.dumps(asdict(Work.of_rank(1, tmp_path, "os:getpid"))) + "\n"
    for asked in (line, line[:40]):
        with _connected(_folder() / "0") as connection:
            connection.sendall(asked.encode())
    os.kill(fork.pid, signal.SIGKILL)
    assert fork.wait(10.0) == -signal.SIGKILL
    (tmp_path / "later").mkdir()
    later = start_ranks([Work.of_rank(0, tmp_path / "later", "signal:pause")])[0]
    os.kill(later.pid, signal.SIGKILL)
    assert later.wait(10.0) == -signal.SIGKILL
