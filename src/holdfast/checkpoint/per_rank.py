"""Reads per-rank values, which each rank saved for itself."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import CorruptError, MissingError
from holdfast.format.names import part_name
from holdfast.format.part import decode_part, require_part_of
from holdfast.format.values import values
from holdfast.ports.store import Store
from holdfast.repository.catalog import read_file
from holdfast.types.manifest import Manifest
from holdfast.types.values import Value


def per_rank_values(store: Store, folder: str, manifest: Manifest, rank: int) -> Mapping[str, Value]:
    """Return the per-rank values of one of the ranks that saved, by path.

    Raises:
        MissingError: Fewer ranks saved the checkpoint.
        CorruptError: The rank's part differs from what was saved.
    """
    record = next((part for part in manifest.parts if part.name == part_name(rank)), None)
    if record is None:
        raise MissingError(f"{store.url}/{folder}: no part of rank {rank}; {manifest.world_size} ranks saved it")
    part = decode_part(read_file(store, folder, manifest.attempt, record), record.name)
    require_part_of(part, rank, manifest.attempt, f"{store.url}/{folder}{record.name}")
    by_path = values.decode(values.loads(part.per_rank), "") if part.per_rank is not None else {}
    if not isinstance(by_path, dict):
        raise CorruptError(
            f"{store.url}/{folder}{record.name}: per-rank values are {type(by_path).__name__}; expected a dict"
        )
    return {str(path): value for path, value in by_path.items()}
