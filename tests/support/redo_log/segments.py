"""Segments of a redo log, written as a run writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.gradients import Captured, RecordedTensor
from holdfast.base.ports.store import Store
from holdfast.base.types.redo import AfterImage, OptimizerCall, Record, Software, call_tensor
from holdfast.base.types.values import Group
from holdfast.core.engine.writing.write import PackWriter
from holdfast.settings import Settings
from holdfast.training.redo_log.segments import QueuedRecord, write_segment

LOG = "0123456789abcdef"
SETTINGS = Settings()


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> _Bytes:
        buffer[: stop - start] = self._data[start:stop]
        return self

    def wait(self) -> None:
        pass


def record_of(step: int, groups: object = 0.5) -> Record:
    call = OptimizerCall("optimizer", ({"lr": groups, "betas": (0.9, 0.99)},), ("model.weight",))
    software = Software({"torch": "2"}, {"optimizer": "SGD"})
    return Record(
        step, (call,), (AfterImage("model.mean", 1),), Group("dict", {"n": step}), {"rng": b"1"}, {"a": step}, software
    )


def queued(step: int, previous: int, values: np.ndarray, rows: Sequence[tuple[int, int]]) -> QueuedRecord:
    spec = TensorSpec(call_tensor(0, "model.weight"), "float32", values.shape)
    tensors = [
        RecordedTensor(spec, Box((start, 0), (stop, values.shape[1])), _Bytes(values[start:stop].tobytes()))
        for start, stop in rows
    ]
    return QueuedRecord(Captured(record_of(step), lambda: tensors, 24, lambda: None), previous, LOG)


def write(store: Store, rank: int, records: Sequence[QueuedRecord], log: str = LOG) -> None:
    of_log = [replace(each, log=log) for each in records]
    write_segment(store, PackWriter(store, SETTINGS), rank, of_log, lambda _: None)


def values_of(seed: int, rows: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 5)).astype(np.float32)
