"""What every rank wrote, merged into one index and one manifest, and proven whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from holdfast.checkpoint.coverage import uncovered_names
from holdfast.checkpoint.location import CheckpointLocation
from holdfast.coordination.commit_vote import Vote
from holdfast.engine.gc_pause import GcPause
from holdfast.engine.parallel_map import ordered_parallel_map
from holdfast.errors import CorruptError, InvalidError
from holdfast.format.index.index import Index, IndexMerger
from holdfast.format.index.tensor_table import TensorTables
from holdfast.format.names import part_name
from holdfast.format.part import RankPart, decode_part, require_part_of
from holdfast.format.values import values
from holdfast.ports.store import Packs
from holdfast.repository.catalog import check_pack, read_file
from holdfast.saving.health_findings import Findings
from holdfast.types.manifest import FileRecord
from holdfast.types.values import Group, Value

_DECODED_AT_ONCE = 64
"""Parts of a large job that are decoded one after the other without a pause."""


@dataclass(frozen=True, slots=True)
class MergedParts:
    """All parts as one."""

    index: Index
    """Every tensor and piece."""

    packs: tuple[FileRecord, ...]
    """Every pack."""

    parts: tuple[FileRecord, ...]
    """Every part."""

    tree: Group
    """The non-tensor state."""

    aliases: dict[str, str]
    """Tied names."""

    layouts: tuple[dict[str, object], ...]
    """Meshes and placements, as provenance."""

    findings: Findings
    """What the ranks found of its health."""


def merge_parts(location: CheckpointLocation, attempt: str, votes: Sequence[Vote], chunk_bytes: int) -> MergedParts:
    """Read every rank's part, this rank's own too, prove the whole, and return it.

    Whatever cannot be read back is refused here, and not by the load that needs it.

    Raises:
        InvalidError: Pieces do not cover a tensor exactly once, or ranks describe one tensor differently.
        CorruptError: A part or pack is not what its rank voted for.
    """
    merging = IndexMerger(chunk_bytes)
    packs: list[FileRecord] = []
    trees: list[Group] = []
    aliases: dict[str, str] = {}
    layouts: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {}
    findings = Findings()
    records = [FileRecord(part_name(rank), vote.part_bytes, vote.part_digest) for rank, vote in enumerate(votes)]
    files = ordered_parallel_map(lambda record: read_file(location.store, location.folder, attempt, record), records)
    for rank, part in enumerate(_decoded(records, files)):
        require_part_of(part, rank, attempt, location.url)
        merging.add(part.index, f"{location.url}: rank {rank}")
        packs += part.packs
        findings.add(rank, part.counted, part.replicas)
        for alias, fqn in part.aliases.items():
            aliases.setdefault(alias, fqn)
        for mesh, placements, count in part.layouts:
            layouts[mesh, placements] = max(count, layouts.get((mesh, placements), 0))
        if part.tree is not None:
            tree = values.decode(values.loads(part.tree), "")
            if not isinstance(tree, Group):
                raise CorruptError(f"{location.url}: the part of rank {rank} holds no state; expected its root")
            trees.append(tree)
    with GcPause():
        index = merging.merged()
        require_exact_cover(index, int(attempt, 16) >> 8, location.url)
    packs = _without_repeats(packs, location.url)
    require_sizes(location.packs_in(attempt), packs, location.step)
    provenance = tuple(
        {"mesh": list(mesh), "placements": list(placements), "tensors": count}
        for (mesh, placements), count in sorted(layouts.items())
    )
    numbers = index.table.numbers
    stored = {alias: fqn for alias, fqn in aliases.items() if fqn in numbers and alias not in numbers}
    return MergedParts(index, tuple(packs), tuple(records), merge_trees(trees), stored, provenance, findings)


def _decoded(records: Sequence[FileRecord], files: Iterator[bytes]) -> Iterator[RankPart]:
    """Yield the parts that files hold."""
    tables = TensorTables()
    for first in range(0, len(records), _DECODED_AT_ONCE):
        some = records[first : first + _DECODED_AT_ONCE]
        # Read first, for Python's collector is not to be held off while storage is waited for.
        read = list(islice(files, len(some)))
        with GcPause():
            parts = [decode_part(data, record.name, tables) for record, data in zip(some, read, strict=True)]
        yield from parts


def require_exact_cover(index: Index, seed: int, where: str) -> None:
    """Refuse an index whose pieces do not cover every tensor exactly once.

    Raises:
        InvalidError: Names the tensors and their pieces.
    """
    wrong = uncovered_names(index, seed)
    if wrong:
        said = []
        for fqn in wrong[:10]:
            boxes = ", ".join(f"{p.region.start}–{p.region.stop} in {p.pack}" for p in index.pieces_of(fqn)[:8])
            said.append(f"{fqn} {list(index.tensors[fqn].global_shape)}: {boxes or 'nothing'}")
        raise InvalidError(
            f"{where}: what the ranks hold does not cover {len(wrong)} tensors exactly once: {'; '.join(said)}. "
            "Expected every element from one rank. Ranks hold one name on different meshes, or a rank is missing "
            "from process_group"
        )


def _without_repeats(packs: Sequence[FileRecord], where: str) -> list[FileRecord]:
    """Return packs without repetition: several ranks may refer to one pack of another step.

    Raises:
        CorruptError: Two ranks say different things of one.
    """
    known: dict[str, FileRecord] = {}
    for pack in packs:
        other = known.setdefault(pack.name, pack)
        if other != pack:
            raise CorruptError(
                f"{where}: one rank says {pack.name} has {pack.bytes} bytes and digest {pack.digest}, another "
                f"{other.bytes} and {other.digest}; expected one pack. Save again"
            )
    return list(known.values())


def require_sizes(packs: Packs, records: Sequence[FileRecord], step: int | None) -> None:
    """Refuse to publish packs that are not there in full; arguments as `check_pack`."""
    for _ in ordered_parallel_map(lambda pack: check_pack(packs(pack.name), pack, step), records):
        pass


def merge_trees(trees: Sequence[Group]) -> Group:
    """Return several ranks' values as one tree: what only one has is kept, otherwise the lowest rank's."""
    result = Group("dict", {})
    for tree in trees:
        _merge_into(result.items, tree.items)
    return result


def _merge_into(items: dict[str, Value], others: dict[str, Value]) -> None:
    for key, other in others.items():
        own = items.get(key)
        if key not in items:
            items[key] = other
        elif isinstance(own, Group) and isinstance(other, Group) and own.kind == other.kind:
            if own.kind == "optimizer":
                for name, table in other.items.items():
                    mine = own.items.setdefault(name, {})
                    if isinstance(mine, dict) and isinstance(table, dict):
                        own.items[name] = {**table, **mine}
            elif own.kind != "stateful":
                _merge_into(own.items, other.items)
