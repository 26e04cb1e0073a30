"""What was written into each item of a `.distcp` file, read in as few reads as can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from holdfast.errors import CorruptError, InvalidError
from holdfast.formats.dcp.alike import UNKNOWN, Alike
from holdfast.formats.dcp.metadata import Chunk, Item, Saved
from holdfast.formats.dcp.windows import Windows, batches
from holdfast.formats.pickled import unpickled
from holdfast.formats.reading import read_bytes
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.formats.torch_zip import read_torch_file
from holdfast.ports.store import Readable
from holdfast.settings import MIB
from holdfast.spec.listing import ListedPiece
from holdfast.spec.noun import noun
from holdfast.spec.tensor import TensorSpec

ALSO = ("_io.BytesIO",)
"""Classes that occur in objects of a training state beside those that are known: Transformer Engine's extra state."""

_ARCHIVE, _PICKLE = b"PK\x03\x04", b"\x80"
_PICKLE_BYTES_MAX = 64 * MIB
"""What values of a checkpoint may take in all."""



@noun
class Found:
    """An item, read."""

    key: str
    """What was written."""

    item: Item
    """Where."""

    chunk: Chunk | None
    """Which part of the tensor of that name; None for an object."""

    value: object
    """What was unpickled: a `StoredTensor` for a chunk, if all is well. None for a chunk that is not in an archive."""


def read_items(files: Readable, saved: Saved, where: str, sizes: dict[str, int]) -> Iterator[Found]:
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
        for chunk in chunks:
            by_file[chunk.item.file].append((chunk.item, key, chunk))
    for key, item in saved.objects.items():
        by_file[item.file].append((item, key, None))
    windows = Windows(files)
    alike = Alike()
    for file, entries in by_file.items():
        entries.sort(key=lambda entry: (entry[0].start, entry[0].stop))
        sizes[file] = windows.size(file)
        bounds = _bounds([entry[0] for entry in entries], sizes[file], f"{files.url}/{file}", where)
        for run, ranges in batches(bounds):
            windows.hold(file, ranges)
            for item, key, chunk in entries[run]:
                yield Found(key, item, chunk, _value(windows, item, chunk is not None, alike, f"{files.url}/{file}: {key}"))


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
            raise CorruptError(f"{file}: {where} says that one thing ends at byte {reached}, and another starts at {start}")
        reached = max(reached, stop)
    return bounds


def _value(windows: Windows, item: Item, is_chunk: bool, alike: Alike, where: str) -> object:
    """Return what was written into an item."""
    head = windows.held(item.start, item.start + 4)
    if head == _ARCHIVE:
        value = alike.value(windows, item)
        if value is UNKNOWN:
            value = read_torch_file(windows, item.file, start=item.start, stop=item.stop, also=ALSO).value
            alike.learn(windows, item, value)
        return value
    if is_chunk:
        return None
    if head[:1] != _PICKLE:
        raise CorruptError(f"{where}: begins with {head!r} at byte {item.start}; expected what torch.save writes")
    data = read_bytes(windows, item.file, item.start, item.stop, _PICKLE_BYTES_MAX)
    return unpickled(data, f"{where}, at byte {item.start}", also=ALSO)


def piece_of(found: Found, spec: TensorSpec, where: str) -> ListedPiece:
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
