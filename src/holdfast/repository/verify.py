"""Verification: reads a checkpoint back, byte for byte, and lists its damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import CheckpointError, CorruptError, MissingError
from holdfast.format.digest import digest_of
from holdfast.format.index.index import Index
from holdfast.format.index.index_checks import index_from, overview_from
from holdfast.format.names import MANIFEST_FILE, is_file_url, is_pack_name, rank_of_part
from holdfast.format.pack import HEADER_BYTES_MAX, entries_of, header_entry, pack_digest
from holdfast.format.part import decode_part, require_part_of
from holdfast.geometry.chunking import DIGEST_BYTES
from holdfast.ports.observer import Observer
from holdfast.ports.store import Packs, Store, Stored
from holdfast.repository.catalog import check_pack, read_file
from holdfast.types.events import Progress
from holdfast.types.manifest import FileRecord, Manifest
from holdfast.types.plan import OPAQUE_FOLDER, Piece


class Verification:
    """Reads every byte of one checkpoint."""

    def __init__(
        self,
        store: Store,
        folder: str,
        manifest: Manifest,
        packs: Packs,
        buffer: memoryview,
        require_covered: Callable[[Index], None],
        observer: Observer | None = None,
    ) -> None:
        """Prepare; `damages` does the work.

        Args:
            store: The store of the checkpoint.
            folder: Its folder in the store.
            manifest: Its manifest.
            packs: Returns store and key of a pack.
            buffer: Room for two chunks and two pages.
            require_covered: Raises `CorruptError` if the pieces of an index do not cover every tensor exactly once.
            observer: Receives progress.
        """
        self._require_covered = require_covered
        self._store, self._folder, self._manifest, self._packs = store, folder, manifest, packs
        self._buffer, self._observer = buffer, observer
        self._elsewhere = {pack.name for pack in manifest.packs if not is_pack_name(pack.name)}
        self._files = (*manifest.packs, *manifest.parts, *manifest.indexes)
        if manifest.overview is not None:
            self._files += (manifest.overview,)
        self._total = sum(file.bytes for file in self._files)
        self._done = 0

    @property
    def total_bytes(self) -> int:
        """Bytes to read. Once the index is read, a file elsewhere counts with the bytes of its pieces only."""
        return self._total

    @property
    def sampled(self) -> bool:
        """Whether some data was checked by samples only: never here."""
        return False

    @property
    def notes(self) -> Sequence[str]:
        """Remarks on parts that were not checked: none here."""
        return ()

    def damages(self) -> Iterator[Damage]:
        """Yield everything that is damaged, missing or surplus.

        Raises:
            InvalidError: The checkpoint references a file that may not be read.
        """
        manifest = self._manifest
        for pack in manifest.packs:
            self._packs(pack.name)  # Raises for a file that the caller did not allow, before any work.
        for part in manifest.parts:
            try:
                data = read_file(self._store, self._folder, manifest.attempt, part)
                require_part_of(decode_part(data, part.name), rank_of_part(part.name), manifest.attempt, part.name)
            except CheckpointError as error:
                yield self._of_file(part.name, error)
            self._advance(part.bytes)
        files = []
        overviews = () if manifest.overview is None else (manifest.overview,)
        for record in (*manifest.indexes, *overviews):
            try:
                files.append(read_file(self._store, self._folder, manifest.attempt, record))
            except CheckpointError as error:
                yield self._of_file(record.name, error)
            self._advance(record.bytes)
        if len(files) < len(manifest.indexes) + len(overviews):
            return
        where = f"{self._store.url}/{self._folder}"
        try:
            overview = overview_from(manifest, files.pop(), where) if overviews else None
            index = index_from(manifest, files, where, overview)
            self._require_covered(index)
        except CheckpointError as error:
            # Every index file has the digest of the manifest, so the two contradict each other.
            yield Damage(MANIFEST_FILE, None, None, None, str(error))
            return
        # Only the pieces of a file elsewhere are read: the rest belongs to another step or system.
        self._total += sum(
            index.bytes_by_pack.get(pack.name, 0) - pack.bytes
            for pack in manifest.packs
            if pack.name in self._elsewhere
        )
        for pack in manifest.packs:
            damages = self._damages_elsewhere if pack.name in self._elsewhere else self._damages_of_pack
            yield from damages(pack, index.pieces_in(pack.name), self._packs(pack.name))
        yield from self._surplus()

    def _damages_of_pack(self, pack: FileRecord, pieces: Sequence[Piece], stored: Stored) -> Iterator[Damage]:
        try:
            check_pack(stored, pack, self._manifest.step)
        except CheckpointError as error:
            yield self._of_file(pack.name, error)
            self._advance(pack.bytes)
            return
        yield from self._damages_of_layout(pack, pieces)
        whole = True
        for piece in pieces:
            for damage in self._damages_of_piece(stored, piece):
                whole = False
                yield damage
        if whole:
            yield from self._damages_of_header(stored, pack, pieces)

    def _damages_elsewhere(self, file: FileRecord, pieces: Sequence[Piece], stored: Stored) -> Iterator[Damage]:
        """Check a pack of another step, or a referenced file: its size, and the chunks of our pieces."""
        try:
            check_pack(stored, file, self._manifest.step)
        except CheckpointError as error:
            yield self._of_file(file.name, error)
            self._advance(sum(piece.bytes for piece in pieces))
            return
        for piece in pieces:
            yield from self._damages_of_piece(stored, piece)
        if not is_file_url(file.name):
            return
        digest = pack_digest(b"", b"".join(piece.digests for piece in pieces))
        if digest != file.digest:
            message = f"the chunk digests of the index hash to {digest}; expected {file.digest}, as the manifest says"
            yield self._damage(file.name, None, None, None, message)

    def _damages_of_layout(self, pack: FileRecord, pieces: Sequence[Piece]) -> Iterator[Damage]:
        """Yield gaps and overlaps between the pieces of a pack."""
        end = min((piece.offset for piece in pieces), default=pack.bytes)
        for piece in pieces:
            if piece.offset != end:
                yield self._damage(pack.name, end, piece.offset, piece.tensor.fqn, "the index leaves a gap or overlaps")
            end = piece.offset + piece.bytes
        if end != pack.bytes:
            yield self._damage(pack.name, end, pack.bytes, None, "bytes that belong to no piece of the index")

    def _damages_of_piece(self, stored: Stored, piece: Piece) -> Iterator[Damage]:
        for chunk in range(len(piece.digests) // DIGEST_BYTES):
            start = piece.offset + chunk * piece.chunk_bytes
            stop = min(start + piece.chunk_bytes, piece.offset + piece.bytes)
            expected = piece.digests[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)]
            try:
                (data,) = stored.files.get_ranges(stored.key, [(start, stop)], [self._buffer])
            except CheckpointError as error:
                yield self._damage(piece.pack, start, stop, piece.tensor.fqn, str(error))
            else:
                digest = digest_of(data)
                if digest != expected:
                    message = f"chunk hashes to {digest.hex()}; expected {expected.hex()}"
                    yield self._damage(piece.pack, start, stop, piece.tensor.fqn, message)
            self._advance(stop - start)

    def _damages_of_header(self, stored: Stored, pack: FileRecord, pieces: Sequence[Piece]) -> Iterator[Damage]:
        """Yield damage to a pack's header; its chunks are whole."""
        header_bytes = min((piece.offset for piece in pieces), default=pack.bytes)
        try:
            if header_bytes > HEADER_BYTES_MAX + 8:
                raise CorruptError(
                    f"{stored.url}: a header of {header_bytes} bytes; expected at most {HEADER_BYTES_MAX}"
                )
            header = self._header(stored, header_bytes)
            digest = pack_digest(header, b"".join(piece.digests for piece in pieces))
            if digest != pack.digest:
                message = f"header and chunk digests hash to {digest}; expected {pack.digest}"
                yield self._damage(pack.name, 0, header_bytes, None, message)
                return
            listed = {
                (entry.fqn, entry.dtype, entry.shape, entry.start, entry.stop)
                for entry in entries_of(header, stored.url)
            }
        except CheckpointError as error:
            yield self._damage(pack.name, 0, header_bytes, None, str(error))
            return
        finally:
            self._advance(header_bytes)
        apart = pack.name.startswith(OPAQUE_FOLDER)
        indexed = {
            (p.tensor.fqn, *header_entry(p.tensor.dtype, p.region, apart=apart), p.offset, p.offset + p.bytes)
            for p in pieces
        }
        for fqn, *_ in sorted(listed ^ indexed):
            yield self._damage(pack.name, 0, header_bytes, fqn, "the pack's header and the index disagree")

    def _header(self, stored: Stored, header_bytes: int) -> bytes:
        parts = []
        window = len(self._buffer) // 2
        for start in range(0, header_bytes, window):
            (data,) = stored.files.get_ranges(stored.key, [(start, min(start + window, header_bytes))], [self._buffer])
            parts.append(bytes(data))
        return b"".join(parts)

    def _surplus(self) -> Iterator[Damage]:
        """Yield files of the attempt that the manifest does not name. Other safetensors readers would read them."""
        manifest = self._manifest
        named = {file.name for file in self._files}
        prefix = f"{self._folder}{manifest.attempt}/"
        try:
            names = [entry.key.removeprefix(prefix) for entry in self._store.list(prefix)]
        except MissingError:
            return
        for name in sorted(set(names) - named):
            yield self._damage(name, None, None, None, "a file that the manifest does not name; remove it")

    def _of_file(self, name: str, error: CheckpointError) -> Damage:
        return self._damage(name, None, None, None, str(error))

    def _damage(self, name: str, start: int | None, stop: int | None, fqn: str | None, message: str) -> Damage:
        file = name if name in self._elsewhere else f"{self._manifest.attempt}/{name}"
        return Damage(file, start, stop, fqn, message)

    def _advance(self, done: int) -> None:
        self._done += done
        if self._observer is not None:
            self._observer.on_event(Progress(self._done, self._total))


@dataclass(frozen=True, slots=True)
class Damage:
    """One difference between a checkpoint and what was saved."""

    file: str
    """Key of the file relative to the checkpoint, or URL of a referenced file."""

    start: int | None
    """First damaged byte known, or None for the whole file."""

    stop: int | None
    """Byte past the damage; None as for `start`."""

    fqn: str | None
    """The damaged tensor, or None."""

    message: str
    """Expected and found, in words."""
