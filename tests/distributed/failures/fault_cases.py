"""What ranks do in the tests of deaths, absences and failures."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast
from holdfast.errors import UnavailableError
from tests.doubles.faults import FaultPoint, kill_process, raise_error
from tests.support.faulty_run import (
    PATIENT,
    SETTINGS,
    Trigger,
    die_first,
    run_with,
    said_of,
    said_of_save,
    save,
    state_of,
)
from tests.support.forked_processes import write_whole
from tests.support.gloo_worlds import World
from tests.support.small_networks import NormNet, adamw, sharded, train

# ------------------------------------------------------------------------------------- nobody dies, two ranks


def skewed_steps(world: World, root: str) -> dict[str, object]:
    run = run_with(root, settings=PATIENT)
    skewed = said_of_save(run, 10 + world.rank)
    after = said_of_save(run, 20)
    return {"skewed": skewed, "after": after, "steps": run.steps()}


def skewed_paths(world: World, root: str) -> str:
    try:
        holdfast.save(f"{root}-{world.rank}", {"a": torch.ones(2)})
    except holdfast.InvalidError as error:
        return str(error)
    return ""


def connections_to(port: int) -> Iterator[int]:
    """Yield the descriptors of this process's connections to a port."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.getpeername()[1:2] == (port,):
                        yield descriptor


def one_never_calls(world: World, root: str, absent: int) -> dict[str, object]:
    """A rank leaves out one save (a branch that only some ranks take); the next one is called by all."""
    run = run_with(root)
    lonely = {} if world.rank == absent else said_of_save(run, 5)
    dist.barrier()
    return {"lonely": lonely, "after": said_of_save(run, 6), "again": said_of_save(run, 7), "steps": run.steps()}


def one_calls_late(world: World, root: str, late: int) -> dict[str, object]:
    """A rank calls the same save once the others have given up and try again: all save it together, and count on."""
    run = run_with(root)
    if world.rank == late:
        time.sleep(SETTINGS.commit_timeout_seconds + 3.2)
    first = said_of_save(run, 5)
    retried = first if first["said"] == "committed" else said_of_save(run, 5)
    return {"first": first, "retried": retried, "after": said_of_save(run, 6), "steps": run.steps()}


def connections_break(world: World, root: str) -> dict[str, object]:
    """All connections of a rank but the training's own break between two saves, as a firewall drops idle ones."""
    server = dist.distributed_c10d._get_default_store()._underlying_non_prefix_store
    kept = set(connections_to(server.port))
    run = run_with(root, settings=PATIENT)
    found = [said_of_save(run, 1)]
    dist.barrier()
    broken = 0
    for descriptor in connections_to(server.port) if world.rank else ():
        if descriptor not in kept:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                broken += 1
    dist.barrier()
    start = time.monotonic()
    found += [said_of_save(run, step) for step in (2, 3)]
    return {"found": found, "broken": broken, "waited": time.monotonic() - start, "steps": run.steps()}


class Stubborn:
    def state_dict(self) -> dict[str, object]:
        raise ZeroDivisionError("no state today")

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError("never called")


def one_cannot_give_its_state(world: World, root: str, failing: int) -> dict[str, object]:
    run = run_with(root, settings=PATIENT)
    broken = (
        Stubborn()
        if world.rank == failing
        else torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 3)
    )
    start = time.monotonic()
    failed = said_of(lambda: run.save(1, {"a": torch.ones(3), "loader": broken}))
    waited = time.monotonic() - start
    return {"failed": failed, "waited": waited, "after": said_of_save(run, 2), "steps": run.steps()}


def all_refuse_at_once(world: World, root: str) -> dict[str, object]:
    """The state is wrong on every rank alike: whoever comes second finds the save already refused."""
    run = run_with(root, settings=PATIENT)
    refused = []
    for step in (1, 2):
        if world.rank:
            time.sleep(0.5)
        refused.append(said_of(lambda step=step: run.save(step, {"a": object()})))  # type: ignore[misc]
    return {"refused": refused, "after": said_of_save(run, 3), "steps": run.steps()}


def one_is_beyond_the_format(world: World, root: str) -> dict[str, object]:
    """One rank alone holds a tensor that no index may list."""
    run = run_with(root, settings=PATIENT)
    state = {"a": torch.ones(3), "t": torch.ones((1,) * (65 if world.rank else 1))}
    refused = said_of(lambda: run.save(1, state))
    return {"refused": refused, "after": said_of_save(run, 2), "steps": run.steps()}


def one_store_fails(world: World, root: str, failing: int, operation: str, ending: str) -> dict[str, object]:
    trigger = Trigger(raise_error(UnavailableError), [operation], ending)
    run = run_with(root, store=trigger, settings=PATIENT)
    first = said_of_save(run, 1)
    trigger.armed = world.rank == failing
    failed = said_of_save(run, 2)
    trigger.armed = False
    dist.barrier()
    left = sorted(str(path.relative_to(root)) for path in Path(root, "step-000000000002").rglob("*") if path.is_file())
    dist.barrier()
    after = said_of_save(run, 2)
    return {"first": first, "failed": failed, "met": trigger.met, "left": left, "after": after, "steps": run.steps()}


def publishing_fails(world: World, root: str, after: bool) -> dict[str, object]:
    """Whoever commits fails at the manifest, before it is put or once it is (the reply is lost)."""
    trigger = Trigger(raise_error(UnavailableError), ["put_if_absent"], "manifest.json", after=after)
    run = run_with(root, store=trigger, settings=PATIENT)
    said_of_save(run, 1)
    trigger.armed = True
    failed = said_of_save(run, 2)
    trigger.armed = False
    return {"failed": failed, "met": trigger.met, "next": said_of_save(run, 3), "steps": run.steps()}


class NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        if "c10d" in str(function):
            raise AssertionError(f"a collective ran: {function}")
        return function(*arguments, **(options or {}))


COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv", "isend", "irec"))
    or name in ("monitored_barrier", "batch_isend_irecv", "new_group", "new_subgroups")
]


def saving_runs_no_collective(world: World, root: str) -> dict[str, object]:
    """With every collective made to raise, in every thread: this is a process of its own, and it ends here."""
    net = sharded(1)
    optimizer = adamw(net)
    train(net, optimizer)
    state: dict[str, object] = {
        "model": net,
        "optimizer": optimizer,
        "replicated": DistributedDataParallel(NormNet()),
        "rank": world.rank,
        "mesh": [init_device_mesh("cpu", (world.size,)).size()],
    }
    manager = holdfast.CheckpointManager(root, settings=PATIENT)
    ran: list[str] = []

    def forbidden(name: str) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            ran.append(name)
            raise AssertionError(f"a collective ran: {name}")

        return call

    for module in (dist, dist.distributed_c10d):
        for name in COLLECTIVES:
            if hasattr(module, name):
                setattr(module, name, forbidden(name))
    forbidden_alone = said_of(lambda: _raises(dist.all_reduce))
    with NoCollectives():
        first = said_of(lambda: manager.save(1, state))
        second = said_of(lambda: manager.save(2, state))
        other = said_of(lambda: manager.save(3, {"a": torch.ones(3)}))
    ran_before_this = [name for name in ran if name != "all_reduce"]
    manager.close()
    return {
        "said": [first["said"], second["said"], other["said"]],
        "messages": [first["message"], second["message"], other["message"]],
        "forbidden": forbidden_alone["said"],
        "ran": ran_before_this,
    }


def _raises(collective: Callable[..., object]) -> holdfast.SaveHandle:
    try:
        collective(torch.ones(1))
    except AssertionError as error:
        raise UnavailableError(str(error)) from error
    raise AssertionError("the collective was not replaced")


# --------------------------------------------------------------------------------------------- somebody dies


def _first_then(
    world: World, root: str, *, store: Trigger | None = None, key_value_store: Trigger | None = None, armed: bool = True
) -> dict[str, object]:
    """Save step 1 whole and in peace, arm the fault, save step 2, and say what became of it."""
    calm = run_with(root, settings=PATIENT)
    save(calm, 1).wait(timeout=60)
    calm.close()
    run = run_with(root, store=store, key_value_store=key_value_store)
    for trigger in (store, key_value_store):
        if trigger is not None:
            trigger.armed = armed
    said = said_of_save(run, 2)
    write_whole(world.scratch / f"second.{world.rank}", str(said["said"]))
    return said


def killed_while_writing(world: World, root: str, victim: int) -> dict[str, object]:
    trigger = Trigger(kill_process(), ["upload.write"], at=3)
    return _first_then(world, root, store=trigger, armed=world.rank == victim)


def killed_before_vote(world: World, root: str, victim: int) -> dict[str, object]:
    trigger = Trigger(kill_process(), ["set"], "/vote/")
    return _first_then(world, root, key_value_store=trigger, armed=world.rank == victim)


def committer_killed_before_outcome(world: World, root: str) -> dict[str, object]:
    trigger = Trigger(die_first(world.scratch / "died"), ["compare_set"], "/outcome")
    return _first_then(world, root, key_value_store=trigger)


def committer_killed_before_publishing(world: World, root: str) -> dict[str, object]:
    trigger = Trigger(die_first(world.scratch / "died"), ["put_if_absent"], "manifest.json")
    return _first_then(world, root, store=trigger)


def committer_killed_after_publishing(world: World, root: str) -> dict[str, object]:
    trigger = Trigger(die_first(world.scratch / "died"), ["put_if_absent"], "manifest.json", after=True)
    return _first_then(world, root, store=trigger)


def host_killed_as_committer(world: World, root: str, after: bool) -> dict[str, object]:
    """Rank 0 hosts the key-value store, is made the last one, wins the outcome and dies at the manifest."""

    def act(operation: FaultPoint) -> None:
        if world.rank == 0 and "/parts/" in operation.subject:
            time.sleep(2.0)
        elif "manifest.json" in operation.subject:
            die_first(world.scratch / "died")(operation)

    trigger = Trigger(act, ["put_if_absent"], at=None, after=after)
    return _first_then(world, root, store=trigger)


def stopped_committer(world: World, root: str) -> dict[str, object]:
    """Whoever commits is stopped between winning the outcome and the manifest, for as long as the launcher likes."""

    def stop(operation: FaultPoint) -> None:
        write_whole(world.scratch / "stopped", str(world.rank))
        # To this thread: if another thread of the process takes the signal first, this one may publish before it stops.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    calm = run_with(root, settings=PATIENT)
    save(calm, 1).wait(timeout=60)
    calm.close()
    # The launcher's new job waits for the end of this one's lease.
    settings = replace(SETTINGS, lease_seconds=3.0)
    run = run_with(root, store=Trigger(stop, ["put_if_absent"], "manifest.json", armed=True), settings=settings)
    handle = save(run, 2)
    try:
        handle.wait(timeout=120)
    except holdfast.CheckpointError as error:
        said = "unknown" if "outcome unknown" in str(error) else "failed"
        return {"said": said, "error": type(error).__name__, "message": str(error)}
    return {"said": "committed"}


def two_saves_in_flight(world: World, root: str) -> dict[str, object]:
    """Saves are begun one after the other without waiting; each comes out on its own."""
    manager = holdfast.CheckpointManager(root, settings=PATIENT)
    handles = [manager.save(step, state_of(step)) for step in (1, 2, 3, 4)]
    manager.wait()
    said = [handle.committed.exception() is None for handle in handles]
    manager.close()
    return {"said": said, "steps": manager.steps()}
