"""What a save and a load ask an object store, and how long a save holds training where each reply takes 100 ms.

Requests are counted on the wire: a proxy records each one. Those for packs are not counted: uploads, ranges, sizes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

import holdfast
from bench import conditions
from bench.job import ROOT
from bench.part import Measured, Params, Part, Round, Spread, spread_of
from bench.settings import settings
from bench.store_place import Place
from bench.store_proxy import Answered, Proxy, proxy

STEPS = 4
"""Steps that a run has when a save or a load is counted."""

DELAY_SECONDS = 0.1
LEASE_SECONDS = 3600.0
"""No heartbeat is due meanwhile."""


class Loop:
    """A training loop of one process, whose state is taken lazily."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """Change all of the state."""
        self.model(torch.rand(4, 512)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, manager: holdfast.CheckpointManager, step: int) -> tuple[float, float]:
        """Train and save; return when the call began and when it returned, and wait for the commit."""
        self.step()
        began = time.monotonic()
        handle = manager.save(step, self.state)
        returned = time.monotonic()
        self.step()
        report = handle.wait()
        assert report is not None and report.staging == "lazy", report
        return began, returned


def measure(root: Path, params: Params) -> Measured:
    """Save steps on a disk and in the store, and load from the store in a fresh process."""
    place = Place.here()
    names = [f"requests-{kind}-{time.time_ns()}" for kind in ("saves", "load")]
    runs = [place.folder(name) for name in names]
    loop = Loop()
    with proxy(place.endpoint, root / "proxy", delay_seconds=DELAY_SECONDS) as late:
        on_disk, _ = _saved(loop, str(root / "run"), STEPS + 1)
        calls, asked = _saved(loop, runs[0], STEPS + 1, late)
        _saved(loop, runs[1], STEPS, late)
        loading = _loaded(runs[1], late)
    for name in names:
        place.remove(name)
    before_return = [each for each in asked[1] if each.replied <= calls[1][1]]
    found = {
        "call_on_disk": _median_seconds(on_disk),
        "call_100ms": _median_seconds(calls),
        "round_trips": float(_round_trips(before_return)),
        "requests_save": float(len(_counted(asked[STEPS]))),
        "requests_load": float(len(_counted(loading))),
    }
    conditions.say(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    for title, requests in (("save", asked[STEPS]), ("load", loading)):
        conditions.say(f"{title}: {', '.join(f'{each.method} {_short(each.target)}' for each in requests)}")
    return Measured([found], [])


def _saved(
    loop: Loop, run: str, steps: int, late: Proxy | None = None
) -> tuple[list[tuple[float, float]], list[list[Answered]]]:
    """Save steps; return when each call began and returned, and the requests of each save."""
    calls, asked = [], []
    endpoint = None if late is None else late.endpoint
    with holdfast.CheckpointManager(run, process_group=False, settings=_settings(endpoint)) as manager:
        for step in range(steps):
            if late is not None:
                late.take()
            calls.append(loop.save(manager, step))
            asked.append([] if late is None else late.take())
    return calls, asked


def _loaded(run: str, late: Proxy) -> list[Answered]:
    """Load in a fresh process; return the requests of the load."""
    late.take()
    command = [sys.executable, "-m", "bench.store_requests", run, late.endpoint]
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    began, returned = json.loads(ended.stdout.splitlines()[-1])
    return [each for each in late.take() if began <= each.began <= returned]


def _median_seconds(calls: Sequence[tuple[float, float]]) -> float:
    """Return the median of the calls, without the first of a run."""
    return statistics.median(returned - began for began, returned in calls[1:])


def _settings(endpoint: str | None = None) -> holdfast.Settings:
    reached = {} if endpoint is None else {"object_store": holdfast.ObjectSettings(endpoint=endpoint)}
    return settings(staging="lazy", lease_seconds=LEASE_SECONDS, **reached)


def _counted(requests: Iterable[Answered]) -> list[Answered]:
    return [each for each in requests if not each.is_pack]


def _round_trips(requests: Iterable[Answered]) -> int:
    """Return the greatest number of requests of which each began after the reply to the one before."""
    count, replied = 0, 0.0
    for each in sorted(_counted(requests), key=lambda each: each.replied):
        if each.began >= replied:
            count, replied = count + 1, each.replied
    return count


def _short(target: str) -> str:
    path, _, query = target.partition("?")
    return path.split("/requests-", 1)[-1].partition("/")[2] or f"?{query[:40]}"


def load(run: str, endpoint: str) -> None:
    """Load the newest step in this process, as a job does that starts again."""
    loop = Loop()
    with holdfast.CheckpointManager(run, process_group=False, settings=_settings(endpoint)) as manager:
        began = time.monotonic()
        loaded = manager.load(loop.state)
        returned = time.monotonic()
    assert loaded == STEPS - 1, loaded
    print(json.dumps([began, returned]))


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return counts, and the difference of the two calls."""

    def each_round(name: str) -> Spread:
        return spread_of([each[name] for each in rounds])

    return {
        "round_trips_before_return": each_round("round_trips"),
        "requests_per_save_rank0": each_round("requests_save"),
        "requests_per_load": each_round("requests_load"),
        "stall_100ms_seconds": spread_of([each["call_100ms"] - each["call_on_disk"] for each in rounds]),
    }


PART = Part(
    name="store_requests",
    question="What do a save and a load ask an object store, and how long does a save hold training at 100 ms a reply?",
    ranks=1,
    full={"number": 0},
    quick={"number": 0},
    measure=measure,
    keys=keys,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    load(*sys.argv[1:])
