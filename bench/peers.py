"""A near tier in the memory of peers, beside plain sockets: `make bench-memory`. Results: `bench/results/peers.json`.

Four ranks on this machine are four nodes, each with a folder in memory and an agent. All share two cores, so ratios
compare work, and not the speed of a network. The limit of each part is in `peers_sockets.py`. Parts by name:
`ONLY=peers_wire,peers_memory`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bench import peers_memory, peers_protecting, peers_recovery, peers_training, peers_wire, report
from bench.job import ROOT
from bench.part import Measured, Part
from bench.peers_place import run

RESULTS = report.RESULTS / "peers.json"
TIMES = {peers_memory.PART.name: 3}
"""Jobs of a part of which one job is one round."""

PARTS = (
    peers_wire.PART,
    peers_protecting.PART,
    peers_recovery.SLOW,
    peers_recovery.RECOVERED,
    peers_memory.PART,
    peers_training.STEPS,
    peers_training.ALL_REDUCE,
)


def measure(part: Part, folder: Path, *, quick: bool) -> Measured:
    """Measure one part."""
    params = part.quick if quick else part.full
    print(f"{part.name}: {part.question}", flush=True)
    if part in (peers_recovery.SLOW, peers_recovery.RECOVERED):
        return peers_recovery.measure(part, params, folder)
    found = [run(part, params, folder) for _ in range(1 if quick else TIMES.get(part.name, 1))]
    return Measured([each for one in found for each in one.rounds], [each for one in found for each in one.notes])


def main() -> None:
    """Measure, and write the keys."""
    (ROOT / "runs").mkdir(exist_ok=True)
    quick, only = bool(os.environ.get("QUICK")), os.environ.get("ONLY") or ",".join(part.name for part in PARTS)
    latest = report.read(RESULTS)
    for part in PARTS:
        if part.name in only.split(","):
            with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
                measured = measure(part, Path(folder), quick=quick)
            latest = report.merged(latest, part, part.quick if quick else part.full, measured)
            if not quick:
                report.write(latest, RESULTS)
    print("\n".join(report.lines(latest)))


if __name__ == "__main__":
    main()
