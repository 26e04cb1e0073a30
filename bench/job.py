"""Runs one part in its own processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.device import VARIABLE
from bench.part import Measured, Params, Part

ROOT = Path(__file__).parents[1]
RESULT = "measured.json"


def run(
    part: Part,
    params: Params,
    folder: Path,
    device: str = "cpu",
    *,
    root: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    progress: bool = True,
) -> Measured:
    """Run the ranks of one part in an empty folder, states on `device`; return what rank 0 measured.

    Args:
        part: What to measure.
        params: Sizes and counts.
        folder: Where to work; removed afterwards.
        device: Where states are stored.
        root: Folder whose `bench` the ranks run.
        variables: Environment variables for the ranks, in addition to those of this process.
        progress: Whether rank 0 prints a line per round.
    Raises:
        SystemExit: A rank failed; its error is on the screen.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "work").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bench.rank", part.name, str(folder), json.dumps(params)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=root,
            stdout=None if rank == 0 and progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(part, rank, port) | {VARIABLE: device} | dict(variables or {}),
        )
        for rank in range(part.ranks)
    ]
    listeners = [threading.Thread(target=_pass_on, args=(rank.stderr,), daemon=True) for rank in ranks]
    for listener in listeners:
        listener.start()
    try:
        if any(rank.wait() for rank in ranks):
            raise SystemExit(f"bench: a rank of {part.name} failed; its error is above")
        return Measured(**json.loads((folder / RESULT).read_text()))
    finally:
        for rank, listener in zip(ranks, listeners, strict=True):
            rank.kill()
            rank.wait()
            # A process of DCP's that outlives its rank would keep the pipe open.
            listener.join(timeout=2)
            if not listener.is_alive() and rank.stderr is not None:
                rank.stderr.close()
        shutil.rmtree(folder, ignore_errors=True)


def _environment(part: Part, rank: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(part.ranks),
        "LOCAL_WORLD_SIZE": str(part.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        # c10d looks up names at every connection, and no contender shall pay for a lost packet.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


def _pass_on(errors: Iterable[str]) -> None:
    """Print the error output of a rank, without the log lines of DCP's saving process."""
    for line in errors:
        if " - root - INFO - " not in line:
            print(line, end="", file=sys.stderr, flush=True)
