"""Trainings of two ranks whose saves meet faults: what a rank does, and what it reports."""

from __future__ import annotations

import builtins
import logging
import os
import signal
import sys
import time
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.errors import CheckpointError
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job
from holdfast.training.saving.handle import SaveHandle
from tests.distributed.failures.drawn_faults import DrawnFault, RankFaults, draw
from tests.doubles.faults import FaultPoint, FaultyStore, FaultySyscalls
from tests.support.faulty_run import BoardedComm
from tests.support.forked_processes import write_whole
from tests.support.gloo_worlds import World
from tests.support.tuning import tuned

STRIDE = 10
"""Distance of the steps of a training, so that ranks can save different ones."""

SETTINGS = tuned(
    Settings(commit_timeout_seconds=5.0, agreement_timeout_seconds=4.0, chunk_bytes=4096),
    window_bytes=8192,
    windows_in_flight=2,
)
"""Timeouts that end a save in which a rank is silent. No test expects a save to be faster than them."""


class Loader:
    """A data loader; its state may fail to be given."""

    def __init__(self, position: int = 0) -> None:
        self.position, self.failure = position, ""

    def state_dict(self) -> dict[str, object]:
        if self.failure:
            raise getattr(builtins, self.failure)("worker 2 exited")
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.position = state["position"]  # type: ignore[assignment]


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step in global coordinates. One of them never changes."""
    chance = torch.Generator().manual_seed(step)
    fixed = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(9_000, generator=chance),
        "rows": torch.randn(64, 100, generator=chance),
        "frozen": torch.randn(20_000, generator=fixed),
    }


def state_at(step: int, mesh: DeviceMesh | None, rank: int = 0) -> dict[str, object]:
    """Return the state of a step: on two ranks, or whole without a mesh."""
    tensors: dict[str, object] = dict(tensors_at(step))
    if mesh is not None:
        own = tensors_at(step)["rows"].chunk(2)[rank].clone()
        tensors["rows"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    return {**tensors, "step": step, "loader": Loader(step)}


class Log(logging.Handler):
    """The errors that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Meeting:
    """The save of one drawn fault on one rank."""

    kind: str
    is_gentle: bool
    is_alone: bool
    """Whether no other fault was armed while it was."""
    injected_seconds: float
    """How long the fault itself may hold the training thread."""
    held_seconds: float = 0.0
    """How long the call held it, without what the loop did before the call."""
    is_met: bool = False
    failure: str = ""
    """Why its save failed; empty if it did not."""


@dataclass
class Ending:
    """What became of the saves of one rank."""

    committed: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    """Steps that certainly left no checkpoint."""
    unknown: list[int] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    """What a call of the loop raised."""
    untyped: list[str] = field(default_factory=list)
    unlogged: list[int] = field(default_factory=list)
    met: int = 0
    """Faults that were met on this rank."""
    meetings: list[Meeting] = field(default_factory=list)
    """Of each drawn fault, in order: what became of its save."""


class Training:
    """One rank of a training whose saves meet drawn faults."""

    def __init__(self, world: World, root: str, settings: Settings) -> None:
        self.rank, self.ending, self.log = world.rank, Ending(), Log()
        logging.getLogger("holdfast").addHandler(self.log)
        self.mesh = init_device_mesh("cpu", (2,))
        self.faults = RankFaults(world.rank)
        syscalls: Syscalls = FaultySyscalls(Syscalls(), self.faults.system)  # type: ignore[assignment]
        store = FaultyStore(LocalStore(root, settings=settings, syscalls=syscalls), self.faults.store)
        real = wiring.comm_of(None)
        comm = BoardedComm(real, real.key_value_store, self.faults.keys)
        job = Job(comm, self.faults.clock, settings, wiring.framework_of(real))
        self.manager = CheckpointManager.over(store, job)
        self.handles: list[tuple[int, SaveHandle]] = []
        self.held_seconds = 0.0
        """How long the last call of save held the training thread."""
        self.is_at_rest = True
        """Whether the save of the last fault has ended."""
        self.repeated: set[int] = set()

    def go_on(self) -> None:
        """Train one step: a collective of the training itself, which ends with the group's timeout."""
        dist.all_reduce(torch.ones(1))

    def save(self, step: int, fault: DrawnFault | None = None) -> SaveHandle | None:
        """Save a step whose save may meet a fault. Report what the call raises: no call may."""
        state, metrics = state_at(step, self.mesh, self.rank), {"loss": 1.0}
        if fault is not None and fault.is_on(self.rank):
            step = self._spoil(step, state, metrics, fault)
        start = time.monotonic()
        try:
            handle = self.manager.save(step, state, metrics=metrics)
        except Exception as error:
            self.ending.raised.append(f"step {step}, {fault}: {type(error).__name__}: {error}")
            return None
        finally:
            self.held_seconds = time.monotonic() - start
        self.handles.append((step, handle))
        return handle

    def _spoil(self, step: int, state: dict[str, object], metrics: dict[str, object], fault: DrawnFault) -> int:
        """Put what is wrong into the state or the call; return the step to be saved."""
        loader = state["loader"]
        assert isinstance(loader, Loader)
        if fault.kind == "exception":
            loader.failure = fault.what
        elif fault.kind == "late rank":
            time.sleep(fault.seconds)
        elif fault.what == "unknown type":
            state["strange"] = object()
        elif fault.what == "replicas differ":
            state["a"] = torch.full((9_000,), float(self.rank) + 0.5)
        elif fault.what == "metrics":
            metrics["loss"] = "much"
        elif fault.what == "meta tensor":
            state["a"] = torch.empty(9_000, device="meta")
        elif fault.what == "other shape":
            state["a"] = torch.zeros(7 + self.rank)
        elif fault.what == "other step":
            return step + 1 + self.rank
        elif fault.what == "step again" and self.handles:
            step, _ = self.handles[0]
            self.repeated.add(step)
        return step

    def meet(self, step: int, fault: DrawnFault) -> None:
        """Save a step while a fault is armed, until its save has ended."""
        # A request that was given up refuses all saves until storage answers: they would meet none of their faults.
        while self.faults.is_delaying and all(handle.committed.done() for _, handle in self.handles):
            time.sleep(0.01)
        self.go_on()
        met, disarm = self.faults.arm(fault)
        handle = self.save(step, fault)
        limit = SETTINGS.agreement_timeout_seconds
        assert limit is not None
        is_alone = self.is_at_rest and fault.is_waited_for
        meeting = Meeting(fault.kind, fault.is_gentle(limit), is_alone, fault.held_seconds, self.held_seconds)
        self.ending.meetings.append(meeting)
        self.is_at_rest = fault.is_waited_for

        def end(_: object) -> None:
            meeting.is_met = bool(met())
            meeting.failure = "it raised" if handle is None else str(handle.failure or "")
            self.ending.met += meeting.is_met
            disarm()

        if handle is None:
            end(None)
        else:
            if fault.is_waited_for:
                wait([handle.committed])
            handle.committed.add_done_callback(end)

    def save_in_peace(self, step: int) -> int:
        """Save until a step is committed on both ranks; return the next step."""
        while True:
            self.go_on()
            handle = self.save(step)
            if handle is not None:
                wait([handle.committed])
            has_failed = torch.tensor([float(handle is None or handle.failure is not None)])
            dist.all_reduce(has_failed)
            step += STRIDE
            if not has_failed.item():
                return step

    def end(self) -> Ending:
        """Return what became of all saves."""
        ending = self.ending
        for step, handle in self.handles:
            wait([handle.committed])
            failure = handle.failure
            if failure is None:
                ending.committed.append(step)
                continue
            if not isinstance(failure, CheckpointError):
                ending.untyped.append(f"step {step}: {failure!r}")
            if not any(line.startswith(f"save of step {step} failed: ") for line in self.log.lines):
                ending.unlogged.append(step)
            if step not in self.repeated:
                (ending.unknown if handle.may_be_committed else ending.aborted).append(step)
        try:
            self.manager.close()
        except CheckpointError as error:
            print(f"close reported, as it should: {error}", file=sys.stderr)
        return ending


def meet_faults(world: World, root: str, seed: int, faults: int, in_call: bool) -> dict[str, object]:
    """Train through drawn faults, one at each save, to the last step.

    Args:
        world: The two ranks.
        root: Folder of the run.
        seed: Chooses the faults.
        faults: How many.
        in_call: Whether the saves write before the call returns.
    """
    settings = replace(SETTINGS, arena_bytes_max=0) if in_call else SETTINGS
    training = Training(world, root, settings)
    step = training.save_in_peace(STRIDE)
    for fault in draw(seed, faults):
        print(f"step {step}: {fault}", file=sys.stderr, flush=True)
        training.meet(step, fault)
        step += STRIDE
    last = training.save_in_peace(step) - STRIDE
    ending = training.end()
    return {**vars(ending), "last": last, "meetings": [asdict(meeting) for meeting in ending.meetings]}


def rank_0_is_late(world: World, root: str) -> dict[str, object]:
    """Save without a collective between the saves; rank 0 comes five times later than rank 1 to each.

    The settings are the defaults: a save fails after half of the group's timeout.
    """
    found: list[str] = []
    with holdfast.CheckpointManager(root) as manager:
        for step in range(1, 7):
            start = time.monotonic()
            handle = manager.save(step, state_at(step, None))
            wait([handle.committed])
            found.append("" if handle.failure is None else str(handle.failure))
            # The first save shows how long one takes.
            if step == 1:
                took = torch.tensor([time.monotonic() - start])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                late_seconds = min(5.0 * took.item(), 2.0)
            if world.rank == 0:
                time.sleep(late_seconds)
        return {"failures": found, "steps": manager.steps()}


# --------------------------------------------------------------------------------------------- a rank dies


def die_at(count: int, operation: FaultPoint) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(world: World, root: str, last: int, victim: int, at: int) -> str:
    """Train and save every step; the victim dies at an operation of a save. Record each acknowledged step."""
    training = Training(world, root, SETTINGS)
    training.save_in_peace(1)
    if world.rank == victim:
        fault = DrawnFault(
            "killed", victim, ("upload.write", "put_if_absent", "set", "add"), at, False, False, 0, "", True
        )
        for injector in (training.faults.store, training.faults.keys):
            injector.arm(fault, partial(die_at, at))
    for step in range(2, last + 1):
        try:
            training.go_on()
        except RuntimeError as error:
            return f"the collective of step {step} failed: {type(error).__name__}"
        handle = training.save(step)
        if handle is not None:
            wait([handle.committed])
            if handle.failure is None:
                write_whole(world.scratch / f"acknowledged.{world.rank}", str(step))
    return "the last step"


def go_on_after_death(world: World, root: str, last: int) -> dict[str, object]:
    """Restart: load the newest step and train to the last one."""
    mesh = init_device_mesh("cpu", (2,))
    state = state_at(0, mesh, world.rank)
    failures = []
    with holdfast.CheckpointManager(Path(root)) as manager:
        first = manager.load(state)
        assert first is not None
        for step in range(first + 1, last + 1):
            dist.all_reduce(torch.ones(1))
            handle = manager.save(step, state_at(step, mesh, world.rank))
            wait([handle.committed])
            failures += [] if handle.failure is None else [f"step {step}: {handle.failure}"]
    return {"first": first, "failures": failures}
