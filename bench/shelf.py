"""A near tier in memory beside one copy of the state, and beside a disk: `make bench-memory`.

Results go to `bench/results/memory.json`. The limit of a save is one copy into memory that is there, and one hash. Each
round runs all contenders once, in turn. Saves are made until the memory of collected steps is used again, and then
measured.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from bench import conditions, report
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
    """Measure saves, the time that they block, and loads."""
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
            conditions.forget_pages(folder / "disk" / f"step-{step:012d}")
            loads: list[tuple[str, Callable[[], object]]] = [
                ("shelf_load", lambda: shelf.load(copy)),
                ("disk_load", lambda: disk.load(copy)),
            ]
            for name, act in in_turn(loads, number):
                this |= timed(name, act)
                assert all(torch.equal(copy[name], tensor) for name, tensor in saved.items())
            if number >= 0:
                found.append(this)
                print(", ".join(f"{name} {value:.3f}" for name, value in this.items()), flush=True)
    return found


def keys(rounds: list[Round]) -> dict[str, Spread]:
    """Return the results as ratios."""
    return {
        "shelf_save_vs_memcpy": spread_of([each["shelf_save"] / each["memcpy"] for each in rounds]),
        "shelf_cpu_vs_disk": spread_of([each["shelf_save_cpu"] / each["disk_save_cpu"] for each in rounds]),
        "shelf_stall_vs_memcpy": spread_of([each["stall"] / each["memcpy"] for each in rounds]),
        "recover_vs_disk": spread_of([each["disk_load"] / each["shelf_load"] for each in rounds]),
        "recover_cpu_vs_disk": spread_of([each["disk_load_cpu"] / each["shelf_load_cpu"] for each in rounds]),
    }


def main() -> None:
    """Measure, and write the keys."""
    (ROOT / "runs").mkdir(exist_ok=True)
    count = 3 if os.environ.get("QUICK") else 9
    torch.set_num_threads(1)  # One copy by one thread, as that of a save.
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
            rounds = measure(Path(folder), memory, count)
    finally:
        shutil.rmtree(memory)
    flat: dict[str, object] = {}
    for key, spread in keys(rounds).items():
        flat |= dict(zip(report.names_of(key), (round(value, 4) for value in asdict(spread).values()), strict=True))
        print(f"{key}: {spread.median:.3f} ({spread.low:.3f}–{spread.high:.3f})")
    if not os.environ.get("QUICK"):
        RESULTS.write_text(json.dumps({**flat, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
