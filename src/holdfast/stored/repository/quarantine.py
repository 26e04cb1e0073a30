"""Records of damaged steps, kept beside the run. A load that chooses a step skips these; nothing here deletes data."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from holdfast.base.ports.store import Store
from holdfast.base.types.timeline import Timeline
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.names import MANIFEST_FILE, is_attempt_folder, manifest_key, step_folder, step_of_folder
from holdfast.core.format.sealed_json import header, sealed, unsealed
from holdfast.core.format.timeline import timeline_in_damaged
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.stored.repository.manifest_removal import remove_manifest
from holdfast.stored.repository.publish import holds, packs_named_by

logger = logging.getLogger(__name__)

QUARANTINE = "quarantine/"
"""Folder of the records and backups, under the root of a run."""

_NAME = re.compile(r"(step-\d{12})\.([0-9a-f]{16})\.json", re.ASCII)
_SUPERSEDED = re.compile(r"step-\d{12}\.[0-9a-f]{16}\." + re.escape(MANIFEST_FILE), re.ASCII)
_RECORD_BYTES_MAX = 1 << 20
_WHY_MAX = 2000


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """One manifest that must not be resumed from."""

    step: int
    """Its step."""

    identity: str
    """The result of `identity_at` for the step; it changes if the step is saved again."""

    why: str
    """The damage."""

    found: str
    """Time of the finding, for people."""

    attempts: tuple[str, ...]
    """Folders that hold the saved files; no writer removes them."""

    @property
    def key(self) -> str:
        """Key of the record."""
        return _key(self.step, self.identity)


def _key(step: int, identity: str, name: str = "json") -> str:
    """Return the key of a record, or of the backup of the file `name`."""
    return f"{QUARANTINE}{step_folder(step).rstrip('/')}.{identity}.{name}"


def identity_at(store: Store, key: str) -> str:
    """Return 16 hex digits that distinguish the manifests of one step, damaged ones included.

    Args:
        store: The root of the run.
        key: Key of the manifest.
    Raises:
        MissingError: There is no manifest.
    """
    return _identify(store, key)[0]


def _identify(store: Store, key: str) -> tuple[str, Mapping[str, object]]:
    """Return the identity of a manifest, and its document, which is empty if the manifest is damaged."""
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)
    except CorruptError:  # Too large for a manifest.
        return hex_digest_of(str(store.size(key)).encode())[:16], {}
    return _identified(data)


def identity_of(data: bytes) -> str:
    """Return what `identity_at` does, from the bytes of a manifest."""
    return _identified(data)[0]


def _identified(data: bytes) -> tuple[str, Mapping[str, object]]:
    """Return what `_identify` does, from the bytes of a manifest."""
    try:
        document, digest = unsealed(data, MANIFEST_FILE)
    except CheckpointError:
        return hex_digest_of(data)[:16], {}
    return digest[:16], document


def quarantined(store: Store) -> Mapping[int, Mapping[str, QuarantineRecord]]:
    """Return the records under a root, by step and identity.

    The file names decide: a record counts even if its content is unreadable.
    """
    records: dict[int, dict[str, QuarantineRecord]] = {}
    for step, identity in list_records(store):
        records.setdefault(step, {})[identity] = _read(store, step, identity)
    return records


def list_records(store: Store) -> list[tuple[int, str]]:
    """Return step and identity of every record under a root, by listing alone."""
    matches = (_NAME.fullmatch(entry.key.removeprefix(QUARANTINE)) for entry in store.list(QUARANTINE))
    named = ((step_of_folder(match[1]), match[2]) for match in matches if match)
    return [(step, identity) for step, identity in named if step is not None]


def is_quarantined(
    store: Store, step: int, key: str | None = None, records: Iterable[tuple[int, str]] | None = None
) -> bool:
    """Return whether a manifest of a step is under quarantine.

    Args:
        store: The root of the run.
        step: The step.
        key: Key of the manifest; None if it is in the folder of the step.
        records: What `list_records` returned; None to list them.
    """
    listed = list_records(store) if records is None else records
    identities = {identity for number, identity in listed if number == step}
    return bool(identities) and identity_at(store, key or manifest_key(step)) in identities


def is_skipped(store: Store, step: int, key: str, records: Iterable[tuple[int, str]]) -> bool:
    """Return whether a resume skips a manifest: the manifest is under quarantine, or is gone. As `is_quarantined`."""
    try:
        return is_quarantined(store, step, key, records)
    except MissingError:
        return True
    except CheckpointError:
        return False


def quarantine(store: Store, step: int, key: str, identity: str, why: str, found: str) -> None:
    """Record that a manifest of a step is damaged. The step is not touched; a second call changes nothing.

    Args:
        store: The root of the run.
        step: The step.
        key: Key of the manifest.
        identity: Identity of the manifest that was checked.
        why: The damage.
        found: Time of the finding, for people.
    Raises:
        MissingError: The step has no manifest any more.
        ConflictError: The step was saved again and has another manifest.
        CheckpointError: The root cannot be written to.
    """
    folder = step_folder(step)
    current, document = _identify(store, key)
    if current != identity:
        raise ConflictError(
            f"{store.url}/{key}: manifest {current}; expected {identity}, which was checked. "
            "The step was saved again: check it again"
        )
    attempt = document.get("attempt")
    if isinstance(attempt, str) and is_attempt_folder(attempt):
        attempts = [attempt]
    else:
        # A damaged manifest does not say which attempt it commits, so the record protects all of them.
        attempts = [name for name in store.folders(folder) if is_attempt_folder(name)]
    fields = {"step": step, "why": why[:_WHY_MAX], "found": found, "attempts": attempts}
    try:
        store.put_if_absent(_key(step, identity), sealed(header("quarantine") | fields))
    except ConflictError:
        logger.debug("step %d is under quarantine already", step)


def release(store: Store, step: int, kept: Container[str] = ()) -> None:
    """Remove the records of a step. Backups of its files stay.

    Args:
        store: The root of the run.
        step: The step.
        kept: Identities of other manifests of the step; their records stay.
    """
    records = [identity for number, identity in list_records(store) if number == step and identity not in kept]
    store.delete([_key(step, identity) for identity in records])


def supersede(
    store: Store, step: int, epoch: int, key: str | None = None, records: Iterable[tuple[int, str]] | None = None
) -> bool:
    """Make room for a save at a step whose manifest is under quarantine; return whether there was one.

    The manifest is kept beside its record, and `quarantined_attempts` protects the files that it names.

    Args:
        store: The root of the run.
        step: The step.
        epoch: Epoch of the caller.
        key: Key of the manifest; None if it is in the folder of the step.
        records: What `list_records` returned; None to list them.
    Raises:
        ConflictError: Another process took over; the manifest stays.
    """
    key = key or manifest_key(step)
    listed = list_records(store) if records is None else records
    identities = {identity for number, identity in listed if number == step}
    if not identities:
        return False
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)  # One look: what was judged is what is copied and removed.
    except MissingError:
        return False
    if identity_of(data) not in identities:
        return False
    _keep(store, step, data, MANIFEST_FILE)
    remove_manifest(store, step, key, data, epoch)
    return True


def quarantined_attempts(store: Store, step: int) -> set[str]:
    """Return the folders of a step that hold quarantined data; no cleanup may remove them."""
    return {attempt for record in quarantined(store).get(step, {}).values() for attempt in record.attempts}


def superseded_packs(store: Store) -> frozenset[str]:
    """Return the packs of the run that superseded manifests name, by their path from the root."""
    manifests = []
    for key, data in _manifest_copies(store):
        try:
            manifests.append(decode_manifest(data, f"{store.url}/{key}"))
        except (CorruptError, InvalidError):
            continue  # Its packs are unknown, and no reader can use them without the manifest.
    return packs_named_by(manifests)


def stated_timelines(store: Store) -> list[Timeline]:
    """Return the timelines that manifests state which were moved to quarantine or replaced; nothing proves them."""
    timelines = (timeline_in_damaged(data) for _, data in _manifest_copies(store))
    return [timeline for timeline in timelines if timeline is not None]


def _manifest_copies(store: Store) -> Iterator[tuple[str, bytes]]:
    """Return key and bytes of the manifests under quarantine, as far as they can be read."""
    for entry in store.list(QUARANTINE):
        if _SUPERSEDED.fullmatch(entry.key.removeprefix(QUARANTINE)):
            try:
                yield entry.key, store.get(entry.key, MANIFEST_BYTES_MAX)
            except (CorruptError, InvalidError, MissingError):
                continue


def backup(store: Store, step: int, key: str, bytes_max: int, name: str = "") -> str:
    """Copy a file into the quarantine folder before it is replaced; return the key of the copy.

    Args:
        store: The root of the run.
        step: The step that the file belongs to.
        key: Its key.
        bytes_max: Size of the largest file of its kind.
        name: End of the copy's name; empty for the name of the file.
    Raises:
        MissingError: The file does not exist.
        CorruptError: It is larger than any file of its kind.
    """
    return _keep(store, step, store.get(key, bytes_max), name or key.rpartition("/")[2])


def _keep(store: Store, step: int, data: bytes, name: str) -> str:
    """Store what a file held in the quarantine folder; return the key."""
    key = _key(step, hex_digest_of(data)[:16], name)
    try:
        store.put_if_absent(key, data)
    except ConflictError:
        logger.debug("%s is there already", key)  # The name holds the digest, so the content is the same.
    return key


def backup_key(step: int, digits: str, key: str) -> str:
    """Return the key under which a replaced pack of a step is kept.

    Args:
        step: The step.
        digits: 16 random hex digits.
        key: The key that another object gets.
    """
    return _key(step, digits, key.rpartition("/")[2])


def is_set_aside(store: Store, step: int, data: bytes) -> bool:
    """Return whether a manifest is under quarantine, and exactly its bytes were copied into the quarantine folder."""
    if not holds(store, _key(step, hex_digest_of(data)[:16], MANIFEST_FILE), data):
        return False
    return (step, _identified(data)[0]) in list_records(store)


def _read(store: Store, step: int, identity: str) -> QuarantineRecord:
    key = _key(step, identity)
    # Lenient on purpose: a record with a wrong field still protects the step, so no field may raise.
    try:
        document, _ = unsealed(store.get(key, _RECORD_BYTES_MAX), f"{store.url}/{key}")
    except (CorruptError, MissingError) as error:
        document = {"why": f"its record cannot be read: {error}"}
    attempts = document.get("attempts")
    return QuarantineRecord(
        step,
        identity,
        str(document.get("why"))[:_WHY_MAX],
        str(document.get("found", "")),
        tuple(attempt for attempt in attempts if isinstance(attempt, str)) if isinstance(attempts, list) else (),
    )
