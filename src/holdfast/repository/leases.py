"""Leases of readers: small records under the root of a run that say who reads which step, renewed while it lasts."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.format.holders import HolderDocument, decode_holder, encode_holder
from holdfast.format.sealed_json import StepNumber, decode_sealed, header, sealed
from holdfast.ports.store import Store
from holdfast.types.epoch import Holder

READERS_FOLDER = "readers/"
"""Folder of the leases, under the root of a run."""

_KEY = re.compile(r"readers/[0-9a-f]{32}\.json", re.ASCII)
_LEASE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Lease:
    """One reader of one step."""

    key: str
    """Key of its record."""

    data: bytes
    """The record, as stored; it changes with every renewal."""

    step: int | None
    """The step that is read; None where the record cannot be read, so that it may be any."""

    holder: Holder | None
    """Who reads; None where the record cannot be read."""


class _LeaseDocument(msgspec.Struct):
    step: StepNumber
    holder: HolderDocument


def put_lease(store: Store, holder: Holder, step: int, count: int) -> str:
    """Say that a step is being read, for the `count`-th time; return the key of the record.

    It need not survive a power cut: no reader does.
    """
    key = f"{READERS_FOLDER}{holder.nonce}.json"
    fields = {"holder": encode_holder(holder), "step": step, "count": count}
    store.put(key, sealed(header("reader") | fields), durable=False)
    return key


def leases(store: Store) -> list[Lease]:
    """Return every lease under a root."""
    found = []
    for entry in store.list(READERS_FOLDER):
        if _KEY.fullmatch(entry.key):
            try:
                data = store.get(entry.key, _LEASE_BYTES_MAX)
            except MissingError:
                continue  # Done since it was listed.
            except (CorruptError, InvalidError):
                data = b""
            found.append(_decoded(entry.key, data, f"{store.url}/{entry.key}"))
    return found


def _decoded(key: str, data: bytes, where: str) -> Lease:
    try:
        document, _ = decode_sealed(data, "reader", _LeaseDocument, where)
        return Lease(key, data, document.step, decode_holder(document.holder))
    except (CorruptError, InvalidError):
        return Lease(key, data, None, None)
