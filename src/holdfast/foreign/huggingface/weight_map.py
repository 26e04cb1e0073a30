"""The index beside Hugging Face weights that are cut into several files: which file holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping

from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.ports.store import Readable
from holdfast.settings import MIB

_INDEX_BYTES_MAX = 256 * MIB

_BRACKETS_MIN = 1 << 20
_BYTES_PER_BRACKET = 8
"""Of a header or an index, in which tensors have three in fifty bytes: empty lists take far more memory than bytes."""


def names_in(files: Readable, suffix: str = "") -> list[str]:
    """Return the files directly in the folder, sorted."""
    return sorted(entry.key for entry in files.list("") if "/" not in entry.key and entry.key.endswith(suffix))


def one_index(files: Readable, suffix: str) -> str:
    """Return the file of a kind, or nothing.

    Raises:
        InvalidError: There are several.
    """
    found = names_in(files, suffix)
    if len(found) > 1:
        raise InvalidError(f"{files.url}: {', '.join(found[:5])}; expected one index. Name the one that is meant")
    return found[0] if found else ""


def weight_map(files: Readable, key: str, suffix: str) -> dict[str, str]:
    """Return the file of each tensor, as an index has it.

    Args:
        files: Where it lies.
        key: The index.
        suffix: How the files that it names end.
    Raises:
        CorruptError: It is no index.
        InvalidError: It names files elsewhere, or of another kind.
    """
    document = json_object(files.get(key, _INDEX_BYTES_MAX), f"{files.url}/{key}")
    weights = document.get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise CorruptError(f"{files.url}/{key}: weight_map is {str(weights)[:80]!r}; expected file by tensor")
    for file in set(weights.values()):
        if "/" in file or not file.endswith(suffix):
            raise InvalidError(f"{files.url}/{key}: names {file[:200]!r}; expected *{suffix} files beside it")
    return weights


def require_all_there(files: Readable, index: str, weights: Mapping[str, str], tensors: Container[str]) -> None:
    """Refuse a checkpoint that lacks tensors of its index.

    Args:
        files: Where it lies.
        index: The index.
        weights: What it says.
        tensors: FQNs of what was found.
    Raises:
        MissingError: Names those that lack.
    """
    lacking = [name for name in weights if f"model.{name}" not in tensors]
    if lacking:
        raise MissingError(
            f"{files.url}/{index}: {len(lacking)} tensors are not in the files it names: {lacking[:5]}. "
            "Fetch them again"
        )


def json_object(data: bytes, where: str) -> dict[str, object]:
    """Return a JSON object that is small enough to be read whole.

    Raises:
        CorruptError: It is none, or a name stands in it twice.
    """
    opened = data.count(b"[") + data.count(b"{")
    if opened > _BRACKETS_MIN + len(data) // _BYTES_PER_BRACKET:
        raise CorruptError(
            f"{where}: {opened} brackets in {len(data)} bytes; expected a name with each. Is it damaged?"
        )
    try:
        document = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: not the JSON that it should hold ({str(error)[:200]})") from error
    if not isinstance(document, dict):
        raise CorruptError(f"{where}: {type(document).__name__}; expected a JSON object")
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found
