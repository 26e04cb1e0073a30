"""Processes as records name them: who holds an epoch, who reads a step."""

from __future__ import annotations

from holdfast.format.sealed_json import Fields
from holdfast.format.values.values import is_json_scalar
from holdfast.settings import LEASE_SECONDS_MAX
from holdfast.types.epoch import Holder


def encode_holder(holder: Holder) -> dict[str, object]:
    """Return a process as a record states it."""
    return {
        "host": holder.host,
        "boot": holder.boot,
        "namespaces": holder.namespaces,
        "pid": holder.pid,
        "started": holder.started,
        "since": holder.since,
        "nonce": holder.nonce,
        "lease_seconds": float(holder.lease_seconds),
    }


def decode_holder(said: dict[str, object], where: str) -> Holder:
    """Return the process that a record states.

    Raises:
        CorruptError: It states none.
    """
    field = Fields(said, f"{where}: holder")

    def is_lease(seconds: float) -> bool:
        return 0 < seconds <= LEASE_SECONDS_MAX

    return Holder(
        **{name: field.of(name, str, is_json_scalar) for name in ("host", "boot", "namespaces", "since", "nonce")},
        pid=field.whole("pid", (1 << 31) - 1),
        started=field.whole("started", 1 << 62),
        lease_seconds=field.of("lease_seconds", float, is_lease),
    )
