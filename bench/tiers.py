"""A near tier beside a plain root: `make bench-tiers`. Results go to `bench/results/tiers.json`.

`python -m bench.tiers` measures with roots on the disk. `python -m bench.tiers s3://BUCKET/FOLDER` measures drains to
an object store at `AWS_ENDPOINT_URL`, with credentials in the vendor's variables. Either leaves the keys of the other.

Each round runs all contenders of a part, one after the other, in turn. The limit of a near save and a near load is the
speed of the folder itself; that of a drain beside training is the processor time of its copies, on the other core. A
server on this machine takes that core too: `drain_slowdown_store` has the work of the server in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

import holdfast
from bench import job, report
from bench.job import ROOT
from bench.part import Round, Spread, in_turn, spread_of
from bench.parts import TIER_PARTS
from bench.store_place import VARIABLE
from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.policies import EveryNSteps
from holdfast.settings import Settings
from holdfast.training.runs.tiers.near import NearPlace

RESULTS = report.RESULTS / "tiers.json"
SETTINGS = Settings(collect_grace_seconds=0.0, lease_seconds=3600.0)
MIB = 256
REPLY_SECONDS = 0.1
NEAR_SAVES = 10

State = dict[str, torch.Tensor]
_Result = TypeVar("_Result")


def state() -> State:
    """Return tensors of 256 MiB in all."""
    return {str(number): torch.rand(4 << 20) for number in range(MIB // 16)}


def seconds(act: Callable[[], object]) -> float:
    """Return how long a call takes; the collector runs before, not in it."""
    gc.collect()
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


@contextmanager
def manager(root: Path | str, near: Path | None, **options: object) -> Iterator[holdfast.CheckpointManager]:
    """Open a run of this process; close without a wait for deletions."""
    tier = None if near is None else holdfast.Tier(near, every=1 << 30, keep_last=1)
    options = {"keep_last": 1, "preemption": False, "settings": SETTINGS, **options}
    made = holdfast.CheckpointManager(root, process_group=False, near=tier, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close(wait=False)


def saves_and_loads(folder: Path, rounds: int) -> list[Round]:
    """Measure awaited saves and loads: into a root, and into the near tier of another run, in the same file system."""
    saved, found = state(), list[Round]()
    with manager(folder / "plain", None) as plain, manager(folder / "root", folder / "near") as tiered:
        plain.load(saved)
        tiered.load(saved)
        for number in range(-1, rounds):  # The first round makes files and memory.
            this: Round = {}
            for tensor in saved.values():
                tensor += 1.0
            contenders: list[tuple[str, Callable[[], object]]] = [
                ("plain_save", lambda step=number: plain.save(step + 2, saved).wait()),  # type: ignore[misc]
                ("near_save", lambda step=number: tiered.save(step + 2, saved, near_only=True).wait()),  # type: ignore[misc]
            ]
            for name, act in in_turn(contenders, number):
                this[name] = seconds(act)
            for name, act in in_turn(
                [("plain_load", lambda: plain.load(saved)), ("near_load", lambda: tiered.load(saved))], number
            ):
                this[name] = seconds(act)
            if number >= 0:
                found.append(this)
    shutil.rmtree(folder)
    return found


class SlowStore(ForwardingStore):
    """A root that counts its requests, and waits before each reply."""

    def __init__(self, inner: MemoryStore) -> None:
        """Count from zero, without a wait."""
        super().__init__(inner)
        self.requests, self.reply_seconds = 0, 0.0
        self._lock = threading.Lock()

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        with self._lock:
            self.requests += 1
        time.sleep(self.reply_seconds)
        return call()


def requests(folder: Path, rounds: int) -> list[Round]:
    """Count the requests to the root of near saves, and the seconds that a slow root adds to the call."""
    found = []
    root = SlowStore(MemoryStore("bench-tiers"))
    place = NearPlace(LocalStore(folder / "near", settings=SETTINGS), EveryNSteps(1), 1)
    job = wiring.saving_job(False, SETTINGS, root.url)
    saved = {"w": torch.rand(1 << 20)}
    with CheckpointManager.over(root, job, near=place) as run:
        run.load(saved)
        run.save(1, saved).wait()
        step = 1
        for number in range(rounds):
            this: Round = {}
            for name, reply in in_turn([("fast", 0.0), ("slow", REPLY_SECONDS)], number):
                root.reply_seconds, before, took = reply, root.requests, 0.0
                for _ in range(NEAR_SAVES):
                    step += 1
                    saved["w"] += 1.0
                    took += seconds(lambda step=step: run.maybe_save(step, saved))  # type: ignore[misc]
                    run.wait()
                this[name] = took / NEAR_SAVES
                this["requests"] = max(this.get("requests", 0.0), (root.requests - before) / NEAR_SAVES)
            found.append(this)
        root.reply_seconds = 0.0
    shutil.rmtree(folder)
    return found


def work_done(seconds_long: float) -> float:
    """Return how many products of matrices one core makes in some seconds."""
    left, right = torch.rand(768, 768), torch.rand(768, 768)
    until, count = time.perf_counter() + seconds_long, 0
    while time.perf_counter() < until:
        left @ right
        count += 1
    return count / seconds_long


def slowdown(root: Path | str, rounds: int) -> list[Round]:
    """Measure steps that keep one core busy, with and without a drain of 256 MiB behind them every ten seconds."""
    saved, found = state(), list[Round]()
    torch.set_num_threads(1)
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    with manager(root, memory / "near") as run:
        run.load(saved)
        run.save(1, saved).wait("committed")
        step = 1
        for number in range(rounds):
            this: Round = {}
            for name in ("alone", "drained") if number % 2 else ("drained", "alone"):
                handle = None
                if name == "drained":
                    step += 1
                    for tensor in saved.values():
                        tensor += 1.0
                    handle = run.save(step, saved)
                    handle.wait("near")
                this[name] = 1 / work_done(10.0)
                if handle is not None:
                    handle.wait("committed")
            found.append(this)
    shutil.rmtree(memory, ignore_errors=True)
    return found


def at_the_disk(count: int) -> dict[str, list[Round]]:
    """Measure the parts whose roots are on the disk or in memory."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        parts = (saves_and_loads, requests, slowdown)
        return {part.__name__: part(Path(folder) / part.__name__, count) for part in parts}


def at_the_store(url: str, count: int, *, quick: bool) -> dict[str, list[Round]]:
    """Measure the parts whose roots are in an object store."""
    rounds: dict[str, list[Round]] = {}
    for part in TIER_PARTS.values():
        for number in range(-1, count):  # The first round makes memory of the server.
            load, params = os.getloadavg()[0], {**(part.quick if quick else part.full), "number": number}
            print(f"round {number + 1}, {part.name}: {part.question}", flush=True)
            measured = job.run(part, params, ROOT / "runs" / "tiers", variables={VARIABLE: url})
            if number >= 0:
                rounds.setdefault(part.name, []).extend(
                    {**each, "load_average_before": load} for each in measured.rounds
                )
    return {**rounds, "slowdown_store": slowdown(f"{url}/slowdown", count)}


def keys_of(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Spread]:
    """Return the keys of the parts that were measured."""
    ratios: dict[str, tuple[str, Callable[[Round], float]]] = {
        "near_save_vs_plain": ("saves_and_loads", lambda each: each["plain_save"] / each["near_save"]),
        "near_load_vs_plain": ("saves_and_loads", lambda each: each["plain_load"] / each["near_load"]),
        "root_requests_per_near_save": ("requests", lambda each: each["requests"]),
        "near_save_slow_root_extra_seconds": ("requests", lambda each: each["slow"] - each["fast"]),
        "drain_slowdown": ("slowdown", lambda each: each["drained"] / each["alone"]),
        "drain_slowdown_store": ("slowdown_store", lambda each: each["drained"] / each["alone"]),
    }
    found = {
        key: spread_of([ratio(each) for each in rounds[part]])
        for key, (part, ratio) in ratios.items()
        if part in rounds
    }
    for name, part in TIER_PARTS.items():
        found |= part.keys(rounds[name], {}) if name in rounds else {}
    return found


def results_with(earlier: report.Latest, rounds: Mapping[str, Sequence[Round]], server: str) -> report.Latest:
    """Return the results with the keys and the rounds of some parts replaced; all others stay."""
    spreads = keys_of(rounds)
    for key, spread in spreads.items():
        print(f"{key}: {spread.median:.3f} ({spread.low:.3f}–{spread.high:.3f})")
    kept: Mapping[str, object] = earlier.get("rounds", {})  # type: ignore[assignment]
    return {
        **earlier,
        **report.columns_of(spreads),
        **({"server": server} if server else {}),
        "rounds": {**kept, **rounds},
    }


def main() -> None:
    """Measure, and write the keys."""
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description=__doc__)
    parser.add_argument("url", nargs="?", help="s3://BUCKET/FOLDER; drains go below it")
    parser.add_argument("--server", default="", help="what the server is, for the results")
    chosen = parser.parse_args()
    quick = bool(os.environ.get("QUICK"))
    count = 3 if quick else 7
    rounds = at_the_store(chosen.url, count, quick=quick) if chosen.url else at_the_disk(count)
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = results_with(earlier, rounds, chosen.server)
    if not quick:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
