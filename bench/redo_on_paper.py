"""What comes to one rank of many until it has redone a log: heads of its own segments, and words of the other ranks.

The rank writes its segments as a run does, but the store keeps their heads only. Then it redoes the log with the real
code; every other rank says what it says. Gradients are neither read nor applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from bench.load_on_paper import PlayedComm
from bench.opening_on_paper import STEP
from bench.synthetic import SyntheticJob
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.framework import Source, Ticket, Wanted
from holdfast.base.ports.gradients import Captured, RecordedTensor
from holdfast.base.ports.readable import Release, StoreEntry
from holdfast.base.ports.store import Upload
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.redo import OptimizerCall, Record, Software, call_tensor
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.plan.ownership import owned_by
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job
from holdfast.training.redo_log.recovery import LogRedo
from holdfast.training.redo_log.segments import QueuedRecord, write_segment

RECORDS = 24
"""The most records after a base that training in fp32 with Adam leaves by default."""

_LOG = "0123456789abcdef"
_HEAD_BYTES = 1 << 20


class _Segments(ForwardingStore):
    """A store that keeps the first MiB of each segment, and counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__(MemoryStore("redo-on-paper"))
        self.heads: dict[str, bytearray] = {}
        self.sizes: dict[str, int] = {}
        self.read_bytes = 0

    def upload(self, key: str, bytes_max: int, part_bytes: int, **options: bool) -> Upload:
        self.heads[key], self.sizes[key] = bytearray(_HEAD_BYTES), bytes_max
        return cast(Upload, _Head(self, key))

    def list(self, prefix: str = "") -> Iterator[StoreEntry]:
        yield from (StoreEntry(key, size) for key, size in self.sizes.items() if key.startswith(prefix))

    def read_into(self, key: str, ranges: Any, buffers: Any, *_: object) -> None:
        for (start, stop), buffer in zip(ranges, buffers, strict=True):
            assert stop <= _HEAD_BYTES, "of a segment only the head is kept"
            buffer[:] = self.heads[key][start:stop]
            self.read_bytes += stop - start


class _Head:
    """The upload of a segment."""

    def __init__(self, store: _Segments, key: str) -> None:
        self._store, self._key = store, key

    def room(self, offset: int, length_bytes: int) -> None:
        return None

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        kept = data[: max(_HEAD_BYTES - offset, 0)]
        self._store.heads[self._key][offset : offset + len(kept)] = kept
        if release is not None:
            release()

    def complete(self, total_bytes: int | None = None) -> None:
        if total_bytes is not None:
            self._store.sizes[self._key] = total_bytes

    def abort(self) -> None:
        raise AssertionError("nothing fails on paper")


class _Gradient:
    """The bytes of a gradient: whatever the buffer holds."""

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        return self

    def wait(self) -> None:
        """Return: nothing is under way."""


class _ToldComm(PlayedComm):
    """A comm whose other ranks say what this one says."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._records = [payload] * self.world_size
        return super().all_gather(payload)

    def bitwise_or(self, payload: bytes) -> bytes:
        self._parts = [payload]
        return super().bitwise_or(payload)

    def broadcast(self, payload: bytes | None) -> bytes:
        self.received += len(payload or b"")
        return payload or b""


class _NoRedo:
    """A redo that applies nothing."""

    def unlike(self, record: Record) -> str:
        return ""

    def wanted(self, record: Record) -> Sequence[Wanted]:
        return ()

    def apply(self, record: Record) -> Sequence[str]:
        return ()

    def finish(self, record: Record) -> None:
        """Restore nothing."""


def redo_bytes_into_rank(job: SyntheticJob, settings: Settings) -> dict[str, float]:
    """Return the bytes that come to one rank beside gradients: those that it reads, and those that ranks tell it."""
    rank, store = job.world_size * 5 // 8 + 3, _Segments()
    shards = [each for each in job.shards_of(rank) if each.tensor.fqn.startswith("model.")]
    tensors = [
        RecordedTensor(_named(shards[each.shard_number].tensor), each.region, cast(Source, _Gradient()))
        for each in owned_by(rank, shards, {}, settings.chunk_bytes)
    ]
    count = sum(each.region.numel * each.tensor.itemsize for each in tensors)
    collected, names = job.collected_on(rank), tuple(shard.tensor.fqn for shard in shards)
    group = {"lr": 8e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "fused": True}
    call = OptimizerCall("optimizer", (group,), names)
    due, software = dict.fromkeys(names[:2], 1 << 63), Software({"torch": "2.13.0"}, {"optimizer": "AdamW fused"})
    for step in range(STEP + 1, STEP + 1 + RECORDS):
        record = Record(step, (call,), (), collected.tree, collected.per_rank, due, software)
        queued = QueuedRecord(Captured(record, lambda: tensors, count, lambda: None), step - 1, _LOG)
        write_segment(store, PackWriter(store, settings), rank, [queued], lambda _: None)
    comm = _ToldComm(job.world_size, None, None)
    comm.rank = rank
    base = SimpleNamespace(step=STEP, log=_LOG, world_size=job.world_size, digest="")
    running = Job(comm, SystemClock(), settings)
    comm.received = 0
    redone = LogRedo(running, store, cast(Manifest, base), _NoRedo()).run()
    assert (redone.records, redone.why) == (RECORDS, ""), redone
    return {
        "redo_recover_bytes_in_per_rank": store.read_bytes + comm.received,
        "redo_recover_bytes_read_per_rank": store.read_bytes,
    }


def _named(tensor: TensorSpec) -> TensorSpec:
    return replace(tensor, fqn=call_tensor(0, tensor.fqn))
