"""One process that is told to end in several ways, each in a child of its own; prints the exit status of each."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

# Once, rather than by each child that saves.
import torch.distributed.tensor

import holdfast


def loop(root: Path, raised: dict[int, int], *, steps: int = 5, **arguments: object) -> None:
    """Train; some steps are told to end, by the signals that `raised` names."""
    with holdfast.CheckpointManager(root, every=1000, process_group=False, **arguments) as manager:  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            if step in raised:
                signal.raise_signal(raised[step])
            manager.maybe_save(step, {"weights": torch.full((1000,), float(step))})


def in_a_thread(root: Path) -> None:
    refused: list[BaseException] = []

    def work() -> None:
        try:
            loop(root, {}, preemption=holdfast.Preemption())
        except holdfast.InvalidError as error:
            refused.append(error)
        loop(root, {})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread only" in str(refused[0])
    signal.raise_signal(signal.SIGTERM)


def failing(root: Path) -> None:
    with holdfast.CheckpointManager(root, every=1000, process_group=False) as manager:
        manager.maybe_save(1, {"weights": torch.ones(10)})
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("the loop's own error")


def twice(root: Path) -> None:
    try:
        loop(root, {3: signal.SIGINT})
    except holdfast.Preempted as preempted:
        assert preempted.is_saved and preempted.step == 3
        # torchrun tells the ranks that are left once the first has ended.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        raise


def interrupted_twice(root: Path) -> None:
    with holdfast.CheckpointManager(root, every=1000, process_group=False) as manager:
        manager.maybe_save(1, {"weights": torch.ones(10)})
        signal.raise_signal(signal.SIGINT)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            os._exit(30)


def after_the_last(root: Path) -> None:
    with holdfast.CheckpointManager(root, every=1000, process_group=False) as manager:
        manager.maybe_save(1, {"weights": torch.ones(10)})
        signal.raise_signal(signal.SIGTERM)
    time.sleep(20)


CASES: dict[str, Callable[[Path], None]] = {
    "sigterm": lambda root: loop(root, {3: signal.SIGTERM}),
    "sigint": lambda root: loop(root, {3: signal.SIGINT}),
    "sigusr1": lambda root: loop(root, {3: signal.SIGUSR1}, preemption=holdfast.Preemption(signals=("SIGUSR1",))),
    "no-time": lambda root: loop(root, {3: signal.SIGTERM}, preemption=holdfast.Preemption(grace_seconds=0.001)),
    "off": lambda root: loop(root, {3: signal.SIGTERM}, preemption=False),
    "before-the-first": lambda root: loop(root, {1: signal.SIGTERM}),
    "after-the-last": after_the_last,
    "thread": in_a_thread,
    "failing": failing,
    "twice": twice,
    "interrupted-twice": interrupted_twice,
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    statuses = {}
    for name, case in CASES.items():
        child = os.fork()
        if not child:
            code: object = 0
            try:
                case(folder / name)
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
        statuses[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
