"""A near tier in memory beside one copy of the state, and beside a disk: `make bench-memory`.

Results go to `bench/results/memory.json`. The limit of a save is one copy into memory that is there, and one hash. Each
round runs all contenders once, in turn. Saves are made until the memory of collected steps is used again, and then
measured. Loads of a restarted job, training and memory are measured in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import job, report, shelf_memory, shelf_recovery, shelf_training
from bench.job import ROOT
from bench.part import Round, Spread, in_turn, spread_of
from bench.tiers import State, manager

RESULTS = report.RESULTS / "memory.json"
MIB = 512
WARM_UP = 4
"""Saves until two files take turns, both mapped."""


def state() -> State:
    """Return tensors of 512 MiB in all."""
    return {str(number): torch.rand(4 << 20) for number in range(MIB // 16)}


def timed(name: str, act: Callable[[], object]) -> Round:
    """Return the wall and the processor seconds of a call."""
    cpu, start = time.process_time(), time.perf_counter()
    act()
    return {name: time.perf_counter() - start, f"{name}_cpu": time.process_time() - cpu}


def measure(folder: Path, memory: Path, rounds: int) -> list[Round]:
    """Measure saves, and the time that they block."""
    saved, found = state(), list[Round]()
    copy = {name: torch.empty_like(tensor) for name, tensor in saved.items()}

    def memcpy() -> None:
        for name, tensor in saved.items():
            copy[name].copy_(tensor)

    with manager(folder / "disk", None) as disk, manager(folder / "root", memory / "near") as shelf:
        disk.load(saved)
        shelf.load(saved)
        for number in range(-WARM_UP, rounds):
            this: Round = {}
            step = number + WARM_UP + 1
            for tensor in saved.values():
                tensor += 1.0

            def save_to_shelf(step: int = step, this: Round = this) -> None:
                start = time.perf_counter()
                handle = shelf.save(step, saved, near_only=True)
                handle.wait("staged")
                this["stall"] = time.perf_counter() - start
                handle.wait()

            contenders: list[tuple[str, Callable[[], object]]] = [
                ("memcpy", memcpy),
                ("shelf_save", save_to_shelf),
                ("disk_save", lambda step=step: disk.save(step, saved).wait()),  # type: ignore[misc]
            ]
            for name, act in in_turn(contenders, number):
                this |= timed(name, act)
            if number >= 0:
                found.append(this)
                print(", ".join(f"{name} {value:.3f}" for name, value in this.items()), flush=True)
    return found


def measure_all(folder: Path, memory: Path, *, quick: bool) -> dict[str, list[Round]]:
    """Measure each part; return the rounds of each."""
    count = 3 if quick else 9
    training = job.run(
        shelf_training.PART, shelf_training.PART.quick if quick else shelf_training.PART.full, folder / "t"
    )
    for note in training.notes:
        print(note, flush=True)
    return {
        "saves": measure(folder, memory, count),
        "recovery": shelf_recovery.measure(folder, memory, count, quick=quick),
        "memory": shelf_memory.measure(folder, quick=quick),
        "training": training.rounds,
    }


def keys(rounds: list[Round]) -> dict[str, Spread]:
    """Return the results as ratios."""
    return {
        "shelf_save_vs_memcpy": spread_of([each["shelf_save"] / each["memcpy"] for each in rounds]),
        "shelf_cpu_vs_disk": spread_of([each["shelf_save_cpu"] / each["disk_save_cpu"] for each in rounds]),
        "shelf_stall_vs_memcpy": spread_of([each["stall"] / each["memcpy"] for each in rounds]),
    }


def main() -> None:
    """Measure, and write the keys."""
    (ROOT / "runs").mkdir(exist_ok=True)
    quick = bool(os.environ.get("QUICK"))
    torch.set_num_threads(1)  # One copy by one thread, as that of a save.
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
            rounds = measure_all(Path(folder), memory, quick=quick)
    finally:
        shutil.rmtree(memory)
    spreads = {
        **keys(rounds["saves"]),
        **shelf_recovery.keys(rounds["recovery"]),
        **shelf_memory.keys(rounds["memory"]),
        **shelf_training.keys(rounds["training"], {}),
    }
    for key, spread in spreads.items():
        print(f"{key}: {spread.median:.3f} ({spread.low:.3f}–{spread.high:.3f})")
    if not quick:
        RESULTS.write_text(json.dumps({**report.columns_of(spreads), "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
