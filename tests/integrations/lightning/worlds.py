"""Worlds of real ranks that run the training of this folder, each rank in a fresh process, as torchrun starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integrations.run import Run
from tests.support.forked_processes import Work, start_ranks

DEADLINE_SECONDS = 240.0


@dataclass(frozen=True)
class Ended:
    """What came of one rank."""

    status: int
    result: dict[str, Any] | None
    """What `Run.finish` left; None if it did not get there."""


def world(
    ranks: int, layout: str, folder: Path, *, steps: int, every: int = 2, resume: bool = False, **variables: str
) -> list[Ended]:
    """Train on some ranks, and return what came of each. If rank 0 dies, the others are killed."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    spec = {"folder": str(folder), "steps": steps, "every": every, "resume": resume, "results": str(scratch)}
    (scratch / "spec.json").write_text(json.dumps(spec))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.setdefault("FORKED_IMPORTS", "lightning")
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LIGHTNING_LAYOUT": layout}
    function = "tests.integrations.lightning.worlds:train_rank"
    started = start_ranks(
        [
            Work.of_rank(
                rank,
                scratch,
                function,
                scratch / "spec.json",
                **{**shared, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
    )
    try:
        # The one that is to die first: those that wait for it would wait for gloo's timeout.
        if started[0].wait(DEADLINE_SECONDS):
            print((scratch / "log.0").read_text()[-3000:])
            for process in started[1:]:
                process.send_signal(signal.SIGKILL)
        for process in started[1:]:
            process.wait(DEADLINE_SECONDS)
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
    left = {rank: scratch / f"rank-{rank}.json" for rank in range(ranks)}
    return [
        Ended(process.wait(DEADLINE_SECONDS), json.loads(left[rank].read_text()) if left[rank].exists() else None)
        for rank, process in enumerate(started)
    ]


def die_at(point: str, save: int) -> None:
    """Have this process die of SIGKILL at a point of one of its saves, the first being 1.

    Args:
        point: `saving`, as the save begins; `whole`, once it is committed, but not at its path; `moved`, once it is
            there; `removing`, while the checkpoint before it is being removed.
        save: Which save.
    """
    from holdfast.integrations.lightning import folders, saves
    from holdfast.integrations.lightning.folders import CheckpointPath

    begun = [0]
    publish, remove_hidden, blocking = CheckpointPath.publish, folders._remove_hidden, saves.holdfast.save

    def die(at: str) -> None:
        if at == point and begun[0] == save:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(path: Any, *arguments: Any, **options: Any) -> Any:
        begun[0] += 1
        die("saving")
        report = blocking(path, *arguments, **options)
        die("whole")
        return report

    def published(target: CheckpointPath) -> None:
        publish(target)
        die("moved")

    def removed(path: str) -> None:
        if os.path.basename(path).startswith(".holdfast-removed-") and os.path.exists(path):
            os.remove(os.path.join(path, "manifest.json"))
            die("removing")
        remove_hidden(path)

    saves.holdfast.save = counted
    CheckpointPath.publish = published  # type: ignore[method-assign]
    folders._remove_hidden = removed


def train_rank(spec: str) -> None:
    """Be one rank of a world."""
    warnings.simplefilter("ignore")
    asked = json.loads(Path(spec).read_text())
    if "LIGHTNING_KILL" in os.environ and os.environ["RANK"] == "0":
        point, _, save = os.environ["LIGHTNING_KILL"].partition(":")
        die_at(point, int(save))
    from tests.integrations.lightning.training import train

    places = {name: Path(asked.pop(name)) for name in ("folder", "results")}
    train(Run(keeper="holdfast", **places, **asked))
