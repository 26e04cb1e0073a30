"""What ranks do in the tests of observing: save and load as a training loop does, timing it from outside."""

from __future__ import annotations

import time
from dataclasses import asdict

import torch

import holdfast
from holdfast.base.types.reports import LoadReport, SaveReport
from holdfast.observers import jsonl
from tests.distributed.loads.exchange_cases import ROUNDS_OF_32_KIB, laid_out, whole_state
from tests.support.gloo_worlds import World


def save_and_load(world: World, path: str, log: str) -> dict[str, list[object]]:
    """Save two steps, the second while the first is under way, then load the newest as copies."""
    state = laid_out(whole_state(), "rows")
    found: list[object] = []
    observers = [jsonl(log)]
    with holdfast.CheckpointManager(path, settings=ROUNDS_OF_32_KIB, observers=observers) as manager:
        started = time.perf_counter()
        handles = [manager.save(step, state) for step in (1, 2)]
        for handle in handles:
            report = handle.wait()
            assert report is not None
            found.append(_told(report, time.perf_counter() - started))
        copies = {name: torch.zeros_like(tensor) for name, tensor in whole_state().items()}
        started = time.perf_counter()
        assert manager.load(copies) == 2
        seconds = time.perf_counter() - started
        assert manager.load_report is not None
        found.append(_told(manager.load_report, seconds))
    for name, tensor in whole_state().items():
        assert torch.equal(copies[name], tensor), name
    return {"reports": found}


def _told(report: SaveReport | LoadReport, seconds: float) -> dict[str, object]:
    return {
        "step": report.step,
        "bytes": report.bytes,
        "phases": [asdict(each) for each in report.phases],
        "seconds": seconds,
    }
