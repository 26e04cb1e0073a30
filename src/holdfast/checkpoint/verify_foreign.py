"""Another system's checkpoint held against itself: sizes, further copies, and what was cast from a master copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.tensor_reader import BATCH_BYTES, BATCHES_AT_ONCE, TensorReader
from holdfast.engine.casting import can_cast
from holdfast.engine.compare import Disagreement, disagreement
from holdfast.engine.parallel_map import ordered_parallel_map
from holdfast.errors import CheckpointError
from holdfast.format.index.foreign_index import CHUNK_BYTES, require_within
from holdfast.format.index.index import Index
from holdfast.geometry.box import Box
from holdfast.geometry.tensor import TensorSpec
from holdfast.plan.compare import CompareWindow, batches, sampled, windows_of
from holdfast.ports.observer import Observer
from holdfast.ports.store import Readable, Stored
from holdfast.repository.verify import Damage
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.types.events import Progress
from holdfast.types.listing import ForeignListing, ListedPiece
from holdfast.types.plan import Piece

SAMPLED_BYTES = 8 * MIB
"""What is sampled of all that was cast, in blocks of a page, at least the first and the last of each piece."""


class ListedVerification:
    """Reads what another system wrote twice, and says where the two do not agree."""

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
        """Decide what is compared; reads nothing yet.

        Args:
            listing: What a format found.
            index: The same as an index, judged already: no piece lies outside its file, none leaves a hole.
            files: Where it lies.
            settings: How to read.
            observer: Told how far it has come, in bytes that are held against another copy.
            deep: Compare every element that was cast, rather than samples.
        """
        self._listing, self._index, self._files = listing, index, files
        self._settings, self._observer, self._deep = settings, observer, deep
        self._impossible: list[Damage] = []
        self._incomparable: list[str] = []
        self._copies = list(self._copies_to_judge())
        self._casts = list(self._casts_to_judge())
        self._copy_windows = [list(windows_of(number, each.piece)) for number, each in enumerate(self._copies)]
        self._cast_windows = self._windows_of_casts()
        self._done = 0

    @property
    def total_bytes(self) -> int:
        """Bytes held against another copy."""
        return _bytes_in(self._copy_windows) + _bytes_in(self._cast_windows)

    @property
    def sampled(self) -> bool:
        """Whether something was looked at in samples only."""
        return _bytes_in(self._cast_windows) < sum(each.piece.bytes for each in self._casts)

    @property
    def notes(self) -> Sequence[str]:
        """What was looked at, and how closely."""
        notes = ["sizes and structure are as the files say; they hold no digests, so bytes kept once cannot be judged"]
        if self._copies:
            count, tensors = len(self._copies), len({each.against for each in self._copies})
            notes.append(
                f"further copies: {count:,} of {tensors:,} tensors compared bit for bit, "
                f"{_bytes_in(self._copy_windows):,} bytes"
            )
        if self._casts:
            compared, whole = _bytes_in(self._cast_windows), sum(each.piece.bytes for each in self._casts)
            pairs = len({(each.against, each.piece.tensor.fqn) for each in self._casts})
            how = f"sampled, {compared:,} of {whole:,} bytes; deep compares all" if self.sampled else "compared whole"
            notes.append(f"casts of master copies: {pairs:,} tensors {how}")
        if self._incomparable:
            notes.append(
                f"casts of master copies: {len(self._incomparable):,} tensors not comparable, the first "
                f"{self._incomparable[0]}"
            )
        return notes

    def damages(self) -> Iterator[Damage]:
        """Yield everything that does not agree; nothing for a sound checkpoint."""
        yield from self._damages_of_sizes()
        yield from self._impossible
        whole = TensorReader(self._index.pieces_near, self._packs, self._settings)
        yield from self._damages_of(self._copies, self._copy_windows, whole, CHUNK_BYTES)
        if self.sampled:
            finely = TensorReader(_cut_finely(self._index.pieces_near), self._packs, self._settings)
            yield from self._damages_of(self._casts, self._cast_windows, finely, PAGE_BYTES)
        else:
            yield from self._damages_of(self._casts, self._cast_windows, whole, CHUNK_BYTES)

    def _copies_to_judge(self) -> Iterator[_ExpectedPiece]:
        listing = self._listing
        for fqn, copies in listing.replicas.items():
            spec = listing.tensors.get(listing.aliases.get(fqn, fqn))
            for copy in copies:
                if spec is None:
                    self._impossible.append(Damage(copy.file, None, None, fqn, "a copy of a tensor that is not listed"))
                    continue
                try:
                    require_within(copy, spec, listing.files, self._files.url)
                except CheckpointError as error:
                    self._impossible.append(Damage(copy.file, None, None, fqn, str(error)))
                    continue
                yield _ExpectedPiece(_piece(spec, copy), spec.fqn, "")

    def _casts_to_judge(self) -> Iterator[_ExpectedPiece]:
        listing = self._listing
        for master, weight in listing.casts.items():
            own, other = listing.tensors[weight], listing.tensors[master]
            if own.global_shape != other.global_shape:
                shapes = f"{list(own.global_shape)}; its master copy {master} is of shape {list(other.global_shape)}"
                self._impossible.append(Damage("", None, None, weight, f"of shape {shapes}; expected one shape"))
                continue
            if own.dtype == other.dtype and list(listing.pieces[weight]) == list(listing.pieces[master]):
                continue  # The very same bytes, listed under both names.
            if not can_cast(other.dtype, own.dtype):
                self._incomparable.append(f"{weight}: {own.dtype}, its master copy {other.dtype}")
                continue
            for piece in self._index.pieces_of(own.fqn):
                yield _ExpectedPiece(piece, other.fqn, other.dtype)

    def _windows_of_casts(self) -> list[list[CompareWindow]]:
        if self._deep:
            return [list(windows_of(number, each.piece)) for number, each in enumerate(self._casts)]
        blocks = SAMPLED_BYTES // PAGE_BYTES // max(len(self._casts), 1)
        return [list(sampled(number, each.piece, blocks, PAGE_BYTES)) for number, each in enumerate(self._casts)]

    def _damages_of_sizes(self) -> Iterator[Damage]:
        """Yield files that are no longer as long as they were when they were listed."""

        def judged(item: tuple[str, int]) -> Damage | None:
            key, expected = item
            try:
                found = self._files.size(key)
            except CheckpointError as error:
                return Damage(key, None, None, None, str(error))
            text = f"{found} bytes; expected {expected}, as it was when it was listed"
            return None if found == expected else Damage(key, None, None, None, text)

        yield from filter(None, ordered_parallel_map(judged, self._listing.files.items()))

    def _damages_of(
        self,
        judged: Sequence[_ExpectedPiece],
        windows: Sequence[Sequence[CompareWindow]],
        against: TensorReader,
        chunk_bytes: int,
    ) -> Iterator[Damage]:
        """Yield, for each piece, where it is not what it ought to be."""
        pieces = [_cut_to(each.piece, chunk_bytes) for each in judged]
        own = TensorReader(lambda number, _: [pieces[int(number)]], against.packs, self._settings)

        def compare(batch: Sequence[CompareWindow]) -> list[tuple[CompareWindow, Disagreement | str | None]]:
            of = [judged[window.number] for window in batch]
            try:
                expected, _ = against.read(
                    [(each.against, window) for each, window in zip(of, batch, strict=True)],
                    [each.cast_from or each.piece.tensor.dtype for each in of],
                )
                found, _ = own.read(
                    [(str(window.number), window) for window in batch], [each.piece.tensor.dtype for each in of]
                )
            except CheckpointError as error:
                if len(batch) > 1:
                    return [each for window in batch for each in compare([window])]
                return [(batch[0], str(error))]
            return [
                (window, disagreement(ours, theirs, cast_from=each.cast_from))
                for window, each, ours, theirs in zip(batch, of, expected, found, strict=True)
            ]

        gathered: _Gathered | None = None
        for outcomes in ordered_parallel_map(compare, batches(windows, BATCH_BYTES), BATCHES_AT_ONCE):
            for window, outcome in outcomes:
                if outcome is not None:
                    if gathered is not None and gathered.number != window.number:
                        yield gathered.damage()
                        gathered = None
                    gathered = gathered or _Gathered(window.number, judged[window.number])
                    gathered.take(window, outcome)
                self._done += window.bytes
            if self._observer is not None:
                self._observer.on_event(Progress(self._done, self.total_bytes))
        if gathered is not None:
            yield gathered.damage()

    def _packs(self, name: str) -> Stored:
        return Stored(self._files, name)


@dataclass(frozen=True, slots=True)
class _ExpectedPiece:
    """A piece, and what it ought to hold."""

    piece: Piece
    """The piece that is judged."""
    against: str
    """The listed tensor that says what it ought to hold, in the same coordinates."""
    cast_from: str
    """Type of that tensor, where the piece ought to be a cast of it; empty where it ought to be a copy."""


class _Gathered:
    """What is wrong with one piece, from all of its windows."""

    def __init__(self, number: int, judged: _ExpectedPiece) -> None:
        self.number, self._judged = number, judged
        self._count, self._start, self._stop, self._text = 0, -1, -1, ""

    def take(self, window: CompareWindow, outcome: Disagreement | str) -> None:
        """Take in what is wrong with a window; they come in order."""
        piece, itemsize = self._judged.piece, self._judged.piece.tensor.itemsize
        if isinstance(outcome, str):
            first, last, text = 0, window.stop - window.start - 1, outcome
        else:
            self._count += outcome.count
            first, last = outcome.first, outcome.last
            text = f"the first is {outcome.found}, expected {outcome.expected} (hex, as in the file)"
        if self._start < 0:
            self._start, self._text = piece.offset + (window.start + first) * itemsize, text
        self._stop = piece.offset + (window.start + last + 1) * itemsize

    def damage(self) -> Damage:
        """Return it as damage."""
        judged, piece = self._judged, self._judged.piece
        if judged.cast_from:
            what = f"{self._count} elements looked at are not {judged.against} cast to {piece.tensor.dtype}"
        else:
            what = f"{self._count} elements differ from the copy that is read by loads"
        text = f"{what}; {self._text}" if self._count else self._text
        return Damage(piece.pack, self._start, self._stop, piece.tensor.fqn, text)


def _piece(spec: TensorSpec, listed: ListedPiece) -> Piece:
    return Piece(spec, listed.region, listed.file, listed.offset, b"", CHUNK_BYTES)


def _cut_to(piece: Piece, chunk_bytes: int) -> Piece:
    return Piece(piece.tensor, piece.region, piece.pack, piece.offset, b"", chunk_bytes)


def _cut_finely(near: Callable[[str, Box], Sequence[Piece]]) -> Callable[[str, Box], Sequence[Piece]]:
    """Return pieces of which a page can be read without the mebibyte around it."""
    return lambda fqn, box: [_cut_to(piece, PAGE_BYTES) for piece in near(fqn, box)]


def _bytes_in(windows: Iterable[Iterable[CompareWindow]]) -> int:
    return sum(window.bytes for group in windows for window in group)
