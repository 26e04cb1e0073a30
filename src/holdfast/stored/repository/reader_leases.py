"""Reader leases: small records under the root of a run. Each names a process and the step that it reads."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Holder
from holdfast.core.format.holders import HolderDocument, decode_holder, encode_holder
from holdfast.core.format.sealed_json import StepNumber, decode_sealed, header, sealed
from holdfast.errors import CorruptError, InvalidError, MissingError

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
    """The record as stored. It changes with every renewal."""

    step: int | None
    """The step that the process reads; None if the record is unreadable: it may then be any step."""

    holder: Holder | None
    """The reading process; None if the record is unreadable."""


class _LeaseDocument(msgspec.Struct):
    step: StepNumber
    holder: HolderDocument


def put_lease(store: Store, holder: Holder, step: int, count: int) -> str:
    """Put or renew a lease, and return the key of its record.

    Args:
        store: The root of the run.
        holder: The reading process.
        step: The step that it reads.
        count: Number of renewals, so that each one changes the record.
    """
    key = f"{READERS_FOLDER}{holder.nonce}.json"
    fields = {"holder": encode_holder(holder), "step": step, "count": count}
    # Not durable: a lease need not survive a power cut, because its reader does not.
    store.put(key, sealed(header("reader") | fields), durable=False)
    return key


def leases(store: Store) -> list[Lease]:
    """Return all leases under a root."""
    listed = []
    for entry in store.list(READERS_FOLDER):
        if not _KEY.fullmatch(entry.key):
            continue
        data = b""
        try:
            data = store.get(entry.key, _LEASE_BYTES_MAX)
            document, _ = decode_sealed(data, "reader", _LeaseDocument, f"{store.url}/{entry.key}")
            listed.append(Lease(entry.key, data, document.step, decode_holder(document.holder)))
        except MissingError:
            continue  # The reader finished after we listed it.
        except (CorruptError, InvalidError):
            listed.append(Lease(entry.key, data, None, None))
    return listed
