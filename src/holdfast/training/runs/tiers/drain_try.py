"""One try to drain a step, on one rank: the copies of its share, the wait for the other ranks, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from holdfast.base.types.events import Event, Progress
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.reports import StepDrainReport
from holdfast.core.format.names import step_folder
from holdfast.core.plan.drain import share_of
from holdfast.stored.copying.copied_files import CopiedFile
from holdfast.stored.copying.step_drain import StepDrain
from holdfast.stored.publishing.outcome import Outcome
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.job import Job
from holdfast.training.telemetry.dispatcher import EventDispatcher
from holdfast.training.telemetry.operation import OperationTrace

POLL_SECONDS = 0.2
"""How often rank 0 looks for the files of other ranks."""

_SILENT_SECONDS = 30.0
"""After this time without a new file, rank 0 copies the share of the others."""


class DrainTry:
    """One try. The drain's thread calls; any thread may cancel."""

    def __init__(self, job: Job, run: TwoRoots, manifest: Manifest, dispatcher: EventDispatcher) -> None:
        """Begin the operation that observers see; copy nothing yet.

        Args:
            job: The ranks.
            run: Both places.
            manifest: The manifest of the step in the near tier.
            dispatcher: Passes events to observers.
        """
        assert manifest.step is not None, "a manifest of a run has a step"
        self._job, self._root, self._manifest, self._dispatcher = job, run.root, manifest, dispatcher
        self._folder = step_folder(manifest.step)
        url = f"{run.root.url}/{self._folder}".rstrip("/")
        self._trace = OperationTrace("drain", manifest.step, url, job.comm, job.clock, dispatcher, run.root)
        self._trace.begin(manifest.step, url)
        root = run.root.for_operation(self._trace.operation.name, job.comm.rank, job.comm.world_size)
        self._drain = StepDrain(run.near, root, manifest, job.clock, job.codecs, self)
        self.cancel = self._drain.cancel
        self.bytes = 0
        """Bytes that this rank has copied."""
        self._files = 0
        self.has_failed = False
        """Whether the try has failed, so that another one is due."""

    def on_event(self, event: Event) -> None:
        """Pass the progress of the copies on, as that of the drain."""
        if isinstance(event, Progress):
            self._dispatcher.dispatch(replace(event, operation=self._trace.operation))

    def copy_share(self) -> None:
        """Copy the share of this rank."""
        comm = self._job.comm
        with self._trace.phase("send"):
            files = ((file.key, file.record.bytes) for file in self._drain.files)
            share = share_of(files, comm.world_size, comm.rank)
            self._copy(file for file in self._drain.lacking() if file.key in share)

    def copy_rest(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until the other ranks have copied their shares; copy a share that no rank copies."""
        clock, seen = self._job.clock, -1
        since = clock.monotonic_seconds()
        with self._trace.phase("wait"):
            while (rest := self._drain.lacking()) and not is_stopped():
                now = clock.monotonic_seconds()
                if len(rest) != seen:
                    seen, since = len(rest), now
                if self._job.comm.world_size == 1 or now - since > _SILENT_SECONDS:
                    self._copy(rest)
                else:
                    clock.sleep(POLL_SECONDS)

    def publish(self, epoch: int) -> Outcome:
        """Publish the manifest in the root, on rank 0; as `StepDrain.publish`."""
        with self._trace.phase("publish"):
            return self._drain.publish(epoch)

    def _copy(self, files: Iterable[CopiedFile]) -> None:
        copied = self._drain.copy(files)
        self.bytes += copied.bytes
        self._files += len(copied.keys)

    def end(self, error: Exception | None) -> None:
        """Tell observers how the try ended; the report of a drained step goes into the root."""
        if error is not None:
            self.has_failed = True
            self._trace.fail(error)
            return
        counts = self._trace.retry_counts
        report = StepDrainReport(self.bytes, self._files, counts.retries, counts.seconds, counts.throttled)
        store = self._root if self._job.settings.reports else None
        self._trace.end(report, self._manifest.attempt, store, self._folder, self._job.node_reports)
