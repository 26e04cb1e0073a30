"""Drains one step: copies the files from the near tier to the root, each proven on the way, and the manifest last.

A drain that dies leaves files without a manifest. The next drain of the step copies the rest, and there is no journal.
Several processes may drain one step at once: all store the same bytes under the same names. Files under way to a root
of files are in `copying/`; whoever publishes the step removes those that killed drains left there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.packs import Stored
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, run_fields_of_manifest
from holdfast.core.format.names import COPY_CLAIM_FILE, COPYING_FOLDER, step_folder
from holdfast.errors import CheckpointError, ConflictError, CorruptError, UnavailableError, first_three
from holdfast.stored.checkpoint.location import CheckpointLocation, manifest_bytes_at
from holdfast.stored.checkpoint.pack_sizes import sizes_of
from holdfast.stored.copying.copied_files import CopiedFile, CopiedManifest, files_of_run
from holdfast.stored.copying.file_copies import Copied, FileCopies, location_in_run
from holdfast.stored.copying.proof import shown_damages
from holdfast.stored.publishing.making_room import has_made_room, require_not_moved
from holdfast.stored.publishing.manifest import publish_manifest
from holdfast.stored.publishing.outcome import Outcome, OutcomeKind
from holdfast.stored.repository.epochs import current_fence, declare_timelines
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.quarantine import identity_of, list_records, quarantine
from holdfast.stored.repository.reports import REPORTS_FOLDER
from holdfast.stored.repository.timelines import run_timelines

logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 2
"""Files that a drain sends at once: training goes on meanwhile."""


class StepDrain:
    """Drains one step. One thread calls; any thread may cancel."""

    def __init__(
        self,
        near: Store,
        root: Store,
        manifest: Manifest,
        clock: Clock,
        codecs: Codecs,
        observer: Observer | None = None,
    ) -> None:
        """Do no I/O.

        Args:
            near: The near tier.
            root: The root, best as `root.for_operation(f"drain of step {step}", rank, world_size)` returns it: the
                retries of the drain then share one deadline, and the cap of `Settings.max_bytes_per_second` is divided
                among the ranks.
            manifest: The manifest of the step in the near tier.
            clock: Gives random names.
            codecs: Decode coded chunks, which are proven by raw bytes.
            observer: Receives the progress of `copy`.
        """
        assert manifest.step is not None, "a manifest of a run has a step"
        self._near, self._root, self._manifest, self._step = near, root, manifest, manifest.step
        self._clock, self._codecs, self._observer = clock, codecs, observer
        self._folder = step_folder(self._step)
        self._copies: FileCopies | None = None
        self._is_cancelled = False
        needed = files_of_run(near, [CopiedManifest(self._folder, b"", manifest)]).values()
        self.files = sorted(needed, key=lambda file: file.key.startswith(self._folder))
        """The files that the step needs: first packs of other steps, then packs, parts and indexes of this one."""

    def lacking(self) -> list[CopiedFile]:
        """Return the files that the root lacks or has in another size, in the order of `files`.

        A root that answers in pages lists the folders of the attempts; of another root the sizes are read one by one.

        Raises:
            UnavailableError: The root failed.
        """
        sizes = self._sizes(self.files)
        return [file for file in self.files if sizes[file.key] != file.record.bytes]

    def _sizes(self, files: Iterable[CopiedFile]) -> dict[str, int]:
        return sizes_of([file.key for file in files], partial(Stored, self._root))

    def copy(self, files: Iterable[CopiedFile]) -> Copied:
        """Copy some of the files, each proven by a digest; files that the root has in full size stay.

        The same call after a failure copies the rest.

        Args:
            files: Files of `files`.
        Raises:
            CorruptError: A file is damaged in the near tier, and the root has none in full size; all others are copied.
            UnavailableError: A store failed, or the drain was cancelled.
        """
        chosen = list(files)
        # No folder of the step: on a file system each would stay, empty.
        unfinished = f"{COPYING_FOLDER}{self._folder.rstrip('/')}-"
        copies = self._copies = FileCopies(
            self._near,
            self._root,
            self._clock,
            self._codecs,
            partial(location_in_run, self._near),
            files_at_once=_FILES_AT_ONCE,
            unfinished=unfinished,
        )
        if self._is_cancelled:
            copies.cancel()
        there = {key: size for key, size in self._sizes(chosen).items() if size}
        copied = copies.run(chosen, there, False, self._observer)
        damages = [damage for found in copied.damages.values() for damage in found]
        if damages:
            raise CorruptError(
                f"{self._near.url}: step {self._step} is damaged: {shown_damages(damages)}. The damaged files were not "
                f"copied to {self._root.url}, which gets no step {self._step}. Drain another step, or repair this one "
                f"(holdfast repair {self._near.url}) and drain again"
            )
        if len(copied.keys) < len(chosen):
            raise UnavailableError(f"{self._root.url}: the drain of step {self._step} was ended. Drain the step again")
        return copied

    def cancel(self) -> None:
        """Let `copy` end soon, now and later: requests under way are finished, and no further one is begun."""
        self._is_cancelled = True
        if self._copies is not None:
            self._copies.cancel()

    def publish(self, epoch: int) -> Outcome:
        """Publish the manifest in the root once all files are there, on one rank; then copy the reports of the step.

        Args:
            epoch: Epoch of the writer lease at the root.
        Returns:
            As `publish_manifest`. A manifest that the root has already is committed.
        Raises:
            MissingError: The near tier has the step no more, or the manifest does not count there.
            CorruptError: The manifest in the near tier was damaged since it was read; nothing was published.
            ConflictError: Another manifest of the step counts in the root, this one does not, or another writer took
                over; nothing was published.
            UnavailableError: The root lacks files of the step, or a store failed; nothing was published.
        """
        near, root, manifest = self._near, self._root, self._manifest
        source = CheckpointLocation(near, self._folder, self._step, root=near, digest=manifest.digest)
        data = manifest_bytes_at(source)
        if _is_damaged(data):
            raise CorruptError(
                f"{source.manifest_url}: the manifest of step {self._step} is damaged; expected the one that was read "
                f"before the files were copied. {root.url} gets no step {self._step}. Repair the step (holdfast repair "
                f"{near.url}), and drain again"
            )
        lacking = self.lacking()
        if lacking:
            raise UnavailableError(
                f"{root.url}: lacks {len(lacking)} of the {len(self.files)} files of step {self._step} "
                f"({first_three(file.key for file in lacking)}); expected all. Copy these, then publish"
            )
        # A drain that was killed may have left names that a power cut removes.
        for folder in {file.key.rpartition("/")[0] for file in self.files}:
            root.sync(f"{folder}/")
        location = CheckpointLocation(root, self._folder, self._step, root=root)
        self._make_room(location, data, epoch)
        outcome = publish_manifest(location, data, epoch)
        if outcome.kind is OutcomeKind.COMMITTED:
            try:
                self._copy_reports()
                self._remove_unfinished()
            except CheckpointError as error:
                logger.warning(
                    "drain of step %d: committed, but reports of the step are missing: %s", self._step, error
                )
        return outcome

    def _make_room(self, location: CheckpointLocation, data: bytes, epoch: int) -> None:
        """Move away from the step a manifest that does not count, or that a newer timeline superseded.

        Raises:
            ConflictError: The manifest there stays, or that of the near tier does not count in the root.
        """
        root, manifest = self._root, self._manifest
        if not current_fence(root).admits(self._step, manifest.epoch, manifest.digest):
            raise ConflictError(
                f"{location.url}: manifest {manifest.digest} in {self._near.url} is of epoch {manifest.epoch}, which "
                "is over, and the list of the newer epoch lacks the step; expected one that counts. Drain another step"
            )
        found = get_or_none(root, location.manifest_key, MANIFEST_BYTES_MAX)
        if found == data:
            return
        timelines = [manifest.timeline] if found is None else [manifest.timeline, run_timelines(root).newest]
        timeline = max(timelines, key=lambda each: each.number)
        if timeline.number > 1:
            declare_timelines(root, epoch, timeline)
        require_not_moved(location, timeline)
        if found is not None and _is_damaged(found):
            why = f"damaged, and replaced by the one in {self._near.url}"
            quarantine(root, self._step, location.manifest_key, identity_of(found), why, utc_now_text(self._clock))
        if found is not None and not has_made_room(location, timeline, epoch, list_records(root)):
            location.require_empty(f"Two manifests of step {self._step} count: remove one of them (holdfast rm)")

    def _copy_reports(self) -> None:
        for entry in list(self._near.list(self._folder + REPORTS_FOLDER)):
            content = get_or_none(self._near, entry.key, MANIFEST_BYTES_MAX)
            if content is not None:
                self._root.put(entry.key, content, durable=False)

    def _remove_unfinished(self) -> None:
        """Remove unfinished files of this step and of older ones: steps are drained in order."""
        entries = self._root.list(COPYING_FOLDER, after=COPY_CLAIM_FILE)
        unfinished = [entry.key for entry in entries]
        newest = self._folder.rstrip("/")
        of_older = [key for key in unfinished if key.removeprefix(COPYING_FOLDER)[: len(newest)] <= newest]
        if of_older:
            self._root.delete(of_older)


def _is_damaged(data: bytes) -> bool:
    try:
        run_fields_of_manifest(data, "")
    except CorruptError:
        return True
    return False
