"""What was written into each item of a `.distcp` file, read in as few reads as can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.dcp.archive_template import UNKNOWN, ArchiveTemplate
from holdfast.foreign.dcp.metadata import Chunk, Item, Saved
from holdfast.foreign.dcp.prefetch import TailPrefetch, batches
from holdfast.foreign.huggingface.safetensors_reader import SafetensorsEntry, read_header
from holdfast.foreign.pickles.reader import unpickled
from holdfast.foreign.pickles.tensors import StoredTensor, row_major_strides
from holdfast.foreign.read import read_bytes
from holdfast.foreign.torch.archive_reader import read_torch_file
from holdfast.geometry.box import Box
from holdfast.geometry.tensor import TensorSpec
from holdfast.geometry.value_class import value_class
from holdfast.ports.store import Readable
from holdfast.settings import MIB
from holdfast.types.listing import ListedPiece

ALSO = ("_io.BytesIO",)
"""Classes that occur in objects of a training state beside those that are known: Transformer Engine's extra state."""

_ARCHIVE, _PICKLE = b"PK\x03\x04", b"\x80"
_PICKLE_BYTES_MAX = 64 * MIB
"""What values of a checkpoint may take in all."""


@value_class
class DcpItem:
    """An item, read."""

    key: str
    """What was written."""

    item: Item
    """Where."""

    chunk: Chunk | None
    """Which part of the tensor of that name; None for an object."""

    value: object
    """What was unpickled: a `StoredTensor` for a chunk, if all is well. None for a chunk that is not in an archive."""


def read_items(files: Readable, saved: Saved, where: str, sizes: dict[str, int]) -> Iterator[DcpItem]:
    """Yield what was written into every item, file by file.

    Args:
        files: Where they lie.
        saved: Which items there are.
        where: The file that tells, for messages.
        sizes: Takes the bytes of each file.
    Raises:
        CorruptError: An item is damaged or cut short, or two lie over each other.
        InvalidError: An object is of a type that is not read.
        MissingError: A file is not there.
    """
    by_file: dict[str, list[tuple[Item, str, Chunk | None]]] = defaultdict(list)
    for key, chunks in saved.chunks.items():
        for each in chunks:
            by_file[each.item.file].append((each.item, key, each))
    for key, item in saved.objects.items():
        by_file[item.file].append((item, key, None))
    reader = _Reader(TailPrefetch(files))
    for file, entries in by_file.items():
        entries.sort(key=lambda entry: (entry[0].start, entry[0].stop))
        place = f"{files.url}/{file}"
        sizes[file] = reader.windows.size(file)
        bounds = _bounds([item for item, _, _ in entries], sizes[file], place, where)
        reached = 0
        for run, ranges in batches(bounds):
            reader.windows.hold(file, ranges)
            for item, key, chunk in entries[run]:
                if reader.begins_archive(item):
                    if item.start < reached:
                        raise CorruptError(f"{place}: {where} says that two things begin at byte {item.start}")
                    reached = item.stop
                    value = reader.archived(item)
                elif chunk is not None:
                    value = reader.in_blob(item, key, chunk.box, sizes[file])
                else:
                    value = reader.pickled(item, f"{place}: {key}")
                yield DcpItem(key, item, chunk, value)


def _bounds(items: list[Item], size: int, file: str, where: str) -> list[tuple[int, int]]:
    """Return the byte ranges of a file's items, which are in order.

    Those of a safetensors blob state where the blob begins and how long each is; then they all begin at one byte.
    """
    bounds = [(item.start, item.stop) for item in items]
    reached = -1
    for at, (start, stop) in enumerate(bounds):
        if stop > size:
            raise CorruptError(
                f"{file}: ends at byte {size}; {where} says that there is something at {start}–{stop}. "
                "Was it cut short?"
            )
        if start < reached and start != bounds[at - 1][0]:
            raise CorruptError(
                f"{file}: {where} says that one thing ends at byte {reached}, and another starts at {start}. "
                "Read another copy"
            )
        reached = max(reached, stop)
    return bounds


class _Reader:
    """Reads items of the file that is held in windows."""

    def __init__(self, windows: TailPrefetch) -> None:
        self.windows = windows
        self._alike = ArchiveTemplate()
        self._blobs: dict[tuple[str, int], dict[str, SafetensorsEntry]] = {}

    def begins_archive(self, item: Item) -> bool:
        """Return whether an item is what torch.save writes."""
        return self.windows.held(item.start, item.start + 4) == _ARCHIVE

    def archived(self, item: Item) -> object:
        """Return what lies in an archive."""
        value = self._alike.value(self.windows, item)
        if value is UNKNOWN:
            value = read_torch_file(self.windows, item.file, start=item.start, stop=item.stop, also=ALSO).value
            self._alike.learn(self.windows, item, value)
        return value

    def pickled(self, item: Item, where: str) -> object:
        """Return an object that was pickled without an archive around it.

        Raises:
            CorruptError: It was not.
        """
        head = self.windows.held(item.start, item.start + 1)
        if head != _PICKLE:
            raise CorruptError(f"{where}: begins with {head!r} at byte {item.start}; expected what torch.save writes")
        data = read_bytes(self.windows, item.file, item.start, item.stop, _PICKLE_BYTES_MAX)
        return unpickled(data, f"{where}, at byte {item.start}", also=ALSO)

    def in_blob(self, item: Item, key: str, box: Box, size: int) -> StoredTensor:
        """Return a tensor of the safetensors blob that `SerializationFormat.SAFETENSORS` puts at the end of a file.

        Raises:
            CorruptError: It is not there: of several chunks of a tensor that a rank wrote, DCP kept the last.
        """
        blob = self._blobs.get((item.file, item.start))
        if blob is None:
            header = read_header(self.windows, item.file, item.start, size)
            blob = self._blobs[item.file, item.start] = {entry.name: entry for entry in header.entries}
        found = blob.get(key)
        if found is None or (found.is_shard and found.box != box):
            raise CorruptError(
                f"{self.windows.url}/{item.file}: the tensors from byte {item.start} on have no {key} at {box.start}. "
                "DCP loses all but the last part of a tensor that one rank writes as safetensors"
            )
        shape = found.box.shape
        return StoredTensor(found.dtype, shape, row_major_strides(shape), item.file, found.start, key, storage_offset=0)


def piece_of(found: DcpItem, spec: TensorSpec, where: str) -> ListedPiece:
    """Return where the elements of a chunk lie.

    Args:
        found: An item that holds one.
        spec: The tensor it is of.
        where: The file, for messages.
    Raises:
        CorruptError: What was written is not the chunk that is stated.
        InvalidError: Its elements are in another order than row by row.
    """
    assert found.chunk is not None
    box, value = found.chunk.box, found.value
    if not isinstance(value, StoredTensor):
        raise CorruptError(f"{where}: at byte {found.item.start} lies {type(value).__name__}; expected a tensor")
    if value.dtype != spec.dtype or value.shape != box.shape:
        raise CorruptError(
            f"{where}: at byte {found.item.start} lies {value.dtype} {list(value.shape)}; "
            f"expected {spec.dtype} {list(box.shape)}"
        )
    if not value.is_contiguous:
        raise InvalidError(
            f"{where}: is stored with strides {list(value.strides)} for shape {list(value.shape)}; Holdfast reads "
            "elements in row-major order. Load it with torch.distributed.checkpoint and save it .contiguous()"
        )
    return ListedPiece(box, value.file, value.offset)
