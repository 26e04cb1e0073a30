"""Copies one checkpoint, or one step of a run, to a folder of its own: it needs no run around it there."""

from __future__ import annotations

from holdfast.base.clock import Clock
from holdfast.base.ports.codec import NO_CODECS, Codecs
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.packs import Stored
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.names import MANIFEST_FILE, is_file_url
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.offline.copying.copy_run import CopyReport
from holdfast.offline.copying.destination import CopyDestination
from holdfast.stored.checkpoint.location import CheckpointLocation, manifest_bytes_at, manifest_in_place_of
from holdfast.stored.copying.copied_files import CopiedFile, key_alone
from holdfast.stored.copying.file_copies import FileCopies
from holdfast.stored.copying.proof import shown_damages
from holdfast.stored.repository.publish import get_or_none, publish
from holdfast.stored.repository.reports import REPORTS_FOLDER


class CheckpointCopy:
    """Copies one checkpoint."""

    def __init__(
        self,
        location: CheckpointLocation,
        destination: Store,
        clock: Clock,
        observer: Observer | None = None,
        *,
        codecs: Codecs = NO_CODECS,
    ) -> None:
        """Read nothing yet.

        Args:
            location: The checkpoint, of Holdfast.
            destination: A new folder, or one of an unfinished copy of this checkpoint.
            clock: Gives random names.
            observer: Receives progress.
            codecs: What decodes coded chunks.
        """
        self._location, self._observer = location, observer
        self._destination = CopyDestination(destination, clock)
        self._files = FileCopies(location.store, destination, clock, codecs, lambda _: location)

    def run(self) -> CopyReport:
        """Copy the checkpoint.

        Raises:
            MissingError: There is none.
            ConflictError: The destination holds something else, or a complete copy.
            CorruptError: It is damaged. The same call continues once it is repaired.
            UnavailableError: Storage failed; the same call continues.
        """
        location, destination = self._location, self._destination.store
        data = _manifest_of(location)
        manifest = decode_manifest(data, location.manifest_url)
        there = get_or_none(destination, MANIFEST_FILE, MANIFEST_BYTES_MAX)
        what = f"checkpoint {manifest.digest}"
        self._destination.claim(what, None if there is None else what if there == data else "another checkpoint")
        report = CopyReport(destination.url, steps=1)
        if there is None:
            files = self._needed(manifest)
            # Each pack is stored in the folder of its own step, or as a file under the name of a link.
            copied = self._files.run(files, self._destination.there, False, self._observer)
            report.take(copied)
            damages = [damage for found in copied.damages.values() for damage in found]
            if damages:
                if manifest_in_place_of(manifest, location) is not None:
                    raise ConflictError(
                        f"{location.url}: was overwritten while it was copied; expected the same one to the end. Empty "
                        f"{destination.url}, and copy again"
                    )
                raise CorruptError(
                    f"{location.url}: {shown_damages(damages)}. Nothing of it counts as copied: {destination.url} has "
                    f"no manifest. Repair it (holdfast repair {location.url}) and copy again, which continues"
                )
            for entry in list(location.store.list(location.folder + REPORTS_FOLDER)):
                content = get_or_none(location.store, entry.key, MANIFEST_BYTES_MAX)
                if content is not None:
                    self._destination.put(entry.key.removeprefix(location.folder), content)
            publish(destination, MANIFEST_FILE, data)
        self._destination.end()
        return report

    def _needed(self, manifest: Manifest) -> list[CopiedFile]:
        """Return the files that the manifest names. Files of another system stay where they are."""
        location = self._location
        packs = location.packs_of(manifest)

        def copied(record: FileRecord, stored: Stored, *, is_pack: bool) -> CopiedFile:
            key = key_alone(manifest, record.name)
            return CopiedFile(key, record, [(manifest, record)], is_pack, [stored])

        attempt_folder = f"{location.folder}{manifest.attempt}/"
        others = (*manifest.parts, *manifest.index_files)
        return [
            *(copied(pack, packs(pack.name), is_pack=True) for pack in manifest.packs if not is_file_url(pack.name)),
            *(copied(file, Stored(location.store, attempt_folder + file.name), is_pack=False) for file in others),
        ]


def _manifest_of(location: CheckpointLocation) -> bytes:
    """Return the stored manifest.

    Raises:
        InvalidError: Another system wrote the checkpoint.
    """
    try:
        return manifest_bytes_at(location)
    except (MissingError, InvalidError) as missing:
        if location.foreign is not None and location.foreign.listing() is not None:
            raise InvalidError(
                f"{location.url}: another system wrote it; expected a checkpoint of Holdfast. Copy its files, or make "
                "it one: holdfast export --to holdfast"
            ) from missing
        raise
