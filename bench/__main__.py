"""Run the bench and write what it measured."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path

RANKS = 2
HERE = Path(__file__).parent
QUICK = bool(os.environ.get("QUICK"))
TOTAL_MIB, ROUNDS, TINY = (256, 1, 20_000) if QUICK else (1024, 5, 20_000)


def ratios(ours: list[float], *theirs: list[float]) -> dict[str, float]:
    """Return how many times faster ours was than the best of theirs: median, lowest and highest of the rounds."""
    each = [min(others) / own for own, *others in zip(ours, *theirs, strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


def growth(few: list[float], many: list[float]) -> dict[str, float]:
    """Return how much longer five times as many tensors take, over five: 1 is linear."""
    each = [long / (5 * short) for short, long in zip(few, many, strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


def measured(folder: Path) -> dict[str, list[float]]:
    """Run the ranks; return seconds by contender and round."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bench.rounds", str(folder), str(TOTAL_MIB), str(ROUNDS), str(TINY)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=HERE.parent,
            text=True,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                # c10d looks up names at every connection, and no contender shall pay for a lost packet.
                "RES_OPTIONS": "timeout:1 attempts:1",
            },
        )
        for rank in range(RANKS)
    ]
    try:
        output, _ = ranks[0].communicate()
        if any(rank.wait() for rank in ranks):
            raise SystemExit("bench: a rank failed; its error is above")
        return json.loads(output.splitlines()[-1])
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    """Measure, print and write."""
    folder = HERE.parent / "runs" / "bench"
    print(f"bench: {RANKS} gloo ranks, {TOTAL_MIB} MiB, {ROUNDS} rounds; {TINY} tensors of 16 bytes", flush=True)
    seconds = measured(folder)
    shutil.rmtree(folder, ignore_errors=True)
    keys = {
        "save_vs_dcp": ratios(seconds["save"], seconds["save_dcp_1"], seconds["save_dcp_2"]),
        "save_vs_limit": ratios(seconds["save"], seconds["raw_write"]),
        "load_cold_vs_dcp": ratios(seconds["load_cold"], seconds["load_cold_dcp"]),
        "load_warm_vs_dcp": ratios(seconds["load_warm"], seconds["load_warm_dcp"]),
        "stall_copy_vs_memcpy": ratios(seconds["memcpy"], seconds["stall_copy"]),
        "tiny_save_vs_dcp": ratios(seconds["tiny_save"], seconds["tiny_save_dcp"]),
        "tiny_load_vs_dcp": ratios(seconds["tiny_load"], seconds["tiny_load_dcp"]),
        "tiny_save_growth": growth(seconds["tiny_save"], seconds["tiny_save_five_times"]),
        "tiny_load_growth": growth(seconds["tiny_load"], seconds["tiny_load_five_times"]),
    }
    result: dict[str, object] = {}
    for key, value in keys.items():
        result[key] = round(value["median"], 3)
        result[f"{key}_min"] = round(value["min"], 3)
        result[f"{key}_max"] = round(value["max"], 3)
        print(f"  {key:20} {value['median']:6.2f}   ({value['min']:.2f}–{value['max']:.2f})")
    result["seconds"] = {name: [round(each, 4) for each in each_round] for name, each_round in seconds.items()}
    result["what"] = {
        "ranks": RANKS,
        "mib": TOTAL_MIB,
        "rounds": ROUNDS,
        "tiny_tensors": TINY,
        "quick": QUICK,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "ratio": "times faster than theirs, same round; above 1 is faster",
        "stall": "blocked seconds of a save in the background, over those of one copy of the same bytes",
        "growth": "time of 5 times as many tensors, over 5 times the time; 1 is linear, below 1.3 is meant",
    }
    target = HERE / "results" / "latest.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {target.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
