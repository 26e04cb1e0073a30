"""Leaves out the pieces of a save that an earlier step of the run holds unchanged.

The base step is the last committed step that this rank saved or loaded. A large piece is compared in two stages: the
digest of its first page, then the digests of all its chunks. An unchanged piece refers to the pack of the base step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.geometry.region import FlatRange, region_boxes
from holdfast.base.ports.framework import Source
from holdfast.base.ports.packs import packs_under
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.plan import PackItem, Piece, PieceKey, PlannedPack
from holdfast.core.engine.background import side_by_side
from holdfast.core.engine.nonfinite import NonFinite
from holdfast.core.engine.stream import Scratch, chunk_digests
from holdfast.core.engine.writing.write import PackWriter, WrittenPack
from holdfast.core.format.digest import digest_of
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.format.names import step_of_pack, step_pack_name
from holdfast.core.plan.plan_cache import SavePlan
from holdfast.errors import CheckpointError, MissingError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.checkpoint.pack_sizes import sizes_of
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.publish import pack_paths
from holdfast.stored.repository.removal import link_keys
from holdfast.training.coordination.save_context import Base, SaveContext

logger = logging.getLogger(__name__)

LinkPack = Callable[[str, str], str | None]
"""Takes a pack, by its path from the root, and a key that it has; returns the key of the link if one was made."""


def _key(item: PackItem | Piece) -> PieceKey:
    return item.tensor.fqn, item.region


def _with_weights(unchanged: Mapping[tuple[str, str], Piece]) -> dict[tuple[str, str], Piece]:
    """Return unchanged pieces without pieces that are coded against a changed weight.

    A changed weight is written again, and may differ from the bytes that the piece was coded against.
    """
    weights = {
        key: (piece.coding.pair_fqn, piece.region)
        for key, piece in unchanged.items()
        if piece.coding is not None and piece.coding.pair_fqn
    }
    known = set(map(_key, unchanged.values())) if weights else set()
    return {key: piece for key, piece in unchanged.items() if key not in weights or weights[key] in known}


@dataclass(frozen=True, slots=True)
class BaseStep:
    """A committed step whose pieces a rank may refer to."""

    identity: Base
    """Step number and manifest digest."""

    find: Callable[[Sequence[PackItem]], Mapping[PieceKey, Piece]]
    """Returns the stored pieces that match the given items; packs are named from the root of the run."""

    packs: Mapping[str, FileRecord]
    """Every pack that holds pieces of the step, by that name."""

    first_page_digests: Mapping[PieceKey, bytes]
    """Digest of the first page of each piece, where known."""

    links: Mapping[str, str] = field(default_factory=dict)
    """By pack of another step, the key of a link to the pack that the step has, or may have."""

    is_own: bool = False
    """Whether this process has committed the step: then only this process removes the step."""

    @property
    def older_packs(self) -> list[str]:
        """The packs of earlier steps that this rank left unchanged: the next save is likely to refer to these too.

        Empty for a loaded step, which lists the packs of all ranks.
        """
        return [name for name in self.packs if step_of_pack(name) != self.identity[0]] if self.is_own else []


def base_from_loaded(manifest: Manifest, stored: Index | SplitIndex, filled: Mapping[str, Sequence[Box]]) -> BaseStep:
    """Return a loaded step as a base step. Of a split index, `find` reads only the needed files.

    Args:
        manifest: Manifest of the step.
        stored: Index of the step.
        filled: Boxes by FQN that this rank read and verified. Other pieces may be damaged in storage and good in
            memory, so the save writes these.
    """
    assert manifest.step is not None, "a run loads steps"
    names = pack_paths(manifest)
    packs = {names[pack.name]: pack._replace(name=names[pack.name]) for pack in manifest.packs if pack.name in names}

    def find(items: Sequence[PackItem]) -> Mapping[PieceKey, Piece]:
        candidates = [
            item
            for item in items
            if stored.tensors.get(item.tensor.fqn) == item.tensor and _is_within(item, filled.get(item.tensor.fqn, ()))
        ]
        wanted = [(item.tensor.fqn, _bounding_box(item)) for item in candidates]
        index = stored if isinstance(stored, Index) else stored.read_for(wanted)
        pieces = {}
        for item, (fqn, box) in zip(candidates, wanted, strict=True):
            for piece in index.pieces_near(fqn, box):
                if piece.region == item.region and piece.pack in names:
                    pieces[_key(item)] = replace(piece, pack=names[piece.pack])
        return pieces

    return BaseStep((manifest.step, manifest.digest), find, packs, {}, link_keys(manifest))


def _bounding_box(item: PackItem) -> Box:
    """Return a box that contains a piece."""
    return Box.whole(item.tensor.global_shape) if isinstance(item.region, FlatRange) else item.region


def _is_within(item: PackItem, boxes: Sequence[Box]) -> bool:
    """Return whether single boxes contain every part of a piece; False if only several boxes together do."""
    parts = region_boxes(item.region, item.tensor.global_shape)
    return all(any(box.contains(part) for box in boxes) for part in parts)


class Deduplicator:
    """Finds the pieces of one save that the base step holds, and records the save as the base of later saves."""

    def __init__(
        self,
        location: CheckpointLocation,
        previous: BaseStep | None,
        writer: PackWriter,
        settings: Settings,
        suspect_steps: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """Compare nothing yet.

        Args:
            location: Where the save goes; only a step of a run refers to other steps.
            previous: The last committed step that this rank knows.
            writer: Lends buffers for copies.
            settings: Chunk size, and whether to deduplicate and count.
            suspect_steps: Returns the suspect steps; called if rank 0 has not looked.
        """
        self._location, self._is_enabled = location, settings.deduplicate and location.root is not None
        self._previous, self._writer, self._settings = previous, writer, settings
        self._list_suspects = suspect_steps
        self._first_page_digests: dict[PieceKey, bytes] = {}
        self._written: dict[PieceKey, Piece] = {}
        self._new_packs: dict[str, FileRecord] = {}
        self.unchanged_pieces: Sequence[Piece] = ()
        """Pieces that are not written, each with a place in an earlier step."""
        self._counted: dict[PieceKey, Mapping[str, int]] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of the packs that were looked at."""
        self._links: dict[str, str] = {}
        """By pack of another step, the key of the link that this save has made."""

    @property
    def packs(self) -> Sequence[FileRecord]:
        """The packs of earlier steps that hold these pieces."""
        known = {} if self._previous is None else self._previous.packs
        return [known[name] for name in dict.fromkeys(piece.pack for piece in self.unchanged_pieces)]

    @property
    def nonfinite(self) -> Mapping[str, int]:
        """NaN and infinite elements in these pieces, by FQN; empty if `count_nonfinite` is off."""
        counts = Counter[str]()
        for piece in self.unchanged_pieces:
            counts.update(self._counted.get(_key(piece), {}))
        return counts

    @property
    def unchanged_bytes(self) -> int:
        """Bytes in these pieces."""
        return sum(piece.bytes for piece in self.unchanged_pieces)

    def without_unchanged(
        self, plan: SavePlan, sources: Sequence[Source], context: SaveContext, link: LinkPack
    ) -> SavePlan:
        """Return the plan without unchanged pieces. On the training thread, before any copy.

        Args:
            plan: All pieces that this rank owns.
            sources: Bytes by shard number.
            context: Rank 0's base step and the suspect steps. Only rank 0's base is pinned against garbage collection.
                A rank with another base writes everything.
            link: Gives a pack a name in the folder of this save: `SaveAttempt.link_pack`.
        """
        if not self._is_enabled or not plan.large:
            return plan
        items = [item for _, item in plan.large]
        with self._writer.lent() as buffer:
            digests = first_page_digests(items, sources, buffer)
            self._first_page_digests = dict(zip(map(_key, items), digests, strict=True))
            candidates = self._candidates(items, context)
            unchanged = {
                (pack, item.tensor.fqn): candidates[_key(item)]
                for pack, item in plan.large
                if _key(item) in candidates and self._is_stored(item, sources, candidates[_key(item)], buffer)
            }
        unchanged = _with_weights(unchanged)
        # A store of objects has no links; to look for the links would cost one request a pack, one after the other.
        if self._location.store.traits.page_entries is None:
            keeps = partial(self._is_linkable, link=link) if self._settings.link_unchanged else self._stays
            gone = {pack for pack in {piece.pack for piece in unchanged.values()} if not keeps(pack)}
            unchanged = _with_weights({key: piece for key, piece in unchanged.items() if piece.pack not in gone})
        self.unchanged_pieces = list(unchanged.values())
        return plan.without(frozenset(unchanged))

    def _stays(self, pack: str) -> bool:
        """Return whether no collection removes a pack: where the base has a link, a reference alone may break."""
        base_link = self._base_link(pack)
        return not base_link or not exists(self._location.store, base_link)

    def _base_link(self, pack: str) -> str:
        """Return the key of the link to a pack that the base step has, or may have; empty without a link."""
        return "" if self._previous is None else self._previous.links.get(pack, "")

    def _is_linkable(self, pack: str, link: LinkPack) -> bool:
        """Link a pack, or keep the reference if no link is possible; return False if the pack is gone, or may go."""
        for source in filter(None, (pack, self._base_link(pack))):
            try:
                made = link(pack, source)
            except MissingError:
                continue
            if made is not None:
                self._links[pack] = made
                return True
            if self._stays(pack):
                logger.debug("%s refers to %s without a link", self._location.url, pack)
                return True
        logger.warning("%s: %s cannot be linked any more; its tensors are written anew", self._location.url, pack)
        return False

    def _is_stored(self, item: PackItem, sources: Sequence[Source], piece: Piece, buffer: memoryview) -> bool:
        """Return whether every chunk of a piece has the stored digest; if so, record the non-finite elements."""
        counter = NonFinite() if self._settings.count_nonfinite else None
        digests = chunk_digests(item, Scratch(buffer), piece.chunk_bytes, sources[item.shard_number], counter)
        stored = piece.digests
        if any(digest != stored[DIGEST_BYTES * n :][:DIGEST_BYTES] for n, digest in enumerate(digests)):
            return False
        if counter is not None:
            self._counted[_key(item)] = counter.counts
        return True

    def record_written(self, pack: PlannedPack, written: WrittenPack, attempt: str) -> None:
        """Record a pack that this save wrote, so that the next save can refer to its large pieces."""
        if not self._is_enabled or self._location.step is None:
            return
        name = step_pack_name(self._location.step, attempt, pack.plan.name)
        self._new_packs[name] = written.record._replace(name=name)
        chunk_bytes = self._settings.chunk_bytes
        codings = written.codings or [None] * len(written.offsets)
        by_piece = zip(pack.plan.items, written.digests, written.offsets, codings, strict=True)
        for item, digests, offset, coding in by_piece:
            # Skip small pieces: there may be thousands, and no save compares small pieces.
            if item.bytes >= self._settings._tuning.unchanged_bytes_min:
                piece = Piece(item.tensor, item.region, name, offset, digests, chunk_bytes, coding)
                self._written[_key(item)] = piece

    def committed(self, digest: str) -> BaseStep:
        """Return this save, once committed, as the base step of the next.

        Args:
            digest: Digest of the manifest.
        """
        assert self._location.step is not None, "a run saves steps"
        pieces = {_key(piece): piece for piece in self.unchanged_pieces} | self._written
        packs = {record.name: record for record in (*self.packs, *self._new_packs.values())}

        def find(items: Sequence[PackItem]) -> Mapping[PieceKey, Piece]:
            pairs = ((item, pieces.get(_key(item))) for item in items)
            return {_key(item): piece for item, piece in pairs if piece is not None and piece.tensor == item.tensor}

        return BaseStep((self._location.step, digest), find, packs, self._first_page_digests, self._links, is_own=True)

    @property
    def older_packs(self) -> list[str]:
        """The packs that the base step refers to; empty if this save refers to no step."""
        return self._previous.older_packs if self._previous is not None and self._is_enabled else []

    def look_at(self, packs: Sequence[str]) -> None:
        """Look up the sizes of packs, ahead of the comparison, which then needs no second look-up."""
        root = self._location.root
        assert root is not None, "a run has a root"
        links, files = {} if self._previous is None else self._previous.links, packs_under(root, "")
        self._sizes |= sizes_of(packs, files)
        # These packs were removed, by a collection or by hand: the base holds the bytes by its links.
        linked = {name: links[name] for name in packs if name in links and not self._sizes[name]}
        at_links = sizes_of(list(linked.values()), files)
        self._sizes |= {name: at_links[key] for name, key in linked.items()}

    def _candidates(self, items: Sequence[PackItem], context: SaveContext) -> dict[PieceKey, Piece]:
        """Return the stored pieces whose first page has not changed and whose packs may be referred to."""
        previous = self._previous
        if previous is None or previous.identity != context.base:
            return {}
        before, now = previous.first_page_digests, self._first_page_digests
        unchanged_so_far = [item for item in items if before.get(key := _key(item), now[key]) == now[key]]
        try:
            stored = previous.find(unchanged_so_far)
            named = {piece.pack for piece in stored.values() if step_of_pack(piece.pack) != self._location.step}
            suspects = self._looked_at(named, context)
            usable = {
                name
                for name in named
                if step_of_pack(name) not in suspects and self._sizes[name] == previous.packs[name].bytes
            }
        except CheckpointError as error:
            logger.warning("%s is written in full: the base step cannot be read: %s", self._location.url, error)
            return {}
        chunk_bytes = self._settings.chunk_bytes
        return {
            key: piece for key, piece in stored.items() if piece.pack in usable and piece.chunk_bytes == chunk_bytes
        }

    def _looked_at(self, packs: Collection[str], context: SaveContext) -> Collection[int]:
        """Look up the sizes of the other packs, and the suspect steps if rank 0 has not; return the suspect steps."""
        suspects = set(context.suspect_steps or ())

        def look_at_suspects() -> None:
            suspects.update(self._list_suspects())

        looks = (look_at_suspects,) if packs and context.suspect_steps is None else ()
        side_by_side(*looks, partial(self.look_at, [name for name in packs if name not in self._sizes]))
        return suspects


def first_page_digests(items: Sequence[PackItem], sources: Sequence[Source], buffer: memoryview) -> list[bytes]:
    """Return a digest of the first page of each piece; a piece whose digest differs has changed.

    Training changes a tensor everywhere, so one page tells nearly every trained tensor from a frozen one.

    Args:
        items: The pieces, none empty.
        sources: Bytes by shard number.
        buffer: Scratch memory of at least one page.
    """
    return [digest_of(page) for page in first_pages(items, sources, buffer)]


def first_pages(items: Sequence[PackItem], sources: Sequence[Source], buffer: memoryview) -> Iterator[memoryview]:
    """Yield the first page of each piece, valid until the next one is taken; arguments as `first_page_digests`."""
    pages_per_batch = len(buffer) // PAGE_BYTES
    for first in range(0, len(items), pages_per_batch):
        batch = items[first : first + pages_per_batch]
        pages = [buffer[PAGE_BYTES * number :][: min(item.bytes, PAGE_BYTES)] for number, item in enumerate(batch)]
        with ExitStack() as copies:
            for item, page in zip(batch, pages, strict=True):
                ticket = sources[item.shard_number].copy_into(item.region, 0, len(page), page)
                # After a failure wait for the other copies. The failed copy may still write into the buffer, so the
                # lender must not reuse the buffer.
                copies.callback(ticket.wait)
        yield from pages
