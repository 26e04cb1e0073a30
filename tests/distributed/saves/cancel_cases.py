"""Saves of real ranks that one rank cancels: a lazy one before it is staged, and one whose other rank has voted."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch.distributed as dist

from holdfast.core.format.names import step_folder
from holdfast.errors import ConflictError
from tests.distributed.matrix.layouts import KINDS
from tests.distributed.saves.lazy_cases import gated_run
from tests.doubles.faults import FaultPoint
from tests.support.faulty_run import PATIENT, Trigger, run_with, save
from tests.support.gloo_worlds import World


def early(world: World, root: str, cancels: int) -> dict[str, object]:
    """Cancel while copies wait for memory; then train through the fence, and save again."""
    built = KINDS["ddp"].build(1)
    built.train([1, 2])
    run, opened = gated_run(root)
    handle = run.save(1, built.state | {"batches": 2})
    was_staged = handle.staged.done()
    result = handle.cancel("a newer step is better") if world.rank == cancels else None
    opened.set()
    built.train([3])
    said = ""
    try:
        handle.wait(timeout=60.0)
    except ConflictError as error:
        said = str(error)
    dist.barrier()
    left = _files(root, 1)
    dist.barrier()
    run.save(2, built.state | {"batches": 3}).wait(timeout=60.0)
    steps = run.steps()
    run.close()
    return {"staged": was_staged, "result": result, "said": said, "left": left, "steps": steps}


def late(world: World, root: str, cancels: int) -> dict[str, object]:
    """Cancel while rank 0 is about to write its part; rank 1 has voted."""
    reached, opened = threading.Event(), threading.Event()

    def hold(_: FaultPoint) -> None:
        reached.set()
        assert opened.wait(30.0)

    armed = world.rank == 0
    run = run_with(root, store=Trigger(hold, ["put_if_absent"], ending="parts/", armed=armed), settings=PATIENT)
    handle = save(run, 1)
    while not (reached.is_set() if armed else any("parts/" in name for name in _files(root, 1))):
        time.sleep(0.01)
    dist.barrier()
    result = handle.cancel("the loss is no number") if world.rank == cancels else None
    dist.barrier()
    opened.set()
    said = ""
    try:
        handle.wait(timeout=60.0)
    except ConflictError as error:
        said = str(error)
    again = handle.cancel("again")
    dist.barrier()
    left = _files(root, 1)
    run.close()
    return {"result": result, "said": said, "again": again, "left": left, "steps": run.steps()}


def _files(root: str, step: int) -> list[str]:
    folder = Path(root, step_folder(step))
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
