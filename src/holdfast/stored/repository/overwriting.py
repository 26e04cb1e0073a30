"""The files of an overwrite: a claim, the next manifest, and marks of older attempts.

These files are under `overwriting/` in the folder of the checkpoint, and no reader needs them:
- the claim (`claim.json`, put-if-absent): the one process that may replace the manifest;
- the heartbeat of a claim (`<nonce>.beat`): rewritten while the claim is held;
- a prepared manifest (`<attempt>.next.json`): moved to `manifest.json` to publish;
- a mark (`<attempt>.replaced.json`): the attempt was published, and its manifest has been or is being replaced.

A file system replaces a file without a comparison. A new claimant deletes all prepared manifests first, so a process
that lost its claim has none to publish. A process that prepares a manifest checks its claim afterwards. So one of the
two processes sees the other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Holder
from holdfast.base.types.manifest import FORMAT_MINOR_TIMELINES
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.holders import HolderDocument, decode_holder, encode_holder
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import MANIFEST_FILE, is_attempt_file, is_attempt_folder
from holdfast.core.format.sealed_json import decode_fields, decode_sealed, header, sealed
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.publish import get_or_none, holds, is_put_first

OVERWRITING_FOLDER = "overwriting/"
"""Folder of these files, in the folder of the checkpoint."""

_CLAIM = f"{OVERWRITING_FOLDER}claim.json"
_ASIDE = ".aside.json"
_ASIDE_BYTES = 8
_BEAT = ".beat"
_NEXT = ".next.json"
_REPLACED = ".replaced.json"
_REPORTS_FOLDER = "reports/"
_MARK = re.compile(rf"{OVERWRITING_FOLDER}([0-9a-f]{{16}})\.replaced\.json", re.ASCII)
_RECORD_BYTES_MAX = 1 << 16
_BEAT_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """The stored claim."""

    data: bytes
    """The bytes of the record."""

    holder: Holder | None
    """The process that holds the claim; None if the record cannot be read."""


class _ClaimDocument(msgspec.Struct):
    holder: HolderDocument


def claim_of(holder: Holder) -> bytes:
    """Return the record of a claim."""
    return sealed({**header("overwriting", FORMAT_MINOR_TIMELINES), "holder": encode_holder(holder)})


def put_claim(store: Store, data: bytes) -> bool:
    """Store a claim if absent; return whether the stored claim is ours."""
    return is_put_first(store, _CLAIM, data)


def read_claim(store: Store) -> ClaimRecord | None:
    """Return the claim, or None if no job overwrites the checkpoint."""
    return _claim_at(store, _CLAIM)


def _claim_at(store: Store, key: str) -> ClaimRecord | None:
    data = b""
    with suppress(CorruptError, InvalidError):
        # One look: the bytes and the holder must be of one claim.
        found = get_or_none(store, key, _RECORD_BYTES_MAX)
        if found is None:
            return None
        data = found
        document, _ = decode_sealed(data, "overwriting", _ClaimDocument, f"{store.url}/{key}")
        return ClaimRecord(data, decode_holder(document.holder))
    return ClaimRecord(data, None)


def take_claim_away(store: Store, data: bytes) -> None:
    """Remove a claim of this process or of a dead process. Another claim that was stored meanwhile is put back."""
    aside = f"{OVERWRITING_FOLDER}{SystemClock().random_bytes(_ASIDE_BYTES).hex()}{_ASIDE}"
    try:
        # A deletion by key alone could remove a newer claim.
        store.move(_CLAIM, aside)
        moved = store.get(aside, _RECORD_BYTES_MAX)
    except (MissingError, CorruptError):
        return
    # If this process cannot put the claim back, or ends before, the holder puts the claim back.
    if moved == data or _is_link_decided(store, aside):
        store.delete([aside])


def _is_link_decided(store: Store, aside: str) -> bool:
    """Link a claim back that was moved aside; return False if the store has no links.

    The link fails if another job has taken a claim meanwhile. That job has also removed the object aside, and may have
    removed files of the holder: a copy would bring back a lost claim.
    """
    try:
        return store.link(aside, _CLAIM)
    except (ConflictError, MissingError):
        return True


def release_claim(store: Store, data: bytes) -> None:
    """Remove a claim of this process, unless the claim is lost."""
    if holds(store, _CLAIM, data):
        take_claim_away(store, data)


def remove_claim_beat(store: Store, nonce: str) -> None:
    """Remove the heartbeat of a claim."""
    store.delete([_beat_key(nonce)])


def is_claimed(store: Store, *, besides: str | None) -> bool:
    """Return whether a job overwrites the checkpoint, other than the holder of one nonce."""
    claim = read_claim(store)
    return claim is not None and (claim.holder is None or claim.holder.nonce != besides)


def require_claim(store: Store, nonce: str) -> None:
    """Refuse to replace anything without the claim.

    Raises:
        ConflictError: Another job has taken the claim over, or the claim was removed.
    """
    claim = read_claim(store)
    if claim is None:
        _put_back(store, nonce)
        claim = read_claim(store)  # The process that moved the claim may also have put it back.
    if claim is None or claim.holder is None or claim.holder.nonce != nonce:
        by = "no job" if claim is None or claim.holder is None else str(claim.holder)
        raise ConflictError(
            f"{store.url}: this job may not overwrite the checkpoint any more: the claim is now held by {by}; expected "
            "this job to hold the claim during the save. Nothing was replaced. Stop one of the jobs, or save elsewhere"
        )


def _put_back(store: Store, nonce: str) -> None:
    """Put back a claim that its holder finds moved aside.

    Another process moved this claim in place of a claim to remove, or ended during a takeover.
    """
    for key in [entry.key for entry in store.list(OVERWRITING_FOLDER) if entry.key.endswith(_ASIDE)]:
        claim = _claim_at(store, key)
        if claim is None or claim.holder is None or claim.holder.nonce != nonce:
            continue
        if not _is_link_decided(store, key) and is_put_first(store, _CLAIM, claim.data) and not exists(store, key):
            # A later claim may have been taken and released, and the object aside removed: then this claim is lost.
            take_claim_away(store, claim.data)


def _beat_key(nonce: str) -> str:
    return f"{OVERWRITING_FOLDER}{nonce}{_BEAT}"


def read_claim_beat(store: Store, nonce: str) -> bytes | None:
    """Return the last heartbeat of a claim; None before the first. An unreadable heartbeat never changes."""
    try:
        return get_or_none(store, _beat_key(nonce), _BEAT_BYTES_MAX)
    except (CorruptError, InvalidError):
        return b"cannot be read"


def put_claim_beat(store: Store, nonce: str, count: int) -> None:
    """Renew the heartbeat of a claim."""
    store.put(_beat_key(nonce), b"%d\n" % count, durable=False)


def prepare_manifest(store: Store, attempt: str, data: bytes) -> None:
    """Store a manifest next to the manifest to replace."""
    store.put_if_absent(_next_key(attempt), data)


def publish_prepared(store: Store, attempt: str) -> None:
    """Replace the manifest by a prepared manifest, in one move.

    Raises:
        MissingError: Another job has removed the prepared manifest. Some stores do not raise: see `was_published`.
        UnavailableError: The store failed.
    """
    store.move(_next_key(attempt), MANIFEST_FILE)


def is_prepared(store: Store, attempt: str) -> bool:
    """Return whether the manifest of an attempt waits to be published."""
    return exists(store, _next_key(attempt))


def was_published(store: Store, attempt: str, data: bytes) -> bool:
    """Return whether the manifest of an attempt is published, or was until another manifest replaced it."""
    return holds(store, MANIFEST_FILE, data) or exists(store, _mark_key(attempt))


def clear_away(store: Store, nonce: str) -> None:
    """Remove all prepared manifests, and leftovers of other claims.

    Args:
        store: The checkpoint.
        nonce: Nonce of the claim that this job holds.
    """
    keys = [entry.key for entry in store.list(OVERWRITING_FOLDER)]
    old = [key for key in keys if key.endswith((_NEXT, _ASIDE, _BEAT)) and key != _beat_key(nonce)]
    if old:
        store.delete(old)


def remove_prepared(store: Store, attempt: str) -> None:
    """Remove the manifest of one attempt, which will not be published."""
    store.delete([_next_key(attempt)])


def _next_key(attempt: str) -> str:
    return f"{OVERWRITING_FOLDER}{attempt}{_NEXT}"


@dataclass(frozen=True, slots=True)
class ReplacedMark:
    """Records that an attempt was published once, and the time of its replacement."""

    holder: Holder
    """The process that put the mark: the clock of this process counts."""

    monotonic_seconds: float
    """Time of the mark, on the monotonic clock of the holder's machine."""

    is_repeated: bool
    """Whether the mark replaced a mark of a machine whose clock the holder cannot read."""


class _ReplacedDocument(msgspec.Struct):
    holder: HolderDocument
    monotonic_seconds: float
    is_repeated: bool


def _mark_key(attempt: str) -> str:
    return f"{OVERWRITING_FOLDER}{attempt}{_REPLACED}"


def put_replaced_mark(store: Store, attempt: str, mark: ReplacedMark) -> None:
    """Mark an attempt. Before its manifest is replaced: an attempt without a mark was then never published."""
    fields = {
        "holder": encode_holder(mark.holder),
        "monotonic_seconds": float(mark.monotonic_seconds),
        "is_repeated": mark.is_repeated,
    }
    store.put(_mark_key(attempt), sealed({**header("replaced", FORMAT_MINOR_TIMELINES), **fields}))


def replaced_marks(store: Store) -> dict[str, ReplacedMark | None]:
    """Return the marks by attempt; None for a mark that cannot be read."""
    marks: dict[str, ReplacedMark | None] = {}
    for key in [entry.key for entry in store.list(OVERWRITING_FOLDER)]:
        match = _MARK.fullmatch(key)
        if match is None:
            continue
        marks[match[1]] = None
        with suppress(MissingError, CorruptError, InvalidError):
            document, _ = decode_sealed(store.get(key, _RECORD_BYTES_MAX), "replaced", _ReplacedDocument, key)
            marks[match[1]] = ReplacedMark(
                decode_holder(document.holder), document.monotonic_seconds, document.is_repeated
            )
    return marks


class _AttemptDocument(msgspec.Struct):
    attempt: str


@dataclass(frozen=True, slots=True)
class SeenManifest:
    """The manifest that is at a path now."""

    identity: str
    """Digest of all bytes, which identifies a damaged manifest too."""

    attempt: str | None
    """The attempt that the manifest names; None for a damaged manifest."""

    names_holdfast: bool = True
    """Whether the first bytes are those of a manifest of Holdfast, damaged or not."""


def seen_manifest(store: Store) -> SeenManifest | None:
    """Return identity and attempt of the manifest; None without a manifest.

    Raises:
        InvalidError: The manifest has a newer format, or is not the manifest of a checkpoint.
    """
    data = get_or_none(store, MANIFEST_FILE, MANIFEST_BYTES_MAX)
    if data is None:
        return None
    try:
        document, _ = decode_fields(data, "checkpoint", _AttemptDocument, f"{store.url}/{MANIFEST_FILE}")
    except CorruptError:
        return SeenManifest(hex_digest_of(data), None, b'"holdfast"' in data[:64])
    return SeenManifest(hex_digest_of(data), document.attempt)


def attempt_folders(store: Store) -> list[str]:
    """Return the attempts that have a folder."""
    return [name for name in store.folders("") if is_attempt_folder(name)]


def unneeded_files(store: Store, attempts: Collection[str]) -> Mapping[str, list[str]]:
    """Return all stored keys of some attempts, by attempt: files, reports of the save, marks.

    An attempt with a file that no save writes is left out: another tool or a person may need the file.
    """
    reports = [entry.key for entry in store.list(_REPORTS_FOLDER)] if attempts else []
    files = {}
    for attempt in attempts:
        prefix = f"{attempt}/"
        keys = [entry.key for entry in store.list(prefix)]
        if all(is_attempt_file(key.removeprefix(prefix)) for key in keys):
            own_reports = [key for key in reports if key.startswith(f"{_REPORTS_FOLDER}save-{attempt}-")]
            # The store removes the folder of the absent key `nothing`, even an empty folder. The mark is last: without
            # a mark the attempt would count as never published.
            files[attempt] = [*keys, f"{prefix}nothing", *own_reports, _mark_key(attempt)]
    return files


def foreign_file_at(store: Store) -> str | None:
    """Return a file at a path that no save of Holdfast stores there; None without such a file."""
    try:
        for entry in store.list(""):
            folder, slash, name = entry.key.partition("/")
            is_left = is_attempt_folder(folder) and is_attempt_file(name)
            is_left |= f"{folder}/" in (OVERWRITING_FOLDER, _REPORTS_FOLDER)
            if not (is_left if slash else entry.key == MANIFEST_FILE):
                return entry.key
    except MissingError:
        pass
    return None


def is_ours(store: Store, seen: SeenManifest) -> bool:
    """Return whether a manifest, damaged or not, is of Holdfast, by its text or by the files next to the manifest."""
    if seen.names_holdfast:
        return True
    prefixes = [f"{attempt}/" for attempt in attempt_folders(store)]
    return any(is_attempt_file(entry.key.removeprefix(prefix)) for prefix in prefixes for entry in store.list(prefix))
