"""Clients and servers that are killed while saves are under way: nothing that was acknowledged is lost."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import holdfast
from holdfast.errors import UnavailableError
from holdfast.settings import KIB, Settings
from tests.campaign.judging import require_collected, require_whole
from tests.campaign.network import empty_state, require_equal, state_of
from tests.servers.server import Server
from tests.support.tuning import tuned

_RETRY_SECONDS = 300.0
"""How long a client waits for a server that starts again."""


def clients_killed(
    server: Server, folder: Path, *, seed: int, kills: int, say: Callable[[str], None] = lambda _: None
) -> Counter[str]:
    """Kill processes that save, each at a random time; judge what each left.

    Args:
        server: Where they save.
        folder: Gets what they say.
        seed: Draws the times.
        kills: How many.
        say: Is told how far it is.
    """
    url, counts = server.new_url(), Counter[str]()
    path = folder / f"ends-{seed}.jsonl"
    command = [
        sys.executable,
        "-m",
        "tests.distributed.stores.object_worker",
        "killed_at_times",
        url,
        str(kills),
        str(path),
    ]
    done = subprocess.run(
        [*command, str(seed)], env=os.environ | server.environment, capture_output=True, text=True, timeout=60 * kills
    )
    print(done.stdout, done.stderr, sep="")
    assert done.returncode == 0, done.stderr
    settings = replace(server.settings(), collect_grace_seconds=0.0)
    for number, line in enumerate(path.read_text().splitlines()):
        end = json.loads(line)
        root = f"{url}/{end['name']}"
        counts["killed" if end["is_killed"] else "ended before"] += 1
        try:
            if end["acknowledged"]:
                counts["objects collected"] += require_collected(server, root, settings)
            else:
                counts["killed before a step was acknowledged"] += 1
            # Its own retention keeps the newest two.
            counts["acknowledged steps whole"] += require_whole(root, end["acknowledged"][-2:], settings)
            # A process that was killed at once has not begun the run. The next one has.
            _require_goes_on(root, end["acknowledged"], settings)
            counts["objects collected"] += require_collected(server, root, settings)
        except BaseException as error:
            error.add_note(f"{root} of seed {seed}: {end}")
            raise
        say(f"judged {number + 1} of {kills} killed clients")
    return counts


def _require_goes_on(root: str, acknowledged: Sequence[int], settings: Settings) -> None:
    """Require that the next process loads the newest step, and saves another one."""
    with holdfast.CheckpointManager(root, settings=settings, process_group=False, preemption=False) as manager:
        state = empty_state()
        loaded = manager.load(state)
        if loaded is None:
            assert not acknowledged
            loaded = 0
        else:
            assert loaded >= max(acknowledged, default=0)
            require_equal(state, loaded)
        manager.save(loaded + 1, state_of(loaded + 1)).wait()


def servers_killed(
    server: Server,
    programs: Sequence[str],
    *,
    seed: int,
    kills: int,
    say: Callable[[str], None] = lambda _: None,
) -> Counter[str]:
    """Kill programs of a server at random times while a client saves and loads; start them again.

    Args:
        server: The server. What it acknowledged must outlive the kills.
        programs: Names of its programs, each before those that it needs. One is drawn for each kill, or all together.
        seed: Draws times and programs.
        kills: How many.
        say: Is told how far it is.
    """
    chance, counts = random.Random(seed), Counter[str]()
    url = server.new_url()
    settings = tuned(
        server.settings(
            collect_grace_seconds=0.0,
            retry_seconds_per_call=_RETRY_SECONDS,
            retry_seconds_per_save=2 * _RETRY_SECONDS,
            silence_timeout_seconds=5.0,
        ),
        full_pack_bytes=64 * KIB,
        cell_elements=16 * KIB,
    )
    client = _SavingClient(url, settings)
    with client:
        span = client.seconds_of_saves(3)
        for number in range(kills):
            time.sleep(chance.random() * 2 * span)
            killed = chance.choice([*[[each] for each in programs], list(programs)])
            for program in killed:
                server.kill(program)
            time.sleep(chance.random() * 0.3)
            for program in reversed(killed):
                server.restart(program)
                counts[f"killed {program}"] += 1
            # Every kill meets saves: the next one comes once another save has succeeded.
            client.wait_for(len(client.acknowledged) + 1)
            say(f"{number + 1} of {kills} kills of {' and '.join(programs)}; {len(client.acknowledged)} steps saved")
    counts |= client.counts
    counts["acknowledged steps"] = len(client.acknowledged)
    counts["objects collected"] = require_collected(server, url, settings)
    counts["acknowledged steps whole"] = require_whole(url, client.acknowledged, settings)
    _require_goes_on(url, client.acknowledged, settings)
    return counts


class _SavingClient:
    """A thread that saves step after step, and loads every fourth. Use it as a context."""

    def __init__(self, url: str, settings: Settings) -> None:
        self._url, self._settings = url, settings
        self._changed = threading.Condition()
        self._is_over = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="saving-client")
        self.acknowledged: list[int] = []
        self.counts = Counter[str]()

    def __enter__(self) -> _SavingClient:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def seconds_of_saves(self, count: int) -> float:
        """Return how long one of the next saves takes."""
        self.wait_for(1)
        began, first = time.monotonic(), len(self.acknowledged)
        self.wait_for(first + count)
        return (time.monotonic() - began) / count

    def wait_for(self, count: int) -> None:
        """Wait until so many steps are acknowledged."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.acknowledged) >= count or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            with holdfast.CheckpointManager(
                self._url, settings=self._settings, process_group=False, preemption=False
            ) as manager:
                step = 0
                while not self._is_over:
                    step += 1
                    self._save(manager, step)
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _save(self, manager: holdfast.CheckpointManager, step: int) -> None:
        try:
            report = manager.save(step, state_of(step)).wait()
        except UnavailableError as error:
            # It failed loudly, and the next one works.
            print(f"step {step}: {error}")
            self.counts["failed loudly"] += 1
            return
        assert report is not None
        self.counts["retries"] += report.retries
        with self._changed:
            self.acknowledged.append(step)
            self._changed.notify_all()
        if step % 4 == 0:
            state = empty_state()
            loaded = manager.load(state)
            assert loaded == step
            require_equal(state, step)
            self.counts["loads"] += 1
