"""The bytes of one save on their way from the state into packs: before the call returns, behind it, or lazily."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from holdfast.engine.staging import Staging
from holdfast.engine.write import PackWriter, WrittenPack
from holdfast.errors import InvalidError
from holdfast.manager.collector import collector_paused_for
from holdfast.manager.handle import Staged
from holdfast.manager.job import Job
from holdfast.ports.framework import Collected, Fence, LocalShard, Source
from holdfast.settings import MIB
from holdfast.spec.plan import PlannedPack

logger = logging.getLogger(__name__)

_EAGER_BYTES_MAX = 64 * MIB
"""What a lazy save copies at the call at most. Such copies are made into fresh memory, outside the arena's budget: a
state with more than this of buffers is copied into the arena as a whole."""

_FENCE_SECONDS_NOTED = 1.0


class Transfer:
    """What one rank writes in one save, taken from the state once and written once."""

    def __init__(
        self, job: Job, name: str, writer: PackWriter, packs: Sequence[PlannedPack], on_staged: Callable[[], None]
    ) -> None:
        """Begin nothing yet.

        Args:
            job: Whose arena and threads are used.
            name: What is being saved, for messages.
            writer: Writes the packs.
            packs: What is written.
            on_staged: Called once training may change the state as it likes, on whatever thread.
        """
        self._job, self._name, self._writer, self._packs, self._on_staged = job, name, writer, packs, on_staged
        self.staging: Staged = "none"
        """How the state was taken."""
        self.fence_seconds = 0.0
        """How long the fence has held training up."""
        self.waited_seconds = 0.0
        """How long copies have waited for slabs."""
        self._windows = Staging(job.arena)
        self._written: list[WrittenPack] | None = None
        self._stamped: list[tuple[str, Source, object]] = []
        self._expected: list[tuple[bytes, ...]] | None = None

    def begin(self, collected: Collected, *, awaited: bool) -> None:
        """Take the state, or begin to; return once training may go on.

        Args:
            collected: The state.
            awaited: Whether the caller waits for the commit anyhow.
        """
        arena, settings = self._job.arena, self._job.settings
        shards = collected.shards
        fence = collected.fence if settings.staging == "lazy" else None
        if fence is not None and self._eager_bytes(shards) > _EAGER_BYTES_MAX:
            fence = None
        slabs = sum(-(-pack.bytes // arena.slab_bytes) for pack in self._packs)
        if awaited or not arena.holds(slabs if fence is None else 1):
            self._write([each.source for each in shards])
        elif fence is None:
            self.staging = "copy"
            self._copy_in_background([each.source for each in shards], lambda: None)
            self._windows.wait()
        else:
            self.staging = "lazy"
            self._copy_lazily(shards, fence)

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
            for pack in self._packs:
                with collector_paused_for(pack.plan.data_bytes, self._job.settings):
                    written.append(self._writer.write_staged(pack, self._windows))
            self._windows.wait()
            self._windows.raise_failure()
            self._require_expected(written)
        except BaseException as error:
            self.give_up(error)
            raise
        return written

    def give_up(self, error: BaseException) -> None:
        """Copy and write nothing more; what is lent goes back."""
        self._windows.give_up(error)

    def _write(self, sources: Sequence[Source]) -> None:
        self._written = []
        for pack in self._packs:
            with collector_paused_for(pack.plan.data_bytes, self._job.settings):
                self._written.append(self._writer.write(pack, sources))
        self._on_staged()

    def _copy_lazily(self, shards: Sequence[LocalShard], fence: Fence) -> None:
        sources = [each.source for each in shards]
        for pack in self._packs:
            for item in pack.plan.items:
                shard = shards[item.shard_number]
                if shard.fenced:
                    self._stamped.append((item.tensor.fqn, shard.source, shard.source.stamp()))
                else:
                    sources[item.shard_number] = shard.source.copied()
        if self._job.settings.lazy_verify:
            self._expected = [self._writer.digests_of(pack, sources) for pack in self._packs]
        release = fence(self._settle)
        try:
            self._copy_in_background(sources, release)
        except BaseException:
            release()
            raise

    def _copy_in_background(self, sources: Sequence[Source], release: Callable[[], None]) -> None:
        arena, settings = self._job.arena, self._job.settings
        waited_seconds = arena.waited_seconds

        def on_copied() -> None:
            self._require_unchanged()
            self._on_staged()

        def copy() -> None:
            try:
                with collector_paused_for(sum(pack.plan.data_bytes for pack in self._packs), settings):
                    self._windows.copy(self._packs, sources, settings.chunk_bytes, on_copied)
            finally:
                self.waited_seconds = arena.waited_seconds - waited_seconds
                self._stamped.clear()
                release()

        self._job.copy_in_background(copy)

    def _settle(self) -> None:
        """Hold training up until nothing more is read from the state."""
        clock = self._job.clock
        start = clock.monotonic_seconds()
        self._windows.wait()
        seconds = clock.monotonic_seconds() - start
        self.fence_seconds += seconds
        if seconds > _FENCE_SECONDS_NOTED:
            logger.warning(
                "%s: held training up for %.1f s: copies had to wait for memory. Raise settings.arena_bytes_max, or "
                "save less often than storage takes it",
                self._name,
                seconds,
            )

    def _eager_bytes(self, shards: Sequence[LocalShard]) -> int:
        items = (item for pack in self._packs for item in pack.plan.items)
        return sum(item.bytes for item in items if not shards[item.shard_number].fenced)

    def _require_unchanged(self) -> None:
        changed = [fqn for fqn, source, stamp in self._stamped if source.stamp() != stamp]
        if changed:
            raise InvalidError(_said_to_have_changed(self._name, changed))

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
            raise InvalidError(_said_to_have_changed(self._name, changed))


def _said_to_have_changed(name: str, changed: Sequence[str]) -> str:
    more = f" and {len(changed) - 10} more" if len(changed) > 10 else ""
    return (
        f"{name}: {', '.join(changed[:10])}{more} changed while being taken lazily; expected no change before the next "
        "optimizer step or load_state_dict. Nothing was committed. Change tensors after handle.wait('staged') only, "
        "leave these out with skip=, or save with settings.staging='copy'"
    )
