"""Verification: reads a checkpoint back, byte for byte, and lists its damage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.base.clock import Clock
from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.ports.packs import Stored
from holdfast.base.ports.ranges import read_range
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.plan import Piece
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.engine.decoding.chunk_reader import ChunkReader, refutation
from holdfast.core.format.index.index_checks import index_from
from holdfast.core.format.names import (
    MANIFEST_FILE,
    is_coded_pack_name,
    is_file_url,
    is_pack_name,
    link_name,
    rank_of_part,
    step_of_pack,
)
from holdfast.core.format.pack import HEADER_BYTES_MAX, StatedPiece, entries_of, entry_of, pack_digest, stated_pieces
from holdfast.core.format.part import decode_part, require_part_of
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.checkpoint.coverage import require_covered
from holdfast.stored.checkpoint.location import CheckpointLocation, manifest_in_place_of
from holdfast.stored.checkpoint.pack_sizes import check_pack
from holdfast.stored.repository.catalog import check_size, exists, read_file

_READS_MAX = 2
"""How often a chunk is read that is not what was saved."""


class Verification:
    """Reads every byte of one checkpoint."""

    sampled = False
    """Whether some data was checked by samples only: never here."""

    notes: Sequence[str] = ()
    """Remarks on parts that were not checked: none here."""

    def __init__(
        self,
        location: CheckpointLocation,
        manifest: Manifest,
        settings: Settings,
        clock: Clock,
        codecs: Codecs,
        observer: Observer | None = None,
    ) -> None:
        """Prepare; `damages` does the work.

        Args:
            location: The checkpoint.
            manifest: Its manifest.
            settings: Bytes of a read.
            clock: Randomness for the proof that the pieces cover every tensor.
            codecs: What decodes coded chunks.
            observer: Receives progress.
        """
        self._location, self._settings, self._clock, self._observer = location, settings, clock, observer
        self._codecs = codecs
        self._take(manifest)
        # `damages` allocates after it reads the index, which states the chunk size.
        self._buffer = memoryview(b"")
        self._chunks: ChunkReader | None = None

    def _take(self, manifest: Manifest) -> None:
        """Begin with a manifest."""
        self._manifest = manifest
        self._packs = self._location.packs_of(manifest)
        self._elsewhere = {pack.name for pack in manifest.packs if not is_pack_name(pack.name)}
        self._progress = ByteProgress(sum(file.bytes for file in manifest.files), self._observer)

    @property
    def total_bytes(self) -> int:
        """Bytes to read. Once the index is read, a file elsewhere counts with the bytes of its pieces only."""
        return self._progress.total_bytes

    def damages(self) -> Iterator[Damage]:
        """Yield everything that is damaged, missing or surplus.

        A checkpoint that is overwritten meanwhile loses its files. Then the new one is verified from the beginning.

        Raises:
            InvalidError: The checkpoint references a file that may not be read.
            ConflictError: The checkpoint was overwritten after damage of the old one was found.
        """
        found = 0
        damages = self._damages()
        while (damage := next(damages, None)) is not None:
            # An overwrite removes whole files, so only a file that is gone asks for another look at the manifest.
            current = manifest_in_place_of(self._manifest, self._location) if self._is_gone(damage.file) else None
            if current is None:
                found += 1
                yield damage
            elif not found:
                self._take(current)
                damages = self._damages()
            else:
                raise ConflictError(
                    f"{self._location.url}: was overwritten while it was verified; expected the same checkpoint to the "
                    "end. Verify it again"
                )

    def _is_gone(self, file: str) -> bool:
        """Return whether there is no file of the checkpoint where there should be one."""
        try:
            return file not in self._elsewhere and not exists(self._location.store, self._location.folder + file)
        except InvalidError:
            return False  # Something else has its name, for example a symbolic link.

    def _damages(self) -> Iterator[Damage]:
        """Yield the damage of the manifest that was taken last."""
        manifest, store, folder = self._manifest, self._location.store, self._location.folder
        for pack in manifest.packs:
            self._packs(pack.name)  # Raises for a file that the caller did not allow, before any work.
        for part in manifest.parts:
            try:
                data = read_file(store, folder, manifest.attempt, part)
                require_part_of(decode_part(data, part.name), rank_of_part(part.name), manifest.attempt, part.name)
            except CheckpointError as error:
                yield self._damage(part.name, error)
            self._progress.add(part.bytes)
        files = []
        for record in manifest.index_files:
            try:
                files.append(read_file(store, folder, manifest.attempt, record))
            except CheckpointError as error:
                yield self._damage(record.name, error)
            self._progress.add(record.bytes)
        if len(files) < len(manifest.index_files):
            return
        try:
            index = index_from(manifest, files, f"{store.url}/{folder}")
            require_covered(index, self._clock, self._location.url)
        except CheckpointError as error:
            # Every index file has the digest that the manifest states, so the manifest contradicts the index.
            yield Damage(MANIFEST_FILE, None, None, None, str(error))
            return
        # Only the pieces of a file elsewhere are read: the rest belongs to another step or system.
        self._progress.total_bytes += sum(
            index.bytes_by_pack.get(pack.name, 0) - pack.bytes
            for pack in manifest.packs
            if pack.name in self._elsewhere
        )
        self._buffer = allocate_aligned(self._settings._tuning.window_bytes * 2 + PAGE_BYTES)
        self._chunks = ChunkReader(self._packs, self._codecs, index.chunk_bytes)
        for pack in manifest.packs:
            pieces = index.pieces_in(pack.name)
            yield from self._damages_of_pack(pack, pieces, self._packs(pack.name))
            if step_of_pack(pack.name) is not None:
                yield from self._damages_of_copy(pack, pieces)
        yield from self._surplus()

    def _damages_of_pack(self, pack: FileRecord, pieces: Sequence[Piece], stored: Stored) -> Iterator[Damage]:
        """Check a pack. Of a pack of another step or a referenced file, only its size and the chunks of our pieces."""
        is_elsewhere = pack.name in self._elsewhere
        try:
            check_pack(stored, pack, self._manifest.step)
        except CheckpointError as error:
            yield self._damage(pack.name, error)
            self._progress.add(sum(piece.stored_bytes for piece in pieces) if is_elsewhere else pack.bytes)
            return
        if not is_elsewhere:
            yield from self._damages_of_layout(pack, pieces)
        is_whole = True
        for piece in pieces:
            for damage in self._damages_of_piece(stored, piece):
                is_whole = False
                yield damage
        if is_whole and not is_elsewhere:
            yield from self._damages_of_header(stored, pack, pieces)
        if is_file_url(pack.name):
            digest = pack_digest(b"", b"".join(piece.digests for piece in pieces))
            if digest != pack.digest:
                message = (
                    f"the chunk digests of the index hash to {digest}; expected {pack.digest}, as the manifest says"
                )
                yield self._damage(pack.name, message)

    def _damages_of_copy(self, pack: FileRecord, pieces: Sequence[Piece]) -> Iterator[Damage]:
        """Check what has the name of a link to a pack and is a file of its own, as in a run copied without hard links.

        A link that is one file with the pack is not read again.
        """
        location, name = self._location, link_name(pack.name)
        copy = Stored(location.store, f"{location.folder}{self._manifest.attempt}/{name}")
        if location.root is None:
            return
        try:
            identity = location.store.identity(copy.key)
        except MissingError:
            return  # There is only the pack.
        except CheckpointError as error:
            yield self._damage(name, error)
            return
        try:
            if location.root.identity(pack.name) == identity:
                return
        except (MissingError, InvalidError):
            return  # There is only the link, or no other can be read: it was read as the pack.
        except CheckpointError as error:
            yield self._damage(name, error)
            return
        self._progress.total_bytes += sum(piece.stored_bytes for piece in pieces)
        try:
            check_size(copy.files, copy.key, pack)
        except CheckpointError as error:
            yield self._damage(name, error)
            self._progress.add(sum(piece.stored_bytes for piece in pieces))
            return
        for piece in pieces:
            for damage in self._damages_of_piece(copy, piece):
                yield replace(damage, file=f"{self._manifest.attempt}/{name}")

    def _damages_of_layout(self, pack: FileRecord, pieces: Sequence[Piece]) -> Iterator[Damage]:
        """Yield gaps and overlaps between the pieces of a pack."""
        end = min((piece.offset for piece in pieces), default=pack.bytes)
        for piece in pieces:
            if piece.offset != end:
                yield self._damage(pack.name, "the index leaves a gap or overlaps", end, piece.offset, piece.tensor.fqn)
            end = piece.offset + piece.stored_bytes
        if end != pack.bytes:
            yield self._damage(pack.name, "bytes that belong to no piece of the index", end, pack.bytes)

    def _damages_of_piece(self, stored: Stored, piece: Piece) -> Iterator[Damage]:
        assert self._chunks is not None, "the index is read"
        for number in range(len(piece.digests) // DIGEST_BYTES):
            start, stop = piece.stored_range(number)
            # As a load: a network may flip a bit on the way. What the second read finds decides.
            message = ""
            for _ in range(_READS_MAX):
                message = refutation(self._chunks, piece, number, stored)
                if not message:
                    break
            if message:
                yield self._damage(piece.pack, message, start, stop, piece.tensor.fqn)
            self._progress.add(stop - start)

    def _damages_of_header(self, stored: Stored, pack: FileRecord, pieces: Sequence[Piece]) -> Iterator[Damage]:
        """Yield damage to the header of a pack whose chunks are undamaged."""
        header_bytes = min((piece.offset for piece in pieces), default=pack.bytes)
        try:
            if header_bytes > HEADER_BYTES_MAX + 8:
                raise CorruptError(
                    f"{stored.url}: a header of {header_bytes} bytes; expected at most {HEADER_BYTES_MAX}"
                )
            digests = b"".join(piece.digests for piece in pieces)
            header = self._header(stored, header_bytes)
            if pack_digest(header, digests) != pack.digest:
                header = self._header(stored, header_bytes)  # As above.
            digest = pack_digest(header, digests)
            if digest != pack.digest:
                message = f"header and chunk digests hash to {digest}; expected {pack.digest}"
                yield self._damage(pack.name, message, 0, header_bytes)
                return
            listed = set(entries_of(header, stored.url))
            disagreeing = {entry.fqn for entry in listed.symmetric_difference(map(entry_of, pieces))}
            if is_coded_pack_name(pack.name):
                disagreeing |= _otherwise_coded(stated_pieces(header, pack.name, stored.url), pieces)
        except CheckpointError as error:
            yield self._damage(pack.name, error, 0, header_bytes)
            return
        finally:
            self._progress.add(header_bytes)
        for fqn in sorted(disagreeing):
            yield self._damage(pack.name, "the pack's header and the index disagree", 0, header_bytes, fqn)

    def _header(self, stored: Stored, header_bytes: int) -> bytes:
        parts = []
        window = len(self._buffer) // 2
        for start in range(0, header_bytes, window):
            stop = min(start + window, header_bytes)
            parts.append(bytes(read_range(stored.files, stored.key, start, stop, self._buffer)))
        return b"".join(parts)

    def _surplus(self) -> Iterator[Damage]:
        """Yield files of the attempt that the manifest does not name. Other safetensors readers would read them."""
        prefix = f"{self._location.folder}{self._manifest.attempt}/"
        try:
            names = {entry.key.removeprefix(prefix) for entry in self._location.store.list(prefix)}
        except MissingError:
            return
        links = {link_name(pack.name) for pack in self._manifest.packs if step_of_pack(pack.name) is not None}
        for name in sorted(names - {file.name for file in self._manifest.files} - links):
            yield self._damage(name, "a file that the manifest does not name; remove it")

    def _damage(
        self, name: str, message: object, start: int | None = None, stop: int | None = None, fqn: str | None = None
    ) -> Damage:
        file = name if name in self._elsewhere else f"{self._manifest.attempt}/{name}"
        return Damage(file, start, stop, fqn, str(message))


def _otherwise_coded(stated: Sequence[StatedPiece], indexed: Sequence[Piece]) -> set[str]:
    """Return the FQNs of pieces of a coded pack of which header and index say different things."""

    def said(piece: StatedPiece | Piece) -> tuple[object, ...]:
        coding = piece.coding
        return piece.region, coding and (coding.codecs, coding.numbers, coding.starts, coding.pair_fqn)

    by_fqn = {piece.tensor.fqn: said(piece) for piece in indexed}
    return {piece.tensor.fqn for piece in stated if by_fqn.get(piece.tensor.fqn) != said(piece)}


@dataclass(frozen=True, slots=True)
class Damage:
    """One difference between the stored bytes of a checkpoint and its saved content."""

    file: str
    """Key of the file relative to the checkpoint, or URL of a referenced file."""

    start: int | None
    """First byte that is known to be damaged; None for the whole file."""

    stop: int | None
    """Byte past the damage; None for the whole file."""

    fqn: str | None
    """The damaged tensor, or None."""

    message: str
    """Text that describes the damage."""
