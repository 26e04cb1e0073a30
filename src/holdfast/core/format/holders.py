"""Processes in records: who holds an epoch, who reads a step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import msgspec

from holdfast.base.types.epoch import Holder
from holdfast.core.format.sealed_json import Count, Text
from holdfast.settings import LEASE_SECONDS_MAX


class HolderDocument(msgspec.Struct):
    """A process as a record has it."""

    host: Text
    boot: Text
    namespaces: Text
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    started: Count
    since: Text
    nonce: Text
    lease_seconds: int | Annotated[float, msgspec.Meta(gt=0, le=LEASE_SECONDS_MAX)]

    def __post_init__(self) -> None:
        # As a plain float, msgspec would accept a whole number too, which format 1 does not.
        if type(self.lease_seconds) is int:
            raise ValueError(f"lease_seconds is {self.lease_seconds}; expected a float")


def encode_holder(holder: Holder) -> dict[str, object]:
    """Return a process as a record has it."""
    return {**asdict(holder), "lease_seconds": float(holder.lease_seconds)}


def decode_holder(document: HolderDocument) -> Holder:
    """Return the process of a record."""
    return Holder(**msgspec.structs.asdict(document))
