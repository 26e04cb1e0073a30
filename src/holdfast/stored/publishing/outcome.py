"""The outcome of one attempt: a typed value that ranks exchange and that ends a save."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import CheckpointError


class OutcomeKind(StrEnum):
    """States of an attempt after a rank's vote."""

    VOTING = "voting"
    """Other ranks have not voted yet."""

    PUBLISHING = "publishing"
    """All ranks voted, and one of them is putting the manifest."""

    COMMITTED = "committed"
    """The manifest is durable and visible."""

    ABORTED = "aborted"
    """The attempt certainly left no checkpoint."""

    FENCED = "fenced"
    """The manifest is visible but never counts: another writer took over."""

    ASK_STORAGE = "ask_storage"
    """A rank may have published. The manifest, if there is one, decides."""

    UNKNOWN = "unknown"
    """A rank may have published, and the manifest cannot decide: making it durable failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt, as one rank knows it."""

    kind: OutcomeKind
    """The state."""

    rank: int = -1
    """If publishing or aborted: the rank that decided."""

    manifest_digest: str = ""
    """If committed: digest of the manifest."""

    unhealthy: tuple[str, ...] = ()
    """If committed: findings against the checkpoint, in words."""

    tensor_bytes: int = 0
    """If committed: bytes of the checkpoint's tensors."""

    error: CheckpointError | None = None
    """If aborted or fenced: why."""

    reason: str = ""
    """If unknown, or if the manifest on storage decides: why."""


def committed(manifest_digest: str, unhealthy: tuple[str, ...] = (), tensor_bytes: int = 0) -> Outcome:
    """Return the outcome of an attempt whose manifest is published."""
    return Outcome(
        OutcomeKind.COMMITTED, manifest_digest=manifest_digest, unhealthy=unhealthy, tensor_bytes=tensor_bytes
    )


def aborted(error: CheckpointError) -> Outcome:
    """Return the outcome of an attempt that certainly left no checkpoint."""
    return Outcome(OutcomeKind.ABORTED, error=error)


def ask_storage(reason: str) -> Outcome:
    """Return the outcome of an attempt that the manifest, if there is one, decides."""
    return Outcome(OutcomeKind.ASK_STORAGE, reason=reason)


def unknown(reason: str) -> Outcome:
    """Return the outcome of an attempt whose end no rank can learn now."""
    return Outcome(OutcomeKind.UNKNOWN, reason=reason)
