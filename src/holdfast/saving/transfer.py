"""The bytes of one save on their way from the state into packs: before the call returns, behind it, or lazily."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

from holdfast.coordination.job import Job
from holdfast.engine.gc_pause import gc_paused_for
from holdfast.engine.staging import Staging
from holdfast.engine.write import PackWriter, WrittenPack
from holdfast.errors import InvalidError
from holdfast.ports.framework import Collected, LocalShard, Source
from holdfast.saving.handle import SaveHandle
from holdfast.settings import MIB
from holdfast.telemetry.operation import OperationTrace
from holdfast.types.plan import PlannedPack
from holdfast.types.reports import Staged

logger = logging.getLogger(__name__)

_LAZY_BYTES_MAX = 512 * MIB
"""What the arena grows to for lazy saves, unless its budget was chosen: windows are written while others are filled."""

_EAGER_BYTES_MAX = 64 * MIB
"""What a lazy save copies at the call at most. Such copies are made into fresh memory, outside the arena's budget."""

_FENCE_SECONDS_NOTED = 1.0


class Transfer:
    """What one rank writes in one save, taken from the state once and written once."""

    def __init__(
        self,
        job: Job,
        handle: SaveHandle,
        writer: PackWriter,
        packs: Sequence[PlannedPack],
        trace: OperationTrace,
    ) -> None:
        """Begin nothing yet.

        Args:
            job: Whose arena and threads are used.
            handle: Reaches `staged` once training may change the state, on whatever thread that is.
            writer: Writes the packs.
            packs: What is written.
            trace: Records the phases, and how many bytes are written.
        """
        self._trace, self._on_progress = trace, trace.progress_callback(sum(pack.bytes for pack in packs))
        self._job, self._handle, self._name, self._writer, self._packs = job, handle, handle.name, writer, packs
        self.staging: Staged = "none"
        """How the state was taken."""
        self.staged_seconds = 0.0
        """From the call until training might change the state."""
        self.waited_seconds = 0.0
        """How long copies have waited for buffers."""
        self._staging = Staging(job.arena)
        self._written: list[WrittenPack] | None = None
        self._is_copying = False
        self._copied_at: float | None = None
        self._fence_starts: list[float] = []
        # Reentrant: what is called once all is staged may step an optimizer.
        self._check_lock = threading.RLock()
        self._is_checked = False
        self._stamped: list[tuple[str, Source, object]] = []
        self._expected: list[tuple[bytes, ...]] | None = None

    def begin(self, collected: Collected, *, awaited: bool) -> None:
        """Take the state, or begin to; return once training may go on.

        Args:
            collected: The state.
            awaited: Whether the caller waits for the commit anyhow.
        """
        arena, shards = self._job.arena, collected.shards
        sources = [each.source for each in shards]
        is_lazy = not awaited and self._job.settings.staging == "lazy" and self._can_be_lazy(collected)
        buffers = sum(-(-pack.bytes // arena.buffer_bytes) for pack in self._packs)
        if awaited or not arena.holds(1 if is_lazy else buffers):
            self._write(sources)
            return
        if collected.pin is not None:
            arena.pin(collected.pin)
        if not is_lazy:
            self.staging = "copy"
            self._copy_in_background(sources)
            self.settle()
        else:
            assert collected.fence is not None, "or it could not be lazy"
            self.staging = "lazy"
            self._staging = Staging(arena, None if self._job.settings.arena_bytes_max is not None else _LAZY_BYTES_MAX)
            self._snapshot_unfenced(shards, sources)
            collected.fence(self._block_training)
            self._copy_in_background(sources)

    def written(self) -> list[WrittenPack]:
        """Return what is written and durable, after writing what is not; in the background.

        Raises:
            InvalidError: What was taken lazily changed before it was copied.
            CheckpointError: It could not be written.
        """
        if self._written is not None:
            return self._written
        try:
            written = []
            with self._trace.phase("write"):
                for pack in self._packs:
                    with gc_paused_for(pack.plan.data_bytes):
                        written.append(self._writer.write_staged(pack, self._staging, self._on_progress))
            self._staging.wait()
            self._check_unmodified()
            self._staging.raise_failure()
            self._require_expected(written)
        except BaseException as error:
            self.give_up(error)
            raise
        return written

    def give_up(self, error: BaseException) -> None:
        """Copy and write nothing more; what is lent goes back, and nobody is held up."""
        self._staging.give_up(error)
        self._stamped.clear()
        if not self._is_copying:
            self._staging.end()

    def settle(self, timeout: float | None = None) -> float | None:
        """Wait until nothing more is read from the state, on the thread that trains; return what is left to wait."""
        start = self._job.clock.monotonic_seconds()
        if self._staging.wait(timeout):
            self._check_unmodified()
        return None if timeout is None else max(start + timeout - self._job.clock.monotonic_seconds(), 0.0)

    def _block_training(self) -> None:
        """Be the fence."""
        start = self._job.clock.monotonic_seconds()
        self._fence_starts.append(start)
        with self._trace.phase("fence"):
            self.settle()
        seconds = self._job.clock.monotonic_seconds() - start
        if seconds > _FENCE_SECONDS_NOTED:
            logger.warning(
                "%s: held training up for %.1f s: copies had to wait for memory. Raise settings.arena_bytes_max, or "
                "save less often than storage takes it",
                self._name,
                seconds,
            )

    @property
    def fence_seconds(self) -> float:
        """How long the fence has held training up."""
        stop = self._job.clock.monotonic_seconds() if self._copied_at is None else self._copied_at
        return sum(max(stop - since, 0.0) for since in self._fence_starts)

    def _write(self, sources: Sequence[Source]) -> None:
        self._written = []
        with self._trace.phase("write"):
            for pack in self._packs:
                with gc_paused_for(pack.plan.data_bytes):
                    self._written.append(self._writer.write(pack, sources, self._on_progress))
        self._reach_staged()

    def _reach_staged(self) -> None:
        self.staged_seconds = self._trace.seconds
        self._handle.reach_staged()

    def _can_be_lazy(self, collected: Collected) -> bool:
        reason = collected.unfenced_because
        owned = [shard for _, shard in self._owned_shards(collected.shards)]
        if collected.fence is not None:
            eager_bytes = sum(_local_bytes(shard) for shard in owned if not shard.fenced)
            if not any(shard.fenced for shard in owned):
                # Nothing to gain, and nothing to say where all of it is small: a rank may write no more than that.
                if eager_bytes <= _EAGER_BYTES_MAX:
                    return False
            elif eager_bytes <= _EAGER_BYTES_MAX:
                return True
            reason = (
                f"{eager_bytes} bytes of it are neither parameters that an optimizer of the state steps, nor such an "
                "optimizer's state. Pass modules and optimizers themselves rather than their state_dict()"
            )
        if self._job.is_first_occurrence(reason):
            logger.warning("%s: the state is copied before the call returns, not lazily: %s", self._name, reason)
        return False

    def _snapshot_unfenced(self, shards: Sequence[LocalShard], sources: list[Source]) -> None:
        """Stamp what is taken lazily, and put copies of the rest in place of its sources."""
        for number, shard in self._owned_shards(shards):
            if shard.fenced:
                self._stamped.append((shard.shard.tensor.fqn, shard.source, shard.source.stamp()))
            else:
                sources[number] = shard.source.copied()
        if self._job.settings.verify_lazy_copy:
            self._expected = [self._writer.digests_of(pack, sources) for pack in self._packs]

    def _owned_shards(self, shards: Sequence[LocalShard]) -> Iterator[tuple[int, LocalShard]]:
        """Yield each shard that this rank writes something of, with its number."""
        for number in dict.fromkeys(item.shard_number for pack in self._packs for item in pack.plan.items):
            yield number, shards[number]

    def _copy_in_background(self, sources: Sequence[Source]) -> None:
        arena = self._job.arena

        def copy() -> None:
            waited_seconds = arena.waited_seconds
            try:
                with (
                    self._trace.phase("copy"),
                    gc_paused_for(sum(pack.plan.data_bytes for pack in self._packs)),
                ):
                    self._staging.copy(self._packs, sources)
            finally:
                self.waited_seconds = arena.waited_seconds - waited_seconds

        self._is_copying = True
        try:
            self._job.copies.submit(copy)
        except BaseException:
            self._is_copying = False
            raise

    def _check_unmodified(self) -> None:
        """Find out, once everything is copied, whether all of it was as at the call.

        Asked on the thread that trains, at the fence, where no operation of that thread can be under way: torch counts
        an operation only when it is over, and one that was writing while the last copy was made would not be seen.
        Where no fence is met it is asked once everything is written.
        """
        with self._check_lock:
            if self._is_checked:
                return
            self._is_checked = True
            self._copied_at = self._job.clock.monotonic_seconds()
            unsure = self._staging.unsure
            if unsure is not None:
                logger.error(
                    "%s: waiting for a device's copies failed, and they may go on (%s: %s). The save fails, and its "
                    "memory is not used again",
                    self._name,
                    type(unsure).__name__,
                    unsure,
                )
                self.give_up(unsure)
                return
            changed = [fqn for fqn, source, stamp in self._stamped if source.stamp() != stamp]
            self._stamped.clear()
            if changed:
                self.give_up(InvalidError(_modified_message(self._name, changed)))
            else:
                self._reach_staged()

    def _require_expected(self, written: Sequence[WrittenPack]) -> None:
        if self._expected is None:
            return
        changed = [
            item.tensor.fqn
            for pack, expected, found in zip(self._packs, self._expected, written, strict=True)
            for item, own, other in zip(pack.plan.items, expected, found.digests, strict=True)
            if own != other
        ]
        if changed:
            raise InvalidError(_modified_message(self._name, changed))


def _local_bytes(shard: LocalShard) -> int:
    return sum(piece.numel for piece in shard.shard.pieces) * shard.shard.tensor.itemsize


def _modified_message(name: str, changed: Sequence[str]) -> str:
    more = f" and {len(changed) - 10} more" if len(changed) > 10 else ""
    return (
        f"{name}: {', '.join(changed[:10])}{more} changed while being taken lazily; expected no change before the next "
        "optimizer step or load_state_dict. Nothing was committed. Change tensors after handle.wait('staged') only, "
        "leave these out with skip=, or save with settings.staging='copy'"
    )
