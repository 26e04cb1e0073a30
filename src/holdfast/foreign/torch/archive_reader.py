"""Files of `torch.save`: their values, with every tensor where it lies in the file.

Such a file is a zip archive of a pickle, `<root>/data.pkl`, and the memory of each storage, `<root>/data/<key>`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.pickles.constructors import STORAGE_DTYPES
from holdfast.foreign.pickles.objects import GlobalName, UnsupportedPickle
from holdfast.foreign.pickles.reader import unpickled
from holdfast.foreign.pickles.tensors import StoredStorage, StoredTensor
from holdfast.foreign.read import read_bytes
from holdfast.foreign.torch.zip_reader import ZipEntry, zip_entries
from holdfast.geometry.dtype import DTYPES
from holdfast.ports.store import Readable
from holdfast.settings import MIB

__all__ = ["StoredStorage", "StoredTensor", "TorchFile", "read_torch_file"]

PICKLE_BYTES_MAX = 64 * MIB
"""Of what is not tensors in one file: some 300,000 tensors."""

LEGACY_HEAD = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""How files begin that torch saved before 1.6, or without `_use_new_zipfile_serialization`."""


_STORAGE_NAME_CHARACTERS_MAX = 200
"""Of which torch uses a few: storages are numbered."""

_UNTYPED = "uint8"
"""What torch takes a storage without a type for."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file of `torch.save`, read but for its tensors."""

    value: object
    """What was saved: plain values, `Instance` for objects of other classes, and `StoredTensor` for every tensor."""

    file: str
    """Its key."""

    file_bytes: int
    """Its size; of the whole file, where the archive is a part of it."""


def read_torch_file(
    files: Readable, key: str, *, also: Collection[str] = (), start: int = 0, stop: int | None = None
) -> TorchFile:
    """Return what a file of `torch.save` holds; nothing in it is run and no tensor read.

    Args:
        files: Where it lies.
        key: The file.
        also: Names of classes that become an `Instance`, see `unpickled`.
        start, stop: Bytes of the file that the archive fills, where it is not the whole.
    Raises:
        CorruptError: It is cut short, damaged, or states what cannot be.
        InvalidError: It holds what is not read; the message names it.
        MissingError: There is no such file.
    """
    size = files.size(key)
    stop = size if stop is None else stop
    where = f"{files.url}/{key}"
    if not 0 <= start <= stop <= size:
        raise CorruptError(f"{where}: bytes {start}–{stop} are to be an archive, it has {size}. Was it cut short?")
    _require_zip(read_bytes(files, key, start, min(start + len(LEGACY_HEAD), stop), len(LEGACY_HEAD)), where)
    entries = zip_entries(files, key, start, stop)
    root = _root(entries, where)
    _require_little_endian(files, key, entries.get(f"{root}byteorder"))
    pickle = entries[f"{root}data.pkl"]
    data = read_bytes(files, key, pickle.offset, pickle.offset + pickle.bytes, PICKLE_BYTES_MAX)
    persistent = _storages(entries, f"{root}data/", key)
    value = unpickled(data, f"{where}, {pickle.name} at {pickle.offset}", persistent=persistent, also=also)
    return TorchFile(value, key, size)


def _require_zip(head: bytes, where: str) -> None:
    if head.startswith(b"PK"):
        return
    if head == LEGACY_HEAD:
        raise InvalidError(
            f"{where}: saved by torch before 1.6, or with _use_new_zipfile_serialization=False; expected a zip file, "
            "read in place. Save it again: torch.save(torch.load(path, weights_only=True), path)"
        )
    if head.startswith(b"\x80"):
        raise InvalidError(f"{where}: a plain pickle; expected a file of torch.save")
    raise CorruptError(f"{where}: begins with {head[:4]!r}; expected a file of torch.save, which begins with b'PK'")


def _root(entries: Mapping[str, ZipEntry], where: str) -> str:
    """Return the folder of the archive that everything lies in."""
    roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise CorruptError(f"{where}: a zip archive with {len(roots)} data.pkl; expected one, as torch.save writes")
    if f"{roots[0]}constants.pkl" in entries:
        raise InvalidError(f"{where}: a TorchScript archive; expected a state saved with torch.save")
    return roots[0]


def _require_little_endian(files: Readable, key: str, entry: ZipEntry | None) -> None:
    order = b"little" if entry is None else read_bytes(files, key, entry.offset, entry.offset + entry.bytes, 64)
    if order != b"little":
        raise InvalidError(
            f"{files.url}/{key}: saved with byte order {order!r}; expected little. Save it again on such a machine"
        )


def _storages(entries: Mapping[str, ZipEntry], folder: str, key: str) -> Callable[[object], StoredStorage]:
    """Return what finds a storage by its persistent id."""
    known: dict[str, StoredStorage] = {}

    def storage(identifier: object) -> StoredStorage:
        if type(identifier) is not tuple or len(identifier) != 5 or identifier[0] != "storage":
            _damaged(identifier)
        _, kind, name, _, numel = identifier
        if not isinstance(kind, GlobalName) or type(name) is not str or type(numel) is not int or numel < 0:
            _damaged(identifier)
        if len(name) > _STORAGE_NAME_CHARACTERS_MAX:
            raise ValueError(f"a storage whose name has {len(name)} characters; expected a number")
        if kind.qualname not in STORAGE_DTYPES:
            raise UnsupportedPickle(f"a storage of type {kind.qualname}; expected one of {', '.join(DTYPES)}")
        dtype = STORAGE_DTYPES[kind.qualname]
        size = numel * (DTYPES[dtype].itemsize if dtype else 1)
        entry = entries.get(folder + name)
        if (entry is None and size) or (entry is not None and entry.bytes < size):
            held = "no bytes" if entry is None else f"{entry.bytes} bytes"
            raise ValueError(f"storage {name[:100]!r} of {size} bytes, for which the archive has {held}")
        found = StoredStorage(key, entry.offset if entry else 0, size, name, dtype)
        first = known.setdefault(name, found)
        if (first.dtype or _UNTYPED) != (dtype or _UNTYPED):
            raise ValueError(f"storage {name!r} of {dtype or _UNTYPED} and of {first.dtype or _UNTYPED}; expected one")
        return first if first.dtype == dtype else found

    return storage


def _damaged(identifier: object) -> NoReturn:
    raise ValueError(f"a persistent id {type(identifier).__name__}; expected that of a storage")
