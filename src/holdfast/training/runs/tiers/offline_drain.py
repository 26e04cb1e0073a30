"""Drains a near tier without a training job: after the last job of a run, or to give a lost root back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from holdfast.base.clock import Clock
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.step_name import StepName
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.stored.copying.step_drain import StepDrain
from holdfast.stored.leases.writer import hold_writer_lease
from holdfast.stored.publishing.outcome import OutcomeKind
from holdfast.stored.repository.catalog import ensure_run, read_run_id
from holdfast.stored.repository.latest import name_latest
from holdfast.stored.repository.near_tier import empty_near
from holdfast.stored.repository.tags import TAGS_FOLDER, read_tags
from holdfast.stored.repository.timeline_records import TIMELINES_FOLDER
from holdfast.stored.repository.timelines import StoredManifest, run_timelines
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.loading.named_step import find_named
from holdfast.training.runs.tiers.agent_files import has_other_job
from holdfast.training.runs.tiers.drain_facts import undrained


@dataclass(slots=True)
class DrainReport:
    """What a drain copied, or would copy."""

    near: str
    """The near tier."""

    url: str
    """The root."""

    steps: tuple[int, ...] = ()
    """Steps that the root got."""

    left: tuple[int, ...] = ()
    """Steps that only the near tier has: they were saved for the near tier alone."""

    files: int = 0
    """Files that were copied."""

    bytes: int = 0
    """Their bytes."""

    removed: bool = False
    """Whether the near tier was emptied."""


@dataclass(frozen=True, slots=True)
class NearDrain:
    """A request to drain a near tier."""

    run: TwoRoots
    """The near tier and the root."""

    clock: Clock
    """Measures leases."""

    codecs: Codecs
    """Decodes coded chunks, which are proven by their raw bytes."""

    step: StepName | None = None
    """The step; None for those that are due at the root, and the newest one."""

    observer: Observer | None = None
    """Receives the progress of each step."""

    def planned(self) -> DrainReport:
        """Return what would be drained; changes nothing. Errors as `execute`."""
        self.require_run()
        report, chosen = self._chosen([])
        for manifest in chosen:
            lacking = self._drain_of(manifest).lacking()
            report.files += len(lacking)
            report.bytes += sum(file.record.bytes for file in lacking)
        return report

    def execute(self, lease_seconds: float, *, remove: bool) -> DrainReport:
        """Drain. After an interruption the same call goes on.

        Args:
            lease_seconds: Longest time without a heartbeat of the writer lease, which the drain holds.
            remove: Whether to empty the near tier at the end.
        Raises:
            MissingError: The folder is no near tier, or has no such step.
            InvalidError: Near tier and root are of different runs.
            ConflictError: A job writes to the run; or the root has another manifest of a step.
            CorruptError: A step is damaged near; all others are drained, and nothing is removed.
            UnavailableError: Storage failed.
        """
        run_id, clock = self.require_run(), self.clock
        if remove and has_other_job(self.run.near):
            raise ConflictError(
                f"{self.run.near.url}: a job has the near tier open; expected none. Nothing was touched. End the "
                "job, then empty the near tier"
            )
        if read_run_id(self.run.root) is None:
            for entry in [*self.run.near.list(TAGS_FOLDER), *self.run.near.list(TIMELINES_FOLDER)]:
                self.run.root.put(entry.key, self.run.near.get(entry.key, entry.bytes))
        ensure_run(self.run.root, run_id, f"{clock.unix_seconds():.0f}")
        with hold_writer_lease(self.run, clock, lease_seconds, run_id) as lease:
            damages: list[CorruptError] = []
            report, chosen = self._chosen(damages)
            for manifest in chosen:
                try:
                    self._drain(manifest, lease.epoch, report)
                except CorruptError as error:
                    damages.append(error)
            name_latest(self.run.root, None)
            if damages:
                raise damages[0]
            if remove:
                lease.require(self.run.root)
                empty_near(self.run)
                report.removed = True
        return report

    def _drain(self, manifest: Manifest, epoch: int, report: DrainReport) -> None:
        drain = self._drain_of(manifest)
        copied = drain.copy(drain.lacking())
        report.files, report.bytes = report.files + copied.files, report.bytes + copied.bytes
        outcome = drain.publish(epoch)
        if outcome.kind is not OutcomeKind.COMMITTED:
            raise outcome.error or undrained(manifest.step, outcome.reason)

    def require_run(self) -> str:
        """Return the id of the run in both places.

        Raises:
            MissingError: The folder is no near tier.
            InvalidError: Near tier and root are of different runs.
            CheckpointError: A place does not answer.
        """
        near, root = self.run.near, self.run.root
        at_near, at_root = read_run_id(near), read_run_id(root)
        if at_near is None:
            raise MissingError(f"{near.url}: no near tier of a run; expected a folder that holds holdfast.json")
        if at_root not in (None, at_near):
            raise InvalidError(
                f"{near.url}: is of run {at_near}, and {root.url} holds run {at_root}; expected one run. Nothing was "
                "touched. Name the root of this run with --to"
            )
        return at_near

    def root_error(self) -> str:
        """Return why the root cannot be read: this process may lack the credentials of the job. Empty if it can be.

        Raises:
            InvalidError: The root is of another run.
        """
        if error := self._reading_error():
            return error
        try:
            with suppress(UnavailableError, MissingError):  # Of peers, the agent is there before the first save.
                self.require_run()
        except InvalidError:
            # The root may have gone between the two reads.
            if error := self._reading_error():
                return error
            raise
        return ""

    def _reading_error(self) -> str:
        try:
            read_run_id(self.run.root)
        except CheckpointError as error:
            return str(error)
        return ""

    def _chosen(self, damages: list[CorruptError]) -> tuple[DrainReport, list[Manifest]]:
        """Return the steps that are drained, and an almost empty report.

        Args:
            damages: Receives the errors of steps that cannot be drained.
        """
        report, run = DrainReport(self.run.near.url, self.run.root.url), self.run
        if self.step is not None:
            manifest = self._lacking_at_root(find_named(run, self.step)[1], damages)
            chosen = [] if manifest is None else [manifest]
        else:
            tags, chain = read_tags(run), run_timelines(run).chain
            found = {each: self._lacking_at_root(each, damages) for each in chain}
            near = [manifest for manifest in found.values() if manifest is not None]
            # A manifest that cannot be read may be the last of the chain, and a restart passes it over.
            newest = next((each.digest for each in reversed(chain) if each.timeline is not None), None)
            chosen = [
                each
                for each in near
                if not each.near_only or each.digest == newest or tags.of(each.step or 0, each.digest)
            ]
            report.left = tuple(each.step or 0 for each in near if each not in chosen)
        report.steps = tuple(each.step or 0 for each in chosen)
        return report, chosen

    def _lacking_at_root(self, stored: StoredManifest, damages: list[CorruptError]) -> Manifest | None:
        """Return the manifest of a step that the near tier alone has; None if the root has it too, or on damage."""
        try:
            data = self.run.get(stored.key, MANIFEST_BYTES_MAX)
            if [number for number, _ in self.run.holding(stored.key, data)] == [0]:
                return decode_manifest(data, f"{self.run.near.url}/{stored.key}")
        except CorruptError as error:
            damages.append(error)
        return None

    def _drain_of(self, manifest: Manifest) -> StepDrain:
        root: Store = self.run.root.for_operation(f"drain of step {manifest.step}", 0, 1)
        return StepDrain(self.run.near, root, manifest, self.clock, self.codecs, self.observer)
