"""What ranks do in the tests of lazy saves: train on while the state is read, or change it behind the fence."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.torch.fence import close_fence
from holdfast.base.types.reports import SaveReport
from holdfast.errors import InvalidError
from tests.distributed.matrix.layouts import KINDS, Built
from tests.doubles.faults import FaultPoint
from tests.support.faulty_run import PATIENT, Trigger, run_with
from tests.support.gloo_worlds import World
from tests.support.tuning import tuned

LAZY = tuned(replace(PATIENT, staging="lazy", arena_bytes_max=4096), window_bytes=4096)
"""One buffer: while a write is held back nothing more can be copied."""


def gated_run(root: str) -> tuple[CheckpointManager, threading.Event]:
    opened = threading.Event()

    def hold(operation: FaultPoint) -> None:
        assert opened.wait(30.0)

    trigger = Trigger(hold, ["upload.write"], at=None, armed=True)
    return run_with(root, store=trigger, settings=LAZY), opened


def train_on(world: World, kind: str, root: str) -> dict[str, object]:
    """Save lazily, train on through the fence, load what was saved into a model made anew."""
    built = KINDS[kind].build(1)
    built.train([1, 2])
    saved = built.digests()
    run, opened = gated_run(f"{root}/{kind}")
    release = threading.Timer(0.2, opened.set)
    if kind.startswith("fsdp1"):
        release.start()  # its save writes at once: no fence is reached before it returns
    else:
        # Called at the fence before the save's own wait: however slow the step is, the gate is still shut there.
        close_fence([], release.start)
    handle = run.save(1, built.state | {"batches": 2})
    built.train([3])
    changed = built.digests() != saved
    report = handle.wait(timeout=60.0)
    assert isinstance(report, SaveReport)
    other = KINDS[kind].build(7)
    run.load(other.state | {"batches": 0}, 1)
    run.close()
    return {
        "staging": report.staging,
        "fenced": report.fence_seconds > 0.0,
        "same": other.digests() == saved,
        "changed": changed,
    }


def change_behind_the_fence(world: World, kind: str, root: str) -> dict[str, object]:
    """Write to one parameter on the last rank; every rank must hear of it, and the next save go well."""
    built = KINDS[kind].build(1)
    built.train([1, 2])
    run, opened = gated_run(f"{root}/{kind}")
    handle = run.save(1, built.state | {"batches": 2})
    largest = max(_local_parameters(built), key=_local_numel)
    if world.rank == world.size - 1:
        with torch.no_grad():
            largest.mul_(2.0)
    opened.set()
    try:
        handle.wait(timeout=60.0)
        said = "committed"
    except InvalidError as error:
        said = str(error)
    if world.rank == world.size - 1:
        with torch.no_grad():
            largest.div_(2.0)
    after = run.save(2, built.state | {"batches": 2}).wait(timeout=60.0)
    steps = run.steps()
    run.close()
    return {"said": said, "after": after is not None, "steps": steps}


def _local_parameters(built: Built) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for each in built.state.values():
        if isinstance(each, torch.nn.Module):
            found += each.parameters()
    return found


def _local_numel(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
