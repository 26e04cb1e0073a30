"""A small checkpoint at a path that is saved again and again, each time filled with the number of its save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

import holdfast
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.framework import Selection
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import SaveReport
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import Job
from holdfast.training.saving.save import save_and_wait
from holdfast.training.saving.target import Collect, SaveTarget, path_save
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned

HASTY = tuned(
    Settings(chunk_bytes=PAGE_BYTES, collect_grace_seconds=0.0, lease_seconds=0.3), window_bytes=2 * PAGE_BYTES
)
"""Removes what was replaced at the next overwrite, and takes a claim over soon."""

PATIENT = replace(HASTY, collect_grace_seconds=3600.0)
EVERYTHING = Selection(None, (), False)


def state_of(number: int) -> dict[str, object]:
    arrays = {name: np.full(5000, number, dtype=np.float32) for name in ("first", "second")}
    return {**{name: GlobalTensor("float32", array) for name, array in arrays.items()}, "number": number}


def job_of(settings: Settings = HASTY) -> Job:
    return Job(AloneComm(), SystemClock(), settings, NumpyFramework(0))


def location_of(where: Path | Store, settings: Settings = HASTY) -> CheckpointLocation:
    return CheckpointLocation(LocalStore(where, settings=settings) if isinstance(where, Path) else where, "", None)


def request(job: Job, where: Path | Store, state: dict[str, object]) -> tuple[SaveTarget, Collect]:
    return path_save(job, location_of(where, job.settings), state, EVERYTHING, overwrite=True)


def save(
    where: Path | Store, number: int, settings: Settings = HASTY, state: dict[str, object] | None = None
) -> SaveReport:
    """Save over what is there, as a process of its own would."""
    job = job_of(settings)
    try:
        return save_and_wait(job, *request(job, where, state_of(number) if state is None else state))
    finally:
        job.close()


def number_in(state: dict[str, object]) -> int:
    """Return which save a state was filled from, after requiring that it was one alone."""
    number = state["number"]
    assert isinstance(number, int)
    for name in ("first", "second"):
        tensor = state[name]
        array = tensor.array if isinstance(tensor, GlobalTensor) else tensor
        assert isinstance(array, np.ndarray) and (array == number).all(), (name, number)
    return number


def number_at(path: Path) -> int:
    """Return which save is at a path, after requiring that it is whole and of one save alone."""
    checkpoint = holdfast.open_checkpoint(path)
    assert list(checkpoint.verify()) == []
    return number_in({name: checkpoint.read(name) for name in ("first", "second")} | dict(checkpoint.objects))


def attempts_at(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if len(entry.name) == 16}


def attempt_at(path: Path) -> str:
    return holdfast.open_checkpoint(path).manifest.attempt
