"""How the tensors of a checkpoint are stored, and what the save that wrote them decided about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.base.geometry.chunking import chunk_count
from holdfast.base.types.coding import KindCoding
from holdfast.base.types.events import RankReport
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import Piece
from holdfast.errors import CheckpointError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.reports import reports_in


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How some pieces are stored."""

    stored_bytes: int
    """Bytes of the pieces in their packs."""

    chunks: Mapping[str, int]
    """By codec, the number of chunks; the empty name counts those stored as they are."""

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs in use, that of most chunks first."""
        return tuple(sorted(filter(None, self.chunks), key=lambda name: (-self.chunks[name], name)))


def stored_form(pieces: Iterable[Piece]) -> StoredForm:
    """Return how pieces are stored."""
    stored_bytes, chunks = 0, Counter[str]()
    for piece in pieces:
        stored_bytes += piece.stored_bytes
        if piece.coding is None:
            chunks[""] += chunk_count(piece.bytes, piece.chunk_bytes)
            continue
        names = ("", *piece.coding.codecs)
        for number, count in Counter(piece.coding.numbers).items():
            chunks[names[number]] += count
    return StoredForm(stored_bytes, {name: count for name, count in chunks.items() if count})


def codings_in(location: CheckpointLocation, manifest: Manifest) -> dict[int, tuple[KindCoding, ...]]:
    """Return by rank what the save of a checkpoint decided about each kind of tensors, as its reports say.

    Nobody needs reports. They may be damaged, absent, or in a folder that cannot be listed: their ranks are left out.
    """
    found: dict[int, tuple[KindCoding, ...]] = {}
    if manifest.attempt:  # Another system's checkpoint has none.
        with suppress(CheckpointError):
            for _, report in reports_in(location.store, location.folder, f"save-{manifest.attempt}-"):
                if isinstance(report, RankReport) and report.codings:
                    found[report.operation.rank] = report.codings
    return {rank: found[rank] for rank in sorted(found)}
