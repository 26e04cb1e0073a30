"""Reads the items of `.distcp` files with few large reads."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator

from holdfast.backends.foreign.dcp.archive_template import UNKNOWN, ArchiveTemplate
from holdfast.backends.foreign.dcp.metadata import Item, Saved
from holdfast.backends.foreign.dcp.prefetch import TailPrefetch, batches
from holdfast.backends.foreign.huggingface.safetensors_reader import SafetensorsEntry, read_header
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.backends.foreign.pickles.tensors import StoredTensor, row_major_strides
from holdfast.backends.foreign.read import read_bytes
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.geometry.value_class import value_class
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ListedPiece
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import MIB

ALSO = ("_io.BytesIO",)
"""Classes that a pickle may name besides the allowlist: Transformer Engine's extra state is a BytesIO."""

_ARCHIVE, _PICKLE = b"PK\x03\x04", b"\x80"
_PICKLE_BYTES_MAX = 64 * MIB
"""Largest pickled object of a checkpoint."""


@value_class
class DcpItem:
    """An item and its value."""

    key: str
    """Key of the item in the state."""

    item: Item
    """Its bytes."""

    box: Box | None
    """The part of the tensor that it holds; None for an object."""

    value: object
    """The unpickled value: for a chunk, a `StoredTensor` unless the file is damaged."""


def read_items(
    files: Readable, saved: Saved, where: str, sizes: dict[str, int], archives: defaultdict[str, array[int]]
) -> Iterator[DcpItem]:
    """Yield every item with its value, file by file.

    Args:
        files: The folder.
        saved: The content of `.metadata`, which lists the items.
        where: The `.metadata` file, for messages.
        sizes: Receives the bytes of each file.
        archives: Receives by file the first byte and the byte past the end of each item that `torch.save` wrote.
    Raises:
        CorruptError: An item is damaged or cut short, or two items overlap.
        InvalidError: An object is of a type that is not supported.
        MissingError: A file does not exist.
    """
    by_file: dict[str, list[tuple[Item, str, Box | None]]] = defaultdict(list)
    for key, chunks in saved.chunks.items():
        for box, item in chunks:
            by_file[item.file].append((item, key, box))
    for key, item in saved.objects.items():
        by_file[item.file].append((item, key, None))
    prefetch = TailPrefetch(files)
    reader = _Reader(prefetch)
    for file, entries in by_file.items():
        entries.sort(key=lambda entry: (entry[0].start, entry[0].stop))
        url = f"{files.url}/{file}"
        sizes[file] = prefetch.size(file)
        bounds = _bounds([item for item, _, _ in entries], sizes[file], url, where)
        reached = 0
        for run, ranges in batches(bounds):
            # One read brings both ends of many items; `read_torch_file` and `zip_entries` are then served from memory.
            prefetch.hold(file, ranges)
            for item, key, part in entries[run]:
                if prefetch.held(item.start, item.start + 4) == _ARCHIVE:
                    if item.start < reached:
                        raise CorruptError(
                            f"{url}: {where} has two items that begin at byte {item.start}; expected one"
                        )
                    reached = item.stop
                    archives[item.file].extend((item.start, item.stop))
                    value = reader.archived(item)
                elif part is not None:
                    value = reader.in_blob(item, key, part, sizes[file])
                else:
                    value = reader.pickled(item, f"{url}: {key}")
                yield DcpItem(key, item, part, value)


def _bounds(items: list[Item], size: int, file: str, where: str) -> list[tuple[int, int]]:
    """Return the byte ranges of a file's items, which are ascending.

    All items of a safetensors blob begin at one byte: DCP states the start of the blob and the length of each tensor.
    """
    bounds = [(item.start, item.stop) for item in items]
    reached = -1
    for at, (start, stop) in enumerate(bounds):
        if stop > size:
            raise CorruptError(f"{file}: ends at byte {size}; {where} states bytes {start}–{stop}. Was it cut short?")
        # Items that start at one byte are tensors of one blob; any other overlap is damage.
        if start < reached and start != bounds[at - 1][0]:
            raise CorruptError(
                f"{file}: {where} states an item that ends at byte {reached}, and another starts at {start}. "
                "Read another copy"
            )
        reached = max(reached, stop)
    return bounds


class _Reader:
    """Reads items of one file from its held ranges."""

    def __init__(self, prefetch: TailPrefetch) -> None:
        self._prefetch = prefetch
        self._template = ArchiveTemplate()
        self._blobs: dict[tuple[str, int], dict[str, SafetensorsEntry]] = {}

    def archived(self, item: Item) -> object:
        """Return the value of an archive."""
        value = self._template.value(self._prefetch, item)
        if value is UNKNOWN:
            value = read_torch_file(self._prefetch, item.file, start=item.start, stop=item.stop, also=ALSO)
            self._template.learn(self._prefetch, item, value)
        return value

    def pickled(self, item: Item, where: str) -> object:
        """Return an object that was pickled outside an archive.

        Raises:
            CorruptError: The item is not a pickle.
        """
        head = self._prefetch.held(item.start, item.start + 1)
        if head != _PICKLE:
            raise CorruptError(f"{where}: begins with {head!r} at byte {item.start}; expected a pickle or an archive")
        data = read_bytes(self._prefetch, item.file, item.start, item.stop, _PICKLE_BYTES_MAX)
        return unpickled(data, f"{where}, at byte {item.start}", also=ALSO)

    def in_blob(self, item: Item, key: str, box: Box, size: int) -> StoredTensor:
        """Return a tensor of the safetensors blob that `SerializationFormat.SAFETENSORS` appends to a file.

        Raises:
            CorruptError: The blob lacks it. If a rank writes several chunks of a tensor, DCP keeps only the last.
        """
        blob = self._blobs.get((item.file, item.start))
        if blob is None:
            tensors, _ = read_header(self._prefetch, item.file, item.start, size)
            blob = self._blobs[item.file, item.start] = {tensor.name: tensor for tensor in tensors}
        entry = blob.get(key)
        if entry is None or (entry.is_shard and entry.box != box):
            raise CorruptError(
                f"{self._prefetch.url}/{item.file}: the tensors from byte {item.start} on have no {key} at "
                f"{box.start}. DCP loses all but the last part of a tensor that one rank writes as safetensors. Save "
                "it again with DCP's own writer"
            )
        shape = entry.box.shape
        return StoredTensor(entry.dtype, shape, row_major_strides(shape), item.file, entry.start, key)


def piece_of(entry: DcpItem, spec: TensorSpec, where: str) -> ListedPiece:
    """Return the bytes of a chunk.

    Args:
        entry: An item that holds a chunk.
        spec: The tensor of the chunk.
        where: File and key, for messages.
    Raises:
        CorruptError: The item holds another tensor than `.metadata` states.
        InvalidError: The elements are not in row-major order.
    """
    assert entry.box is not None
    box, value, start = entry.box, entry.value, entry.item.start
    if not isinstance(value, StoredTensor):
        raise CorruptError(f"{where}: byte {start} holds {type(value).__name__}; expected a tensor. Read another copy")
    if value.dtype != spec.dtype or value.shape != box.shape:
        raise CorruptError(
            f"{where}: byte {start} holds {value.dtype} {list(value.shape)}; "
            f"expected {spec.dtype} {list(box.shape)}. Read another copy"
        )
    if not value.is_contiguous:
        raise InvalidError(
            f"{where}: is stored with strides {list(value.strides)} for shape {list(value.shape)}; expected "
            "row-major order. Load it with torch.distributed.checkpoint and save it .contiguous()"
        )
    return ListedPiece(box, value.file, value.offset)
