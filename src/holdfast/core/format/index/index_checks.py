"""Checks of an index against its manifest: totals, offsets in packs, and the tensors that a short pack damages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.base.geometry.dtype import MASTER_TYPE, WEIGHT_TYPES
from holdfast.base.ports.codec import RAW_PER_STORED_MAX
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.index.index import Index, IndexMerger
from holdfast.core.format.index.index_file import decode_index
from holdfast.core.format.index.overview import Overview, decode_overview
from holdfast.core.format.index.tensor_table import TensorTable
from holdfast.core.format.names import MANIFEST_FILE, OVERVIEW_FILE, is_coded_pack_name, is_file_url
from holdfast.errors import CheckpointError, CorruptError, InvalidError


def index_from(manifest: Manifest, files: Sequence[bytes], where: str) -> Index:
    """Return the index of a checkpoint from its index files, checked against the manifest.

    Args:
        manifest: The commit record.
        files: Content of its `index_files`.
        where: Folder of the checkpoint, for messages.
    Raises:
        CorruptError: A file is not an index, two files list one tensor, or a piece is outside its pack.
    """
    overview = None if manifest.overview is None else overview_from(manifest, files[-1], where)
    indexes = [
        decode_index(data, f"{where}{manifest.attempt}/{record.name}")
        for data, record in zip(files[: len(manifest.indexes)], manifest.indexes, strict=True)
    ]
    if not indexes:
        raise CorruptError(f"{where}: the manifest names no index. Read another copy")
    if overview is not None:
        for number, (index, record) in enumerate(zip(indexes, manifest.indexes, strict=True)):
            overview.require_within(number, index, f"{where}{manifest.attempt}/{record.name}")
        index = _merged(indexes, overview.table, f"{where}{manifest.attempt}")
    elif len(indexes) > 1:
        listed = [fqn for index in indexes for fqn in index.tensors]
        if len(set(listed)) < len(listed):
            raise CorruptError(f"{where}{manifest.attempt}: two index files list one tensor. Read another copy")
        index = _merged(indexes, None, f"{where}{manifest.attempt}")
    else:
        index = indexes[0]
    require_places(index, manifest, where)
    require_pairs(index, f"{where}{manifest.attempt}")
    _require_totals(index.table, manifest, where)
    return index


def overview_from(manifest: Manifest, data: bytes, where: str) -> Overview:
    """Return the overview of a checkpoint from its file, checked against the manifest.

    Raises:
        CorruptError: The file is not an overview, or claims more bytes than the packs hold.
    """
    overview = decode_overview(data, len(manifest.indexes), f"{where}{manifest.attempt}/{OVERVIEW_FILE}")
    _require_totals(overview.table, manifest, where)
    pack_bytes = sum(pack.bytes for pack in manifest.packs)
    coded_bytes = sum(pack.bytes for pack in manifest.packs if is_coded_pack_name(pack.name))
    # Only a whole index proves the shapes. A reader of one part must not allocate memory for a false shape.
    if manifest.tensor_bytes > pack_bytes + (RAW_PER_STORED_MAX - 1) * coded_bytes:
        raise CorruptError(
            f"{where}{MANIFEST_FILE}: {manifest.tensor_bytes} bytes of tensors in packs of {pack_bytes} bytes, "
            f"{coded_bytes} of them coded. Read another copy"
        )
    return overview


def _merged(indexes: Sequence[Index], table: TensorTable | None, where: str) -> Index:
    merging = IndexMerger(indexes[0].chunk_bytes, table)
    try:
        for index in indexes:
            merging.add(index, where)
    except InvalidError as error:
        raise CorruptError(str(error)) from error
    return merging.merged()


def require_places(index: Index, manifest: Manifest, where: str) -> None:
    """Refuse pieces beyond the end of their packs, and pieces that share a byte of a pack that Holdfast wrote.

    Raises:
        CorruptError: The message names the first such piece.
    """
    pieces = index.pieces
    known = {pack.name: pack.bytes for pack in manifest.packs}
    # A pack that the manifest does not name gets size -1, so that every piece in it is beyond its end.
    ends = np.array([min(known.get(name, -1), np.iinfo(np.int64).max) for name in index.packs], dtype=np.int64)
    room = ends[pieces.packs] - pieces.stored
    beyond = pieces.offsets > room
    if beyond.any():
        at = int(beyond.argmax())
        pack = index.packs[int(pieces.packs[at])]
        fqn = list(index.tensors)[int(pieces.tensors[at])]
        start = int(pieces.offsets[at])
        raise CorruptError(
            f"{where}{manifest.attempt}/{pack}: {fqn} at bytes {start}–{start + int(pieces.stored[at])}; "
            f"expected it within the {known.get(pack)} bytes of the pack. Read another copy"
        )
    filled = np.flatnonzero(pieces.stored)
    order = filled[np.lexsort((pieces.offsets[filled], pieces.packs[filled]))]
    stops = pieces.offsets[order] + pieces.stored[order]
    # Referenced files of other systems may store tied tensors once, so pieces may share bytes there.
    is_ours = np.array([not is_file_url(name) for name in index.packs], dtype=bool)[pieces.packs[order]]
    same_pack = pieces.packs[order][1:] == pieces.packs[order][:-1]
    shared = is_ours[1:] & same_pack & (pieces.offsets[order][1:] < stops[:-1])
    if shared.any():
        at = int(order[1:][int(shared.argmax())])
        name, byte = index.packs[int(pieces.packs[at])], int(pieces.offsets[at])
        raise CorruptError(
            f"{where}{manifest.attempt}/{name}: two pieces hold byte {byte}; expected one. Read another copy"
        )


def require_pairs(index: Index, where: str, *, whole: bool = True) -> None:
    """Refuse pieces that are coded against a pair that they cannot have.

    Args:
        index: The index.
        where: The checkpoint, for messages.
        whole: Whether it lists every piece of the checkpoint. If not, a pair may be in an index file that was not read.
    Raises:
        CorruptError: A pair is missing, of another shape or element type, coded against a pair itself, or the pair of
            two pieces. The message names the first such piece.
    """
    pieces, coding, fqns = index.pieces, index.pieces.coding, index.table.fqns
    if coding is None or not coding.pairs.any():
        return
    asking = np.flatnonzero(coding.pairs)
    pairs = index.pair_pieces[asking]
    lacking = asking[pairs < 0]
    if whole and len(lacking):
        at = int(lacking[0])
        pair_fqn = coding.pair_fqns[int(coding.pairs[at]) - 1]
        raise CorruptError(
            f"{where}: {fqns[int(pieces.tensors[at])]} is coded against {pair_fqn[:200]}, of which no piece has its "
            "region; expected one. Read another copy"
        )
    asking, pairs = asking[pairs >= 0], pairs[pairs >= 0]
    tensors = np.unique(np.stack((pieces.tensors[asking], pieces.tensors[pairs])), axis=1)
    for number, pair_number in tensors.T.tolist():
        tensor, pair = index.table.specs[fqns[number]], index.table.specs[fqns[pair_number]]
        # What is coded against a pair is of 32 bits, so no pair is coded against a pair: there are no circles.
        is_of_types = tensor.dtype == MASTER_TYPE and pair.dtype in WEIGHT_TYPES
        if not is_of_types or pair.global_shape != tensor.global_shape:
            raise CorruptError(
                f"{where}: {tensor.fqn}, {tensor.dtype} of shape {tensor.global_shape}, is coded against {pair.fqn}, "
                f"{pair.dtype} of shape {pair.global_shape}; expected float32, and 16 bits of the same shape. Read "
                "another copy"
            )
    shared, counts = np.unique(pairs, return_counts=True)
    if (counts > 1).any():
        fqn = fqns[int(pieces.tensors[int(shared[int(counts.argmax())])])]
        raise CorruptError(f"{where}: two pieces are coded against one piece of {fqn}. Read another copy")


def _require_totals(table: TensorTable, manifest: Manifest, where: str) -> None:
    for alias, fqn in manifest.aliases.items():
        if fqn not in table.numbers or alias in table.numbers:
            raise CorruptError(
                f"{where}{MANIFEST_FILE}: {alias} is tied to {fqn}; expected a stored tensor. Read another copy"
            )
    if (table.count, table.bytes) != (manifest.tensors, manifest.tensor_bytes):
        raise CorruptError(
            f"{where}{manifest.attempt}: {table.count} tensors of {table.bytes} bytes in the index; "
            f"the manifest says {manifest.tensors} of {manifest.tensor_bytes}. Read another copy"
        )


def cut_short(index: Index, short: Mapping[str, tuple[int, CheckpointError]]) -> dict[str, CheckpointError]:
    """Return the error of each tensor with a piece beyond the end of a short pack, by FQN.

    Args:
        index: The index.
        short: Readable bytes and error of each short pack, by name.
    """
    pieces, packs, names = index.pieces, index.packs, list(index.tensors)
    cut = np.array([name in short for name in packs], dtype=bool)
    ends = np.array([short[name][0] if name in short else 0 for name in packs], dtype=np.int64)
    beyond = np.flatnonzero(cut[pieces.packs] & (pieces.offsets > ends[pieces.packs] - pieces.stored))
    tensors, first = np.unique(pieces.tensors[beyond], return_index=True)
    first_packs = zip(tensors.tolist(), pieces.packs[beyond[first]].tolist(), strict=True)
    return {names[tensor]: short[packs[pack]][1] for tensor, pack in first_packs}
