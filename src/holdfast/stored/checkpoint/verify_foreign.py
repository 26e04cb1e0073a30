"""Verifies another system's checkpoint against itself: sizes, checksums, replicas, and casts of master copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from holdfast.base.geometry.box import Box
from holdfast.base.ports.codec import NO_CODECS
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.ports.packs import packs_under
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing
from holdfast.base.types.plan import Piece
from holdfast.core.engine.casting import can_cast
from holdfast.core.engine.compare import Disagreement, disagreement
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.index.foreign_index import CHUNK_BYTES, require_within
from holdfast.core.format.index.index import Index
from holdfast.core.plan.compare import CompareWindow, batches, sampled, windows_of
from holdfast.errors import CheckpointError
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.stored.checkpoint.checksums import ChecksumComparison
from holdfast.stored.checkpoint.tensor_reader import BATCH_BYTES, BATCHES_AT_ONCE, TensorReader
from holdfast.stored.checkpoint.verify import Damage

SAMPLED_BYTES = 8 * MIB
"""Bytes of casts that are sampled, in blocks of a page: at least the first and the last block of each piece."""


class ListedVerification:
    """Reads bytes that another system stored twice or with a checksum, and reports where the two differ."""

    def __init__(
        self,
        listing: ForeignListing,
        index: Index,
        files: Readable,
        settings: Settings,
        observer: Observer | None = None,
        *,
        deep: bool = False,
    ) -> None:
        """Plan the comparisons; reads nothing yet.

        Args:
            listing: The checkpoint's.
            index: The listing as an index, checked: every piece is inside its file, and the pieces leave no hole.
            files: The checkpoint's files.
            settings: Reads in flight.
            observer: Receives progress, in bytes compared with another copy or a checksum.
            deep: Compare every cast element instead of samples.
        """
        self._listing, self._index, self._files = listing, index, files
        self._packs = packs_under(files, "")
        self._settings, self._deep = settings, deep
        self._invalid: list[Damage] = []
        self._incomparable: list[str] = []
        self._copies = list(self._copies_to_compare())
        self._casts = list(self._casts_to_compare())
        self._copy_windows = [list(windows_of(number, copy.piece)) for number, copy in enumerate(self._copies)]
        self._cast_windows = self._windows_of_casts()
        self._checksums = ChecksumComparison(listing, files, settings)
        self._bytes_stored_twice = _bytes_in(self._copy_windows) + _bytes_in(self._cast_windows)
        # Only the files state how many of their bytes have a checksum.
        self._checksum_bytes_max = sum(listing.files.values()) if listing.checksums else 0
        self.sampled = _bytes_in(self._cast_windows) < sum(cast.piece.bytes for cast in self._casts)
        """Whether casts are compared in samples only."""
        self._progress = ByteProgress(self._bytes_stored_twice + self._checksum_bytes_max, observer)

    @property
    def total_bytes(self) -> int:
        """Bytes to compare with another copy, and bytes compared with a checksum so far."""
        return self._bytes_stored_twice + self._checksums.bytes

    @property
    def notes(self) -> Sequence[str]:
        """What was compared, and how completely; complete once `damages` has ended."""
        notes = ["files are valid in size and structure; they hold no digests, so bytes stored once are unverified"]
        if self._checksums.ranges:
            notes = [
                f"files are valid in size and structure; {self._checksums.ranges:,} entries compared with their "
                f"CRC-32, {self._checksums.bytes:,} bytes; other bytes stored once are unverified"
            ]
        if self._copies:
            count, tensors = len(self._copies), len({copy.against for copy in self._copies})
            notes.append(
                f"further copies: {count:,} of {tensors:,} tensors compared bit for bit, "
                f"{_bytes_in(self._copy_windows):,} bytes"
            )
        if self._casts:
            compared, whole = _bytes_in(self._cast_windows), sum(cast.piece.bytes for cast in self._casts)
            pairs = len({(cast.against, cast.piece.tensor.fqn) for cast in self._casts})
            how = f"sampled, {compared:,} of {whole:,} bytes; deep compares all" if self.sampled else "compared whole"
            notes.append(f"casts of master copies: {pairs:,} tensors {how}")
        if self._incomparable:
            notes.append(
                f"casts of master copies: {len(self._incomparable):,} tensors not comparable, the first "
                f"{self._incomparable[0]}"
            )
        return notes

    def damages(self) -> Iterator[Damage]:
        """Yield every difference; nothing for an undamaged checkpoint."""
        yield from self._damages_of_sizes()
        try:
            yield from self.checksum_damages()
        except CheckpointError as error:
            yield Damage("", None, None, None, str(error))
        yield from self._invalid
        whole = TensorReader(self._index.pieces_near, self._packs, self._settings, NO_CODECS)
        yield from self._damages_of(self._copies, self._copy_windows, whole, CHUNK_BYTES)
        if self.sampled:
            page_reader = TensorReader(_cut_to_pages(self._index.pieces_near), self._packs, self._settings, NO_CODECS)
            yield from self._damages_of(self._casts, self._cast_windows, page_reader, PAGE_BYTES)
        else:
            yield from self._damages_of(self._casts, self._cast_windows, whole, CHUNK_BYTES)

    def checksum_damages(self) -> Iterator[Damage]:
        """Yield every byte range that differs from its checksum.

        Raises:
            CheckpointError: The checksums cannot be read.
        """
        if not self._listing.checksums:
            return
        for count, damage in self._checksums.outcomes():
            self._progress.add(count)
            if damage is not None:
                yield damage
        self._progress.add(max(self._checksum_bytes_max - self._checksums.bytes, 0))

    def _copies_to_compare(self) -> Iterator[_ExpectedPiece]:
        listing = self._listing
        for fqn, copies in listing.replicas.items():
            spec = listing.tensors.get(listing.aliases.get(fqn, fqn))
            for copy in copies:
                if spec is None:
                    self._invalid.append(Damage(copy.file, None, None, fqn, "a copy of a tensor that is not listed"))
                    continue
                try:
                    require_within(copy, spec, listing.files, self._files.url)
                except CheckpointError as error:
                    self._invalid.append(Damage(copy.file, None, None, fqn, str(error)))
                    continue
                piece = Piece(spec, copy.region, copy.file, copy.offset, b"", CHUNK_BYTES)
                yield _ExpectedPiece(piece, spec.fqn, "")

    def _casts_to_compare(self) -> Iterator[_ExpectedPiece]:
        listing = self._listing
        for master_fqn, weight_fqn in listing.casts.items():
            weight, master = listing.tensors[weight_fqn], listing.tensors[master_fqn]
            if weight.global_shape != master.global_shape:
                text = f"of shape {list(weight.global_shape)}; its master copy {master_fqn} is of shape "
                text += f"{list(master.global_shape)}; expected one shape"
                self._invalid.append(Damage("", None, None, weight_fqn, text))
                continue
            if weight.dtype == master.dtype and list(listing.pieces[weight_fqn]) == list(listing.pieces[master_fqn]):
                continue  # Both names list the same byte ranges.
            if not can_cast(master.dtype, weight.dtype):
                self._incomparable.append(f"{weight_fqn}: {weight.dtype}, its master copy {master.dtype}")
                continue
            for piece in self._index.pieces_of(weight.fqn):
                yield _ExpectedPiece(piece, master.fqn, master.dtype)

    def _windows_of_casts(self) -> list[list[CompareWindow]]:
        if self._deep:
            return [list(windows_of(number, cast.piece)) for number, cast in enumerate(self._casts)]
        blocks = SAMPLED_BYTES // PAGE_BYTES // max(len(self._casts), 1)
        return [list(sampled(number, cast.piece, blocks, PAGE_BYTES)) for number, cast in enumerate(self._casts)]

    def _damages_of_sizes(self) -> Iterator[Damage]:
        """Yield files whose size has changed since they were listed."""

        def check(item: tuple[str, int]) -> Damage | None:
            key, expected = item
            try:
                count = self._files.size(key)
            except CheckpointError as error:
                return Damage(key, None, None, None, str(error))
            text = f"{count} bytes; expected {expected}, its size when it was listed"
            return None if count == expected else Damage(key, None, None, None, text)

        yield from filter(None, ordered_parallel_map(check, self._listing.files.items()))

    def _damages_of(
        self,
        checked: Sequence[_ExpectedPiece],
        windows: Sequence[Sequence[CompareWindow]],
        against: TensorReader,
        chunk_bytes: int,
    ) -> Iterator[Damage]:
        """Yield one damage for each piece that differs from what is expected.

        Args:
            checked: The pieces.
            windows: By piece, what is compared of it.
            against: Reads the expected bytes.
            chunk_bytes: Bytes in which the pieces are read.
        """
        pieces = [_cut_to(expected.piece, chunk_bytes) for expected in checked]
        reader = TensorReader(lambda number, _: [pieces[int(number)]], against.packs, self._settings, NO_CODECS)

        def compare(batch: Sequence[CompareWindow]) -> list[tuple[CompareWindow, Disagreement | str | None]]:
            expected = [checked[window.number] for window in batch]
            try:
                wanted, _ = against.read(
                    [(piece.against, window) for piece, window in zip(expected, batch, strict=True)],
                    [piece.cast_from or piece.piece.tensor.dtype for piece in expected],
                )
                actual, _ = reader.read(
                    [(str(window.number), window) for window in batch], [piece.piece.tensor.dtype for piece in expected]
                )
            except CheckpointError as error:
                # Window by window, so that the error counts only for the one that cannot be read.
                if len(batch) > 1:
                    return [outcome for window in batch for outcome in compare([window])]
                return [(batch[0], str(error))]
            return [
                (window, disagreement(wanted_parts, actual_parts, cast_from=piece.cast_from))
                for window, piece, wanted_parts, actual_parts in zip(batch, expected, wanted, actual, strict=True)
            ]

        def differences() -> Iterator[tuple[CompareWindow, Disagreement | str]]:
            for outcomes in ordered_parallel_map(compare, batches(windows, BATCH_BYTES), BATCHES_AT_ONCE):
                yield from ((window, outcome) for window, outcome in outcomes if outcome is not None)
                self._progress.add(sum(window.bytes for window, _ in outcomes))

        for number, of_piece in groupby(differences(), key=lambda difference: difference[0].number):
            yield _damage_of(checked[number], of_piece)


@dataclass(frozen=True, slots=True)
class _ExpectedPiece:
    """A piece, and the tensor whose content it should have."""

    piece: Piece
    """The piece that is checked."""
    against: str
    """FQN of the listed tensor with the expected content, in the same coordinates."""
    cast_from: str
    """Dtype of that tensor, if the piece should be a cast of it; empty if it should be a copy."""


def _damage_of(expected: _ExpectedPiece, differences: Iterable[tuple[CompareWindow, Disagreement | str]]) -> Damage:
    """Return the damage of a whole piece.

    Args:
        expected: The piece.
        differences: Its damaged windows in order, each with its disagreement or with the error of its read.
    """
    piece, itemsize = expected.piece, expected.piece.tensor.itemsize
    count, start, stop, text = 0, -1, -1, ""
    for window, outcome in differences:
        if isinstance(outcome, str):
            first, last, description = 0, window.stop - window.start - 1, outcome
        else:
            count += outcome.count
            first, last = outcome.first, outcome.last
            description = f"the first is {outcome.found}, expected {outcome.expected} (hex, as in the file)"
        if start < 0:
            start, text = piece.offset + (window.start + first) * itemsize, description
        stop = piece.offset + (window.start + last + 1) * itemsize
    if count and expected.cast_from:
        text = f"{count} elements looked at are not {expected.against} cast to {piece.tensor.dtype}; {text}"
    elif count:
        text = f"{count} elements differ from the copy that loads read; {text}"
    return Damage(piece.pack, start, stop, piece.tensor.fqn, text)


def _cut_to(piece: Piece, chunk_bytes: int) -> Piece:
    return Piece(piece.tensor, piece.region, piece.pack, piece.offset, b"", chunk_bytes)


def _cut_to_pages(near: Callable[[str, Box], Sequence[Piece]]) -> Callable[[str, Box], Sequence[Piece]]:
    """Return pieces in chunks of a page, so that a sample reads a page and not the mebibyte around it."""
    return lambda fqn, box: [_cut_to(piece, PAGE_BYTES) for piece in near(fqn, box)]


def _bytes_in(windows: Iterable[Iterable[CompareWindow]]) -> int:
    return sum(window.bytes for group in windows for window in group)
