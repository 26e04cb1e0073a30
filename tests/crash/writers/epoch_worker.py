"""A process that writes to roots as it is told on its standard input, one order a line, and answers each in one line.

`race ROOT STEP AT`: save the step, beginning at a moment of the monotonic clock that all processes of a machine share.
`stop ROOT STEP`: the same at once; the process stops itself (SIGSTOP) in the act of publishing.
`close`: close the manager of the last order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import numpy as np

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.training.coordination.job import Job
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned

SETTINGS = tuned(Settings(chunk_bytes=PAGE_BYTES, commit_timeout_seconds=60.0), window_bytes=2 * PAGE_BYTES)


class StopAtTheManifest:
    """Stops this process the first time that a manifest is to be put."""

    def __init__(self) -> None:
        self._is_over = False

    def __call__(self, operation: FaultPoint) -> None:
        if operation.subject.endswith("/manifest.json") and not self._is_over:
            self._is_over = True
            # To this thread: one that is sent to the process may stop it only after this thread has published.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def run_over(root: str, lease_seconds: float, *, is_stopped: bool = False) -> CheckpointManager:
    settings = replace(SETTINGS, lease_seconds=lease_seconds)
    store: Store = LocalStore(root, settings=settings)
    if is_stopped:
        store = FaultyStore(store, Faults(StopAtTheManifest(), names={"put_if_absent"}, lasting=True))
    return CheckpointManager.over(store, Job(AloneComm(), SystemClock(), settings, NumpyFramework(0)))


def state_of(number: int) -> dict[str, object]:
    """Return a state that tells whose it is."""
    return {"weights": GlobalTensor("float32", np.full(5000, number, dtype=np.float32)), "by": number}


def saved(run: CheckpointManager, step: int) -> dict[str, object]:
    """Save a step; return what came of it."""
    start = time.monotonic()
    try:
        run.save(step, state_of(os.getpid())).wait()
    except CheckpointError as error:
        return {"said": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
    return {"said": "committed", "seconds": time.monotonic() - start}


def main(lease_seconds: float) -> None:
    print("ready", flush=True)
    run = None
    for line in sys.stdin:
        order, *rest = line.split()
        answer: dict[str, object] = {}
        if order == "close":
            assert run is not None
            run.wait()
            run.close()
        else:
            run = run_over(rest[0], lease_seconds, is_stopped=order == "stop")
            run.load(state_of(0))
            if order == "race":
                time.sleep(max(float(rest[2]) - time.monotonic() - 0.002, 0))
                while time.monotonic() < float(rest[2]):
                    pass
            answer = saved(run, int(rest[1]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
