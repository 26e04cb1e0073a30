"""Moves the bytes of one save from the state into packs.

There are three ways: write before the call returns, copy before the call returns and write later, or copy lazily during
training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence

from holdfast.base.ports.framework import Collected, LocalShard, Source
from holdfast.base.types.plan import PlannedPack
from holdfast.base.types.reports import Staged
from holdfast.core.engine.background import DAEMON_POOL, SLICE_SECONDS, are_done, wait_in_slices
from holdfast.core.engine.encoding.encode import NO_WEIGHTS, KnownWeights
from holdfast.core.engine.gc_pause import gc_paused_for
from holdfast.core.engine.rooms import PackRooms
from holdfast.core.engine.staging import Staging
from holdfast.core.engine.writing.completions import Completions
from holdfast.core.engine.writing.write import PackWriter, WrittenPack
from holdfast.errors import InvalidError, UnavailableError, first_three
from holdfast.settings import MIB
from holdfast.training.coordination.job import Job
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.telemetry.operation import OperationTrace

logger = logging.getLogger(__name__)

_LAZY_BYTES_MAX = 512 * MIB
"""Arena limit of lazy saves, unless settings give a budget: some buffers are written while others are filled."""

_EAGER_BYTES_MAX = 64 * MIB
"""Most bytes that a lazy save copies at the call. These copies use fresh memory, outside the arena's budget."""

_FENCE_WARNING_SECONDS = 1.0
"""The fence logs a warning if it blocks training for longer."""


class Transfer:
    """Copies and writes the packs of one rank in one save.

    The training thread calls `stage`, and later `settle` through the fence or the handle. The copy thread fills
    buffers. The commit thread calls `write`, which writes the buffers.
    """

    def __init__(
        self,
        job: Job,
        handle: SaveHandle,
        writer: PackWriter,
        packs: Sequence[PlannedPack],
        trace: OperationTrace,
        on_written: Callable[[], None] = lambda: None,
        weights: KnownWeights = NO_WEIGHTS,
    ) -> None:
        """Start no copy yet.

        Args:
            job: Owns the arena and the threads.
            handle: Reaches `staged` once training may change the state, on any thread.
            writer: Writes the packs.
            packs: The packs of this rank.
            trace: Records the phases and the bytes written.
            on_written: Called whenever bytes were written, on any thread.
            weights: Weights that may be rounded masters in coded packs.
        """
        self._trace, self._report_bytes = trace, trace.progress_callback(sum(pack.bytes for pack in packs))
        self._job, self._handle, self._name, self._writer, self._packs = job, handle, handle.name, writer, packs
        self.staging: Staged = "none"
        """How the state is copied."""
        self.staged_seconds = 0.0
        """Seconds from the call until training may change the state."""
        self.waited_seconds = 0.0
        """Seconds that copies waited for buffers."""
        self._on_written, self._weights = on_written, weights
        self._stall_seconds = job.stall_seconds + _capped_seconds(packs, writer, job)
        """After this time without a written byte the save counts as hung."""
        self._rooms: PackRooms | None = None
        """Memory of the store for a save in the background, if the store lends some."""
        self._staging = Staging(job.arena)
        self._written: list[WrittenPack] | None = None
        self._has_left_write = False
        """Whether the call has ended before its write: the write must end with its next window."""
        self._is_copying = False
        self._copied_at: float | None = None
        self._fence_starts: list[float] = []
        self._is_checked = False
        self._stamps: list[tuple[str, Source, object]] = []
        self._digests_at_call: list[tuple[bytes, ...]] | None = None

    def stage(self, collected: Collected, *, awaited: bool) -> None:
        """Write or copy the state, or start a lazy copy; return once training may go on.

        Args:
            collected: The state.
            awaited: Whether the caller waits for the commit: then nothing is copied, only written.
        """
        arena, shards = self._job.arena, collected.shards
        sources = [shard.source for shard in shards]
        is_lazy = not awaited and self._job.settings.staging == "lazy" and self._can_be_lazy(collected)
        packs: Sequence[PlannedPack] = self._packs
        if not awaited and self._writer.lends_memory:
            self._rooms = self._staging.rooms = rooms = PackRooms(self._writer.begin, packs)
            # A copy into memory of the store needs none of the arena.
            packs = [pack for pack in packs if rooms.room(pack, 0, arena.buffer_bytes) is None]
        buffers = sum(-(-pack.bytes // arena.buffer_bytes) for pack in packs)
        needed = min(buffers, 1) if is_lazy else buffers
        if awaited or (needed and not arena.holds(needed)):
            if self._rooms is not None:
                self._rooms.abort()
                self._rooms = self._staging.rooms = None
            self._written = self._write_in_call(sources)
            self._reach_staged()
            return
        if collected.pin is not None:
            arena.pin(collected.pin)
        if not is_lazy:
            self.staging = "copy"
            self._copy_in_background(sources)
            self.settle()
        else:
            assert collected.fence is not None, "only a fenced state is copied lazily"
            self.staging = "lazy"
            bytes_max = None if self._job.settings.arena_bytes_max is not None else _LAZY_BYTES_MAX
            self._staging = Staging(arena, bytes_max, self._explain, self._rooms)
            # Take stamps and copies first: the fence checks the stamps.
            self._snapshot_unfenced(shards, sources)
            collected.fence(self._block_training)
            self._copy_in_background(sources)

    def write(self) -> list[WrittenPack]:
        """Write the staged packs unless `stage` wrote them; return the durable packs. On the commit thread.

        Raises:
            InvalidError: A tensor changed before its lazy copy.
            CheckpointError: A pack could not be written.
        """
        if self._written is not None:
            return self._written
        try:
            self._staging.raise_failure()
            written = self._write_packs(
                lambda pack, *how: self._writer.write_staged(pack, self._staging, *how), self._on_progress
            )
            # The check records a changed tensor as the failure that `raise_failure` raises.
            self._staging.wait()
            self._check_unmodified()
            self._staging.raise_failure()
            self._require_expected(written)
        except BaseException as error:
            self.give_up(error)
            raise
        return written

    def give_up(self, error: BaseException) -> None:
        """Stop copying and writing; return the lent buffers and release a blocked training thread."""
        self._staging.give_up(error)
        self._stamps.clear()
        if self._rooms is not None:
            self._rooms.abort()
        if not self._is_copying:
            # No copy thread exists that would return the buffers.
            self._staging.end()

    def settle(self, timeout: float | None = None) -> float | None:
        """Wait, on the training thread, until the state is no longer read; return the seconds left of the timeout."""
        clock = self._job.clock
        start = clock.monotonic_seconds()
        end = math.inf if timeout is None else start + timeout
        is_late = False
        if not self._staging.wait(0.0):
            self._give_up_if_another_hangs()
        # In slices: handlers of signals run meanwhile, and a write that hangs is noticed. The event is a local one.
        while not self._staging.wait(max(min(SLICE_SECONDS, end - clock.monotonic_seconds()), 0.0)):
            if clock.monotonic_seconds() >= end:
                break
            if not is_late:
                is_late = True
                logger.warning("%s: training waits until the state is copied: copies wait for memory", self._name)
            self._give_up_if_another_hangs()
            self._give_up_if_stalled(start)
        else:
            self._check_unmodified()
        return None if timeout is None else max(end - clock.monotonic_seconds(), 0.0)

    def _give_up_if_another_hangs(self) -> None:
        """Give up this save if the commit thread hangs in an earlier save: this save would wait for that one."""
        hung = self._job.progress.hung_beside(self._name, self._job.stall_seconds)
        if hung is not None:
            limit = f"settings.stall_timeout_seconds is {self._job.stall_seconds:g}"
            text = f"{self._name}: {hung} ({limit}). Nothing was committed; look at the storage"
            self._handle.stop_waiting(UnavailableError(text))

    def _give_up_if_stalled(self, since: float) -> None:
        """Give up this save once training has waited for too long while no byte was written."""
        if self._is_stalled(since):
            self._handle.stop_waiting(self._stall_error(since))

    def _is_stalled(self, since: float) -> bool:
        return self._job.progress.idle_seconds(since) >= self._stall_seconds

    def _stall_error(self, since: float) -> UnavailableError:
        progress, is_capped = self._job.progress, self._stall_seconds > self._job.stall_seconds
        return UnavailableError(
            f"{self._name}: training waited for {progress.idle_seconds(since):,.0f} s, and no byte was written "
            f"meanwhile; expected some within {self._stall_seconds:g} s (settings.stall_timeout_seconds"
            f"{', and the time of a pack under max_bytes_per_second' if is_capped else ''}). "
            f"Nothing was committed. Look at the storage: {progress.hung or 'storage does not answer'}"
        )

    def _write_in_call(self, sources: Sequence[Source]) -> list[WrittenPack]:
        """Write the state on another thread, and wait on the training thread.

        In slices: handlers of signals run meanwhile, and a write that hangs is noticed.

        Raises:
            UnavailableError: No byte was written for too long.
            CheckpointError: A pack could not be written.
        """
        clock = self._job.clock
        start = clock.monotonic_seconds()

        def note_slice() -> None:
            if self._is_stalled(start):
                raise self._stall_error(start)

        future = DAEMON_POOL.submit(
            lambda: self._write_packs(
                lambda pack, *how: self._writer.write(pack, sources, *how), self._on_progress_in_call
            )
        )
        try:
            return wait_in_slices(future, math.inf, clock, note_slice)
        except BaseException:
            # Unless the write hangs, it ends before this rank removes its files and training changes the state.
            self._has_left_write = True
            while not future.done() and not self._is_stalled(start):
                are_done([future], SLICE_SECONDS, clock)
            raise

    def _on_progress_in_call(self, count: int) -> None:
        if self._has_left_write:
            raise UnavailableError(f"{self._name}: its call has ended before its write")
        self._on_progress(count)

    def _block_training(self) -> None:
        """Block the training thread until the state is copied. The framework calls this before the state changes."""
        start = self._job.clock.monotonic_seconds()
        self._fence_starts.append(start)
        with self._trace.phase("fence"):
            self.settle()
        seconds = self._job.clock.monotonic_seconds() - start
        if seconds > _FENCE_WARNING_SECONDS:
            logger.warning(
                "%s: blocked training for %.1f s: copies waited for memory. Raise settings.arena_bytes_max, or "
                "save less often",
                self._name,
                seconds,
            )

    @property
    def fence_seconds(self) -> float:
        """Seconds that the fence has blocked training."""
        stop = self._job.clock.monotonic_seconds() if self._copied_at is None else self._copied_at
        return sum(max(stop - start, 0.0) for start in self._fence_starts)

    def _write_packs(
        self,
        write: Callable[[PlannedPack, Callable[[int], None], Completions, KnownWeights], WrittenPack],
        on_progress: Callable[[int], None],
    ) -> list[WrittenPack]:
        written = []
        progress, limit = self._job.progress, self._stall_seconds
        with (
            self._trace.phase("write"),
            progress.writing(self._name, limit),
            self._writer.measuring_save(),
            Completions(lambda: on_progress(0), self._writer.meter) as completions,
        ):
            for pack in self._packs:
                with gc_paused_for(pack.plan.data_bytes):
                    result = write(pack, on_progress, completions, self._weights)
                written.append(result)
                if self._weights.pairs:
                    for item, digests in zip(pack.plan.items, result.digests, strict=True):
                        self._weights.record(item.tensor, item.region, digests)
        return written

    def _on_progress(self, count: int) -> None:
        """Take note of written bytes, on any thread."""
        self._job.progress.note_written()
        self._on_written()
        if self._report_bytes is not None:
            self._report_bytes(count)

    def _reach_staged(self) -> None:
        self.staged_seconds = self._trace.seconds
        self._handle.reach_staged()

    def _can_be_lazy(self, collected: Collected) -> bool:
        reason = collected.unfenced_because
        owned = [shard for _, shard in self._owned_shards(collected.shards)]
        if collected.fence is not None:
            eager_bytes = sum(local.shard.bytes for local in owned if not local.fenced)
            if eager_bytes <= _EAGER_BYTES_MAX:
                # Without a fenced shard a lazy save gains nothing. No warning: a rank may own only small tensors.
                return any(shard.fenced for shard in owned)
            reason = (
                f"{eager_bytes} bytes of it are neither parameters that an optimizer of the state steps, nor such an "
                "optimizer's state. Pass modules and optimizers themselves, not their state_dict()"
            )
        if self._job.is_first_occurrence(reason):
            logger.warning("%s: the state is copied before the call returns, not lazily: %s", self._name, reason)
        return False

    def _snapshot_unfenced(self, shards: Sequence[LocalShard], sources: list[Source]) -> None:
        """Stamp the shards that are copied lazily; copy the unfenced ones now and replace their sources."""
        for number, shard in self._owned_shards(shards):
            if shard.fenced:
                self._stamps.append((shard.shard.tensor.fqn, shard.source, shard.source.stamp()))
            else:
                sources[number] = shard.source.copied()
        if self._job.settings.verify_lazy_copy:
            self._digests_at_call = [self._writer.digests_of(pack, sources) for pack in self._packs]

    def _owned_shards(self, shards: Sequence[LocalShard]) -> Iterator[tuple[int, LocalShard]]:
        """Yield the number and shard of each shard that has bytes in the packs of this rank."""
        for number in dict.fromkeys(item.shard_number for pack in self._packs for item in pack.plan.items):
            yield number, shards[number]

    def _copy_in_background(self, sources: Sequence[Source]) -> None:
        arena = self._job.arena

        def copy() -> None:
            waited_seconds = arena.waited_seconds
            try:
                copied_bytes = sum(pack.plan.data_bytes for pack in self._packs)
                with self._trace.phase("copy"), gc_paused_for(copied_bytes):
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
        """Check once, after all copies, that no stamped tensor changed since the call; otherwise end the transfer.

        The training thread checks at the fence, where no operation of training runs. Torch increments the version of a
        tensor only after the operation, so a check elsewhere could miss a write during the last copy. If training meets
        no fence, the commit thread checks after the last pack is written.
        """
        # Both threads may check at once, without a lock: the training thread may be interrupted in here by a handler
        # that waits for the commit thread. The failure is recorded before the check counts as done.
        stamps = self._stamps
        if self._is_checked:
            return
        if self._copied_at is None:
            self._copied_at = self._job.clock.monotonic_seconds()
        unsure, changed = self._staging.unsure, _changed(stamps)
        if self._stamps is not stamps:
            return  # The other thread has checked meanwhile. Training may have changed the state since.
        if unsure is not None:
            logger.error(
                "%s: waiting for a device's copies failed, and they may go on (%s: %s). The save fails, and its "
                "buffers are not reused. Restart the process if memory runs short",
                self._name,
                type(unsure).__name__,
                unsure,
            )
            self.give_up(unsure)
        elif changed:
            self.give_up(InvalidError(_modified_message(self._name, changed)))
        # Before the moment is reached: a callback of the moment may step an optimizer, whose fence enters this check.
        self._is_checked, self._stamps = True, []
        if unsure is None and not changed:
            self._reach_staged()

    def _explain(self, error: Exception) -> Exception:
        """Return the cause of an error of a lazy copy: often training has changed or freed the memory meanwhile."""
        changed = _changed(self._stamps)
        if not changed:
            return error
        torn = InvalidError(_modified_message(self._name, changed))
        torn.__cause__ = error
        return torn

    def _require_expected(self, written: Sequence[WrittenPack]) -> None:
        """Compare digests with the digests from the call; only with `settings.verify_lazy_copy`."""
        if self._digests_at_call is None:
            return
        changed = [
            item.tensor.fqn
            for pack, expected, result in zip(self._packs, self._digests_at_call, written, strict=True)
            for item, expected_digest, digest in zip(pack.plan.items, expected, result.digests, strict=True)
            if expected_digest != digest
        ]
        if changed:
            raise InvalidError(_modified_message(self._name, changed))


def _capped_seconds(packs: Sequence[PlannedPack], writer: PackWriter, job: Job) -> float:
    """Return the time for which the cap may delay the next pack: no byte is written then, although storage answers."""
    cap = job.settings.max_bytes_per_second
    if cap is None or not writer.sends_whole_packs:
        return 0.0
    return max((pack.bytes for pack in packs), default=0) * job.comm.world_size / cap


def _changed(stamps: Sequence[tuple[str, Source, object]]) -> list[str]:
    return [fqn for fqn, source, stamp in stamps if source.stamp() != stamp]


def _modified_message(name: str, changed: Sequence[str]) -> str:
    return (
        f"{name}: {first_three(changed)} changed while being copied lazily; expected no change before the next "
        "optimizer step or load_state_dict. Nothing was committed. Change tensors only after handle.wait('staged'), "
        "leave these out with skip=, or save with settings.staging='copy'"
    )
