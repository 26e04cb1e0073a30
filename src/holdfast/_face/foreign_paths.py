"""Finds a checkpoint of another system at a path or URL."""

from __future__ import annotations

import os
from functools import cache

from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.backends.stores.foreign_objects import ForeignObjects
from holdfast.base.ports.foreign import Format
from holdfast.base.ports.readable import Readable
from holdfast.base.ports.store import Store
from holdfast.base.types.listing import ForeignListing
from holdfast.errors import MissingError
from holdfast.stored.checkpoint.location import ForeignPath


@cache
def formats() -> tuple[Format, ...]:
    """Return the formats of other systems. The first that recognises a checkpoint reads it.

    Imported at the first checkpoint of another system: the import takes as long as the rest of a command.
    """
    from holdfast.backends.foreign.dcp.reader import DcpFormat
    from holdfast.backends.foreign.deepspeed.reader import DeepSpeedFormat
    from holdfast.backends.foreign.huggingface.bin_reader import HuggingFaceBinFormat
    from holdfast.backends.foreign.huggingface.safetensors_reader import SafetensorsFormat
    from holdfast.backends.foreign.torch.reader import TorchSaveFormat

    return (
        DcpFormat(),
        DeepSpeedFormat(),
        SafetensorsFormat(),
        HuggingFaceBinFormat(),
        TorchSaveFormat(),
    )


def listed(files: Readable, name: str) -> ForeignListing | None:
    """Return what the format lists that recognises some files; None if none does."""
    known = next((each for each in formats() if each.recognises(files, name)), None)
    if known is not None:
        return known.listing(files, name)
    from holdfast.backends.foreign.incomplete import require_complete

    require_complete(files, name)
    return None


def foreign_at(path: str) -> ForeignPath:
    """Return the files at a path of a file system, for the format that recognises them."""
    name = os.path.basename(path) if os.path.isfile(path) else ""
    files = ForeignFiles(os.path.dirname(os.path.abspath(path)) if name else path)
    return ForeignPath(files, name, listed, is_file=bool(name))


_SINGLE_OBJECTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""How the URL of one file ends. Nothing is asked to find out: every rank of a job must take it for the same."""

_INDEX_OBJECTS = (".safetensors.index.json", ".bin.index.json", "/.metadata")
"""How the URL of a file ends that names others beside it."""


def names_object(path: str) -> bool:
    """Return whether a URL has the ending of a file and names one object; the URL of a folder ends in a slash then."""
    return path.endswith((*_SINGLE_OBJECTS, *_INDEX_OBJECTS))


def foreign_in(folder: Store, name: str) -> ForeignPath | None:
    """Return the objects in a folder, for the format that recognises them; None if the store has no foreign names.

    Args:
        folder: The folder.
        name: The one object that the URL names, and the objects beside it that it names; empty for the whole folder.
    """
    named = folder.with_any_names()
    if named is None:
        return None
    only = name if name.endswith(_SINGLE_OBJECTS) else ""
    return ForeignPath(ForeignObjects(named, only=only), name, _listed_object if name else listed)


def _listed_object(files: Readable, name: str) -> ForeignListing | None:
    try:
        files.size(name)
    except MissingError as missing:
        raise MissingError(f"{files.url}/{name}: no such object; the URL of a folder ends in '/'") from missing
    return listed(files, name)
