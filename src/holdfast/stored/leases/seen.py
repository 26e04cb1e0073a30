"""The writer of a run, as another process sees it: by its record, its process, or the age of its heartbeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Holder
from holdfast.stored.leases.process import can_be_seen, is_gone
from holdfast.stored.repository import epochs


@dataclass(frozen=True, slots=True)
class LeaseWriter:
    """The process that holds the writer lease, or held the lease last."""

    holder: Holder | None
    """The process; None if its record is absent."""

    state: Literal["holds", "silent", "released", "gone"]
    """`holds`: as far as is known. `silent`: no heartbeat for the lease time. `released`, or `gone` without that."""


class WriterWatch:
    """Watches the heartbeat of the newest epoch. One thread calls at a time."""

    def __init__(self, store: Store, clock: Clock, lease_seconds: float) -> None:
        """Read nothing yet.

        Args:
            store: The run.
            clock: Measures the age of the heartbeat, so the clock of the writer does not matter.
            lease_seconds: Longest time without a heartbeat, if the record of the epoch does not say so.
        """
        self._store, self._clock, self._lease_seconds = store, clock, lease_seconds
        self._beat: tuple[int, bytes | None, float] = 0, None, 0.0
        """Number and heartbeat of the epoch, and since when this process has seen the same ones."""

    def look(self) -> LeaseWriter | None:
        """Return the writer now; None before the first epoch.

        Raises:
            CheckpointError: The record cannot be read, or storage failed.
        """
        number = epochs.newest_epoch(self._store)
        if not number:
            return None
        epoch, beat = epochs.read_epoch(self._store, number), epochs.read_heartbeat(self._store, number)
        holder, now = None if epoch is None else epoch.holder, self._clock.monotonic_seconds()
        if self._beat[:2] != (number, beat):
            self._beat = number, beat, now
        if beat == epochs.RELEASED:
            return LeaseWriter(holder, "released")
        if holder is not None and can_be_seen(holder):
            return LeaseWriter(holder, "gone" if is_gone(holder) else "holds")
        lease_seconds = self._lease_seconds if holder is None else holder.lease_seconds
        return LeaseWriter(holder, "silent" if now - self._beat[2] > lease_seconds else "holds")
