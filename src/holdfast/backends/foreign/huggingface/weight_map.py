"""Reads the index of Hugging Face weights in several files: the file of each tensor."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping

import msgspec

from holdfast.backends.foreign.typed_values import typed
from holdfast.base.ports.readable import Readable
from holdfast.errors import CorruptError, InvalidError, MissingError, first_three
from holdfast.settings import MIB

_INDEX_BYTES_MAX = 256 * MIB

_BRACKETS_MIN = 1 << 20
_BYTES_PER_BRACKET = 8
"""A JSON text may hold a bracket per 8 bytes, plus 2**20. Tensors need 3 in 50 bytes; each takes a list in memory."""


class _Index(msgspec.Struct):
    """The field of an index that Holdfast reads."""

    weight_map: dict[str, str]
    """By tensor, the name of its file."""


def names_in(files: Readable, suffix: str = "") -> list[str]:
    """Return the sorted names of files directly in the folder that end in a suffix."""
    return sorted(entry.key for entry in files.list("") if "/" not in entry.key and entry.key.endswith(suffix))


def one_index(files: Readable, suffix: str) -> str:
    """Return the name of the index in a folder; empty if there is none.

    Raises:
        InvalidError: There are several.
    """
    names = names_in(files, suffix)
    if len(names) > 1:
        raise InvalidError(f"{files.url}: found {first_three(names)}; expected one index. Name one of them in the path")
    return names[0] if names else ""


def weight_map(files: Readable, key: str, suffix: str) -> dict[str, str]:
    """Return the name of the file of each tensor, as an index states it.

    Args:
        files: The folder.
        key: The index.
        suffix: Suffix of the files that it may name.
    Raises:
        CorruptError: The file is not an index.
        InvalidError: It names a file outside the folder, or with another suffix.
    """
    where = f"{files.url}/{key}"
    weights = typed(json_object(files.get(key, _INDEX_BYTES_MAX), where), _Index, where).weight_map
    for file in set(weights.values()):
        if "/" in file or not file.endswith(suffix):
            raise InvalidError(f"{where}: names {file[:200]!r}; expected *{suffix} files beside it")
    return weights


def require_all_there(files: Readable, index: str, weights: Mapping[str, str], tensors: Container[str]) -> None:
    """Refuse a checkpoint whose files lack tensors of its index.

    Args:
        files: The folder.
        index: Name of the index.
        weights: Its file by tensor.
        tensors: FQNs of all tensors in the files.
    Raises:
        MissingError: The message names the missing tensors.
    """
    missing = [name for name in weights if f"model.{name}" not in tensors]
    if missing:
        raise MissingError(
            f"{files.url}/{index}: {len(missing)} tensors are not in the files it names: {first_three(missing)}. "
            "Download the files again"
        )


def json_object(data: bytes, where: str) -> dict[str, object]:
    """Return a JSON object.

    Raises:
        CorruptError: The text is not a JSON object, repeats a key, or holds too many brackets for its length.
    """
    brackets = data.count(b"[") + data.count(b"{")
    # Empty lists take far more memory than their text, so bound them before parsing.
    if brackets > _BRACKETS_MIN + len(data) // _BYTES_PER_BRACKET:
        raise CorruptError(f"{where}: {brackets} brackets in {len(data)} bytes; expected fewer. Read another copy")
    try:
        document = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: not the JSON it should be ({str(error)[:200]}). Read another copy") from error
    if not isinstance(document, dict):
        raise CorruptError(f"{where}: {type(document).__name__}; expected a JSON object. Read another copy")
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is repeated")
    return content
