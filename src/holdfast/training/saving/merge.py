"""Merges the parts of all ranks into one index and one state, and proves that every tensor is covered exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from holdfast.base.types.manifest import FileRecord, OptimizerRecord
from holdfast.base.types.values import Group, Value
from holdfast.core.engine.gc_pause import GcPause
from holdfast.core.engine.parallel_map import CALLS_AT_ONCE, ordered_parallel_map
from holdfast.core.format.index.index import Index, IndexMerger
from holdfast.core.format.index.index_checks import require_pairs
from holdfast.core.format.index.tensor_table import TensorTables
from holdfast.core.format.names import part_name
from holdfast.core.format.part import RankPart, decode_part, require_part_of
from holdfast.core.format.state_order import names_of, numbers_of, paths_of, unless_ascending
from holdfast.core.format.values import values
from holdfast.errors import CorruptError, InvalidError, first_three
from holdfast.stored.checkpoint.coverage import uncovered_names
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.checkpoint.pack_sizes import require_sizes
from holdfast.stored.repository.catalog import read_file
from holdfast.training.coordination.commit_vote import Vote
from holdfast.training.saving.health.health_findings import Findings

_PARTS_PER_BATCH = 64
"""Parts decoded in one garbage-collector pause."""

_OBJECTS_AT_ONCE = 64
"""Parts that are read at once from a store of objects: each read takes a round trip, and every rank has a part."""


_Order = tuple[bytes, Sequence[str], list[str]]
"""Numbers of the names in a part, its FQNs, and its other names."""


@dataclass(frozen=True, slots=True)
class MergedParts:
    """The merged parts of all ranks."""

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
    """Health findings of the ranks."""

    optimizers: dict[str, OptimizerRecord]
    """Class and state keys of each optimizer, by path."""

    order: bytes
    """Numbers of names in the order of the state, as the manifest has them."""


def merge_parts(location: CheckpointLocation, attempt: str, votes: Sequence[Vote], chunk_bytes: int) -> MergedParts:
    """Read the part of every rank, prove that the parts form a whole, and return the merged parts.

    Reading every part back makes an unreadable file fail this save, not a later load.

    Raises:
        InvalidError: Pieces do not cover a tensor exactly once, or ranks describe one tensor differently.
        CorruptError: A part or pack differs from the vote of its rank, or a piece lacks its pair.
    """
    merging = IndexMerger(chunk_bytes)
    packs: list[FileRecord] = []
    tree = Group("dict", {})
    aliases: dict[str, str] = {}
    layouts: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {}
    findings = Findings()
    optimizers: dict[str, OptimizerRecord] = {}
    orders: list[_Order] = []
    records = [FileRecord(part_name(rank), vote.part_bytes, vote.part_digest) for rank, vote in enumerate(votes)]
    files = ordered_parallel_map(
        lambda record: read_file(location.store, location.folder, attempt, record),
        records,
        _OBJECTS_AT_ONCE if location.store.traits.appears_whole else CALLS_AT_ONCE,
    )
    for rank, part in enumerate(_decoded(records, files)):
        require_part_of(part, rank, attempt, location.url)
        merging.add(part.index, f"{location.url}: rank {rank}")
        packs += part.packs
        for path, record in part.optimizers.items():
            optimizers[path] = _joined(optimizers.get(path, record), record)
        findings.add(rank, part.counted, part.replicas)
        for alias, fqn in part.aliases.items():
            aliases.setdefault(alias, fqn)
        for mesh, placements, count in part.layouts:
            layouts[mesh, placements] = max(count, layouts.get((mesh, placements), 0))
        if part.tree is not None:
            own_tree = _tree_in(part.tree, rank, location.url)
            # Take the names before the merge, which adds the items of others to this tree.
            others = [*part.aliases, *paths_of(own_tree), *part.order_names]
            orders.append((part.order, part.index.table.fqns, others))
            _merge_into(tree.items, own_tree.items)
    with GcPause():
        index = merging.merged()
        require_exact_cover(index, int(attempt, 16) >> 8, location.url)
        require_pairs(index, location.url)
    packs = _without_repeats(packs, location.url)
    require_sizes(packs, location.packs_in(attempt), location.step, are_voted=True)
    numbers = index.table.numbers if aliases else {}
    stored = {alias: fqn for alias, fqn in aliases.items() if fqn in numbers and alias not in numbers}
    return MergedParts(
        index,
        tuple(packs),
        tuple(records),
        tree,
        stored,
        _provenance_of(layouts),
        findings,
        optimizers,
        unless_ascending(_order_of(orders, index.table.fqns, [*stored, *paths_of(tree)], location.url)),
    )


def _order_of(orders: Sequence[_Order], tensors: Sequence[str], others: list[str], where: str) -> bytes:
    """Return the numbers of the names of all parts, a lower rank first; arguments as `numbers_of`."""
    if len(orders) == 1 and orders[0][2] == others and len(orders[0][1]) == len(tensors):
        return orders[0][0]  # The part has the same names, so the same numbers.
    names: dict[str, None] = {}
    for order in orders:
        names |= dict.fromkeys(names_of(*order, where))
    return numbers_of(names, tensors, others)


def _provenance_of(layouts: Mapping[tuple[tuple[int, ...], tuple[str, ...]], int]) -> tuple[dict[str, object], ...]:
    return tuple(
        {"mesh": list(mesh), "placements": list(placements), "tensors": count}
        for (mesh, placements), count in sorted(layouts.items())
    )


def _tree_in(data: bytes, rank: int, where: str) -> Group:
    tree = values.decode(values.loads(data), "")
    if not isinstance(tree, Group):
        raise CorruptError(
            f"{where}: the part of rank {rank} holds no state; expected the root of its values. Save again"
        )
    return tree


def _joined(first: OptimizerRecord, second: OptimizerRecord) -> OptimizerRecord:
    """Return the record of an optimizer that two classes of ranks share in parts."""
    names = {*first.class_name.split("+"), *second.class_name.split("+")}
    return OptimizerRecord("+".join(sorted(names)), tuple(sorted({*first.state_keys, *second.state_keys})))


def _decoded(records: Sequence[FileRecord], files: Iterator[bytes]) -> Iterator[RankPart]:
    """Decode part files, batch by batch; yield the parts."""
    tables = TensorTables()
    for first in range(0, len(records), _PARTS_PER_BATCH):
        batch = records[first : first + _PARTS_PER_BATCH]
        # Read before the pause: Python's garbage collector must not stay paused while storage is slow.
        contents = list(islice(files, len(batch)))
        with GcPause():
            parts = [decode_part(data, record.name, tables) for record, data in zip(batch, contents, strict=True)]
        yield from parts


def require_exact_cover(index: Index, seed: int, where: str) -> None:
    """Refuse an index whose pieces do not cover every tensor exactly once.

    Raises:
        InvalidError: A tensor has gaps or overlaps; names three such tensors and the pieces.
    """
    wrong = uncovered_names(index, seed)
    if wrong:
        descriptions = [f"{fqn} {list(index.tensors[fqn].global_shape)}" for fqn in wrong]
        for number, fqn in enumerate(wrong[:3]):
            pieces = first_three(f"{p.region.start}–{p.region.stop} in {p.pack}" for p in index.pieces_of(fqn))
            descriptions[number] += f": {pieces or 'nothing'}"
        raise InvalidError(
            f"{where}: the pieces of all ranks do not cover {len(wrong)} tensors exactly once: "
            f"{first_three(descriptions)}. Expected every element from one rank. Declared parts overlap or "
            "leave gaps, or a rank is missing: correct start= or flat_start= of holdfast.Sharded, and pass a "
            "process_group of all ranks"
        )


def _without_repeats(packs: Sequence[FileRecord], where: str) -> list[FileRecord]:
    """Return packs without repeats: several ranks may refer to one pack of an earlier step.

    Raises:
        CorruptError: Two ranks record different sizes or digests of one pack.
    """
    known: dict[str, FileRecord] = {}
    for pack in packs:
        other = known.setdefault(pack.name, pack)
        if other != pack:
            raise CorruptError(
                f"{where}: one rank records {pack.name} with {pack.bytes} bytes and digest {pack.digest}, another with "
                f"{other.bytes} bytes and digest {other.digest}; expected one pack. Save again"
            )
    return list(known.values())


def _merge_into(items: dict[str, Value], others: dict[str, Value]) -> None:
    """Add the values of a higher rank; where both have a value, the value of the lower rank stays."""
    for key, other in others.items():
        first = items.get(key)
        if key not in items:
            items[key] = other
        elif isinstance(first, Group) and isinstance(other, Group) and first.kind == other.kind:
            if first.kind == "optimizer":
                for name, table in other.items.items():
                    merged = first.items.setdefault(name, {})
                    if isinstance(merged, dict) and isinstance(table, dict):
                        first.items[name] = {**table, **merged}
            elif first.kind != "stateful":
                # A Stateful owns its layout: values mixed from two ranks could be a state that no rank had.
                _merge_into(first.items, other.items)
