"""What the last committed step of a run holds of what a rank is about to save, and what of it need not be written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.coordination.save_context import Base, SaveContext
from holdfast.engine.nonfinite import NonFinite
from holdfast.engine.write import PackWriter, WrittenPack
from holdfast.errors import CheckpointError
from holdfast.format.index.index import Index
from holdfast.format.index.split_index import SplitIndex
from holdfast.format.names import is_pack_name, step_of_pack, step_pack_name
from holdfast.geometry.box import Box
from holdfast.geometry.region import FlatRange, Region, region_boxes
from holdfast.plan.plan_cache import SavePlan
from holdfast.ports.framework import Source
from holdfast.repository.catalog import stored_bytes
from holdfast.saving.unchanged import first_page_digests, is_unchanged
from holdfast.settings import Settings
from holdfast.types.manifest import FileRecord, Manifest
from holdfast.types.plan import PackItem, Piece, PlannedPack

logger = logging.getLogger(__name__)

Key = tuple[str, Region]
"""A piece of a tensor: FQN and region."""


def _key(item: PackItem | Piece) -> Key:
    return item.tensor.fqn, item.region


@dataclass(frozen=True, slots=True)
class BaseStep:
    """A committed step, as far as a rank may refer to its pieces."""

    identity: Base
    """Which it is."""

    find: Callable[[Sequence[PackItem]], Mapping[Key, Piece]]
    """Returns what it holds of some pieces, each by the name that the pack bears from the root of the run."""

    packs: Mapping[str, FileRecord]
    """Every pack that its pieces lie in, by that name."""

    first_page_digests: Mapping[Key, bytes]
    """What the first page of a piece hashes to, where that is known."""


def base_from_loaded(manifest: Manifest, stored: Index | SplitIndex, filled: Mapping[str, Sequence[Box]]) -> BaseStep:
    """Return a step that was loaded, as what a save may refer to; of its index no more is read than is asked for.

    Args:
        manifest: Its commit record.
        stored: Its index.
        filled: What was read of it here and had its digests, boxes by FQN. The rest may be damaged where it lies, and
            good in memory: it is written.
    """
    assert manifest.step is not None, "a run loads steps"
    step, attempt = manifest.step, manifest.attempt
    # What lies in another system's files is not ours to refer to for ever.
    names = {pack.name: _from_root(step, attempt, pack.name) for pack in manifest.packs if _is_ours(pack.name)}
    packs = {names[pack.name]: replace(pack, name=names[pack.name]) for pack in manifest.packs if pack.name in names}

    def find(items: Sequence[PackItem]) -> Mapping[Key, Piece]:
        known = [
            item
            for item in items
            if stored.tensors.get(item.tensor.fqn) == item.tensor and _is_within(item, filled.get(item.tensor.fqn, ()))
        ]
        wanted = [(item.tensor.fqn, _around(item)) for item in known]
        index = stored if isinstance(stored, Index) else stored.read_for(wanted)
        found = {}
        for item, (fqn, box) in zip(known, wanted, strict=True):
            for piece in index.pieces_near(fqn, box):
                if piece.region == item.region and piece.pack in names:
                    found[_key(item)] = replace(piece, pack=names[piece.pack])
        return found

    return BaseStep((step, manifest.digest), find, packs, {})


def _is_ours(name: str) -> bool:
    return is_pack_name(name) or step_of_pack(name) is not None


def _from_root(step: int, attempt: str, name: str) -> str:
    return step_pack_name(step, attempt, name) if is_pack_name(name) else name


def _around(item: PackItem) -> Box:
    """Return a box that holds a piece."""
    return Box.whole(item.tensor.global_shape) if isinstance(item.region, FlatRange) else item.region


def _is_within(item: PackItem, boxes: Sequence[Box]) -> bool:
    """Return whether every element of a piece lies in one of some boxes, as far as that is easily told."""
    own = region_boxes(item.region, item.tensor.global_shape)
    return all(any(box.contains(each) for box in boxes) for each in own)


class Deduplicator:
    """What one save leaves where an earlier step holds it, and what later saves may leave where this one puts it."""

    def __init__(
        self, location: CheckpointLocation, previous: BaseStep | None, writer: PackWriter, settings: Settings
    ) -> None:
        """Compare nothing yet.

        Args:
            place: What is saved; only a step of a run refers to others.
            previous: The last committed step that is known here.
            writer: Lends windows to copy into.
            settings: Bytes of a chunk.
        """
        self._location, self._compares = location, settings.deduplicate and location.root is not None
        self._previous, self._writer, self._settings = previous, writer, settings
        self._first_page_digests: dict[Key, bytes] = {}
        self._written: dict[Key, Piece] = {}
        self._own: dict[str, FileRecord] = {}
        self.pieces: Sequence[Piece] = ()
        """What is not written, and where it lies."""
        self.nonfinite: dict[str, int] = {}
        """Elements of it that are NaN or infinite, by FQN where there are any; empty where they are not counted."""

    @property
    def packs(self) -> Sequence[FileRecord]:
        """The packs of other steps in which that lies."""
        known = {} if self._previous is None else self._previous.packs
        return [known[name] for name in dict.fromkeys(piece.pack for piece in self.pieces)]

    @property
    def bytes(self) -> int:
        """Bytes that are not written."""
        return sum(piece.bytes for piece in self.pieces)

    def pieces_to_write(self, plan: SavePlan, sources: Sequence[Source], context: SaveContext) -> SavePlan:
        """Return what of a plan must be written; before anything is copied, on the thread that trains.

        Args:
            plan: All that this rank owns.
            sources: Bytes by shard number.
            context: Rank 0's base step: a rank with another base writes everything, for garbage collection may delete
                that base. And the suspect steps.
        """
        if not self._compares or not plan.large:
            return plan
        items = [item for _, item in plan.large]
        with self._writer.lent() as buffer:
            self._first_page_digests = dict(
                zip(map(_key, items), first_page_digests(items, sources, buffer), strict=True)
            )
            candidates = self._candidates(items, context)
            left_out = {
                (pack, item.tensor.fqn): candidates[_key(item)]
                for pack, item in plan.large
                if _key(item) in candidates and self._holds(item, sources, candidates[_key(item)], buffer)
            }
        self.pieces = list(left_out.values())
        return plan.without(frozenset(left_out))

    def _holds(self, item: PackItem, sources: Sequence[Source], piece: Piece, buffer: memoryview) -> bool:
        """Return whether a piece is as it is stored, after counting what of it is no number if it is."""
        counted = NonFinite() if self._settings.count_nonfinite else None
        if not is_unchanged(item, sources[item.shard_number], piece, buffer, counted):
            return False
        for fqn, count in () if counted is None else counted.counts.items():
            self.nonfinite[fqn] = self.nonfinite.get(fqn, 0) + count
        return True

    def record_written(self, pack: PlannedPack, written: WrittenPack, attempt: str) -> None:
        """Take note of a pack that this save has written."""
        if not self._compares or self._location.step is None:
            return
        name = step_pack_name(self._location.step, attempt, pack.plan.name)
        self._own[name] = replace(written.record, name=name)
        for item, digests in zip(pack.plan.items, written.digests, strict=True):
            # There may be thousands that are too small to ever be compared.
            if item.bytes >= self._settings._tuning.unchanged_bytes_min:
                offset = len(pack.header) + item.data_offset
                piece = Piece(item.tensor, item.region, name, offset, digests, self._settings.chunk_bytes)
                self._written[_key(item)] = piece

    def committed(self, digest: str) -> BaseStep:
        """Return this save, once it is committed, as what the next may refer to.

        Args:
            digest: That of its manifest.
        """
        assert self._location.step is not None, "a run saves steps"
        pieces = {_key(piece): piece for piece in self.pieces} | self._written
        packs = {record.name: record for record in (*self.packs, *self._own.values())}

        def find(items: Sequence[PackItem]) -> Mapping[Key, Piece]:
            known = ((item, pieces.get(_key(item))) for item in items)
            return {_key(item): piece for item, piece in known if piece is not None and piece.tensor == item.tensor}

        return BaseStep((self._location.step, digest), find, packs, self._first_page_digests)

    def _candidates(self, items: Sequence[PackItem], context: SaveContext) -> dict[Key, Piece]:
        """Return what is stored of pieces that may be as they were."""
        previous = self._previous
        if previous is None or previous.identity != context.base:
            return {}
        first_page_digests = previous.first_page_digests
        alike = [
            item
            for item in items
            if first_page_digests.get(_key(item), self._first_page_digests[_key(item)])
            == self._first_page_digests[_key(item)]
        ]
        try:
            found = previous.find(alike)
            packs = {piece.pack for piece in found.values()}
            there = {
                name
                for name in packs
                if step_of_pack(name) not in context.suspect_steps and self._is_there(previous.packs[name])
            }
        except CheckpointError as error:
            logger.warning("%s is written whole, for the step before it cannot be read: %s", self._location.url, error)
            return {}
        chunk_bytes = self._settings.chunk_bytes
        return {key: piece for key, piece in found.items() if piece.pack in there and piece.chunk_bytes == chunk_bytes}

    def _is_there(self, pack: FileRecord) -> bool:
        """Return whether a pack can be referred to: in another step, and not removed by hand since."""
        location = self._location
        is_other = step_of_pack(pack.name) != location.step
        return is_other and location.root is not None and stored_bytes(location.root, pack.name) == pack.bytes
