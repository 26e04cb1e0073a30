"""What the committing rank writes: the index of all that the ranks wrote, and the manifest to be published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.manager.ballot import Vote
from holdfast.manager.collector import collector_paused
from holdfast.manager.merge import merged
from holdfast.manager.place import Place
from holdfast.manager.provenance import software_at_hand
from holdfast.repository.digest import hex_digest_of
from holdfast.repository.index_file import encode_index
from holdfast.repository.manifest import encode_manifest
from holdfast.repository.names import index_name
from holdfast.settings import Settings
from holdfast.spec.manifest import FileRecord, Manifest, Parent


def assembled(
    place: Place,
    attempt: str,
    votes: Sequence[Vote],
    note: Mapping[str, object],
    parent_of: Callable[[], Parent | None],
    settings: Settings,
    written: list[str],
) -> bytes:
    """Merge what every rank wrote, prove it whole, write its index, and return the manifest that names it all.

    Args:
        place: Where the checkpoint goes.
        attempt: The attempt that is to be published.
        votes: Every rank's vote, by rank.
        note: What the ranks were told of the place at the opening.
        parent_of: Returns the checkpoint that this one continues.
        settings: Chunks of the index, and how many go into one file of it.
        written: Told the key of every file before it is written.
    Raises:
        InvalidError: The parts do not make a whole.
        CorruptError: A part or pack is not what its rank voted for.
    """
    whole = merged(place, attempt, votes, settings.chunk_bytes)
    indexes = []
    with collector_paused():
        splits = list(whole.index.split(settings.index_chunks_max))
    for number, index in enumerate(splits):
        with collector_paused():
            data = encode_index(index)
        name = index_name(number)
        written.append(f"{place.folder}{attempt}/{name}")
        place.store.put_if_absent(written[-1], data)
        indexes.append(FileRecord(name, len(data), hex_digest_of(data)))
    return encode_manifest(
        Manifest(
            run_id=str(note["run_id"]),
            step=place.step,
            attempt=attempt,
            created=str(note["created"]),
            # Known only now: the save before was perhaps still being written when this one began.
            parent=parent_of(),
            world_size=len(votes),
            layouts=whole.layouts,
            software=software_at_hand(),
            tensors=len(whole.index.tensors),
            tensor_bytes=sum(tensor.global_bytes for tensor in whole.index.tensors.values()),
            aliases=whole.aliases,
            tree=whole.tree,
            packs=whole.packs,
            parts=whole.parts,
            indexes=tuple(indexes),
        )
    )
