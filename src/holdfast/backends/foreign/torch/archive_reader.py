"""Reads the values of a `torch.save` file; a tensor becomes a reference to its bytes in the file.

Such a file is a zip archive of a pickle, `<root>/data.pkl`, and the memory of each storage, `<root>/data/<key>`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from holdfast.backends.foreign.pickles.constructors import STORAGE_DTYPES
from holdfast.backends.foreign.pickles.objects import GlobalName, UnsupportedPickle
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.backends.foreign.pickles.tensors import StoredStorage
from holdfast.backends.foreign.read import read_bytes
from holdfast.backends.foreign.torch.zip_reader import ZipEntry, zip_entries
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.readable import Readable
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import MIB

PICKLE_BYTES_MAX = 64 * MIB
"""Largest pickle of one file: about 300,000 tensors."""

LEGACY_HEAD = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""First bytes of files that torch before 1.6 wrote, or `_use_new_zipfile_serialization=False`."""

_STORAGE_NAME_CHARACTERS_MAX = 200
"""torch numbers its storages, so their names have a few characters."""

_UNTYPED = "uint8"
"""Element type that torch assumes for an untyped storage."""


def read_torch_file(
    files: Readable, key: str, *, also: Collection[str] = (), start: int = 0, stop: int | None = None
) -> object:
    """Return the value of a `torch.save` file. Nothing in it is executed, and no tensor is read.

    It consists of plain values, `OpaqueObject` for objects of other classes, and `StoredTensor` for tensors.

    Args:
        files: The folder.
        key: The file.
        also: Names of further classes that become an `OpaqueObject`, see `unpickled`.
        start, stop: Byte range of the archive; the whole file by default.
    Raises:
        CorruptError: The file is cut short or damaged, or contradicts itself.
        InvalidError: The file holds a value that is not supported; the message names it.
        MissingError: The file does not exist.
    """
    size = files.size(key)
    stop = size if stop is None else stop
    where = f"{files.url}/{key}"
    if not 0 <= start <= stop <= size:
        raise CorruptError(f"{where}: expected an archive at bytes {start}–{stop} of {size}. Was it cut short?")
    _require_zip(read_bytes(files, key, start, min(start + len(LEGACY_HEAD), stop), len(LEGACY_HEAD)), where)
    entries = zip_entries(files, key, start, stop)
    root = _root(entries, where)
    _require_little_endian(files, key, entries.get(f"{root}byteorder"))
    pickle = entries[f"{root}data.pkl"]
    data = read_bytes(files, key, pickle.offset, pickle.offset + pickle.bytes, PICKLE_BYTES_MAX)
    persistent = _storages(entries, f"{root}data/", key)
    return unpickled(data, f"{where}, {pickle.name} at {pickle.offset}", persistent=persistent, also=also)


def _require_zip(head: bytes, where: str) -> None:
    if head.startswith(b"PK"):
        return
    if head == LEGACY_HEAD:
        raise InvalidError(
            f"{where}: saved by torch before 1.6, or with _use_new_zipfile_serialization=False; expected a zip file. "
            "Save it again: torch.save(torch.load(path, weights_only=True), path)"
        )
    if head.startswith(b"\x80"):
        raise InvalidError(f"{where}: a plain pickle; expected a file of torch.save. Save the state with torch.save")
    raise CorruptError(f"{where}: begins with {head[:4]!r}; expected b'PK', as torch.save writes. Read another copy")


def _root(entries: Mapping[str, ZipEntry], where: str) -> str:
    """Return the top folder of the archive."""
    roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise CorruptError(
            f"{where}: a zip archive with {len(roots)} data.pkl; expected one, as torch.save writes. Read another copy"
        )
    if f"{roots[0]}constants.pkl" in entries:
        raise InvalidError(f"{where}: a TorchScript archive; expected a state. Save its state_dict with torch.save")
    return roots[0]


def _require_little_endian(files: Readable, key: str, entry: ZipEntry | None) -> None:
    order = b"little" if entry is None else read_bytes(files, key, entry.offset, entry.offset + entry.bytes, 64)
    if order not in (b"little", b"big"):
        raise CorruptError(
            f"{files.url}/{key}: the entry byteorder holds {order!r}; expected b'little' or b'big'. Read another copy"
        )
    if order == b"big":
        raise InvalidError(
            f"{files.url}/{key}: saved with byte order {order!r}; expected little. "
            "Save it again on a little-endian machine"
        )


def _storages(entries: Mapping[str, ZipEntry], folder: str, key: str) -> Callable[[object], StoredStorage]:
    """Return a function from the persistent id of a storage to its bytes in the file."""
    known: dict[str, StoredStorage] = {}

    def storage(identifier: object) -> StoredStorage:
        fields: tuple[Any, ...] = identifier if type(identifier) is tuple and len(identifier) == 5 else (None,) * 5
        tag, kind, name, _, numel = fields
        is_named = tag == "storage" and isinstance(kind, GlobalName) and type(name) is str
        if not is_named or type(numel) is not int or numel < 0:
            raise ValueError(f"a persistent id is {type(identifier).__name__}; expected the id of a storage")
        if len(name) > _STORAGE_NAME_CHARACTERS_MAX:
            raise ValueError(f"the name of a storage has {len(name)} characters; expected a number")
        if kind.qualname not in STORAGE_DTYPES:
            raise UnsupportedPickle(f"a storage of type {kind.qualname}; expected one of {', '.join(DTYPES)}")
        # Untyped storages count bytes, typed ones elements.
        dtype = STORAGE_DTYPES[kind.qualname]
        size = numel * (DTYPES[dtype].itemsize if dtype else 1)
        entry = entries.get(folder + name)
        if (entry is None and size) or (entry is not None and entry.bytes < size):
            held = "no bytes" if entry is None else f"{entry.bytes} bytes"
            raise ValueError(f"storage {name[:100]!r} has {size} bytes, and the archive holds {held} of it")
        stored = StoredStorage(key, entry.offset if entry else 0, size, name, dtype)
        # torch views one storage under one type; an untyped reference to the same storage reads it as bytes.
        first = known.setdefault(name, stored)
        if (first.dtype or _UNTYPED) != (dtype or _UNTYPED):
            raise ValueError(
                f"storage {name!r} is {dtype or _UNTYPED} and {first.dtype or _UNTYPED}; expected one type"
            )
        return first if first.dtype == dtype else stored

    return storage
