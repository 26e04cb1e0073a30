"""Steps that were found damaged: noted beside the run, so that nobody resumes from them again; never deleted."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.format.digest import hex_digest_of
from holdfast.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.format.names import MANIFEST_FILE, is_attempt_folder, step_folder, step_of_folder
from holdfast.format.sealed_json import header, sealed, unsealed
from holdfast.ports.store import Store
from holdfast.repository.publish import packs_named_by

logger = logging.getLogger(__name__)

QUARANTINE = "quarantine/"
"""Folder of the records, under the root of a run."""

_NAME = re.compile(r"(step-\d{12})\.([0-9a-f]{16})\.json", re.ASCII)
_SET_ASIDE = re.compile(r"step-\d{12}\.[0-9a-f]{16}\." + re.escape(MANIFEST_FILE), re.ASCII)
_RECORD_BYTES_MAX = 1 << 20
_WHY_MAX = 2000


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """One manifest that is not to be resumed from."""

    step: int
    """The step it lies at."""

    identity: str
    """Which manifest, as `manifest_identity` says: one saved anew at the step is another."""

    why: str
    """What was found."""

    found: str
    """When, for people."""

    attempts: tuple[str, ...]
    """Folders that hold what was saved; no writer removes them."""

    @property
    def key(self) -> str:
        """Key of the record."""
        return f"{_stem(self.step, self.identity)}.json"


def _stem(step: int, identity: str) -> str:
    return f"{QUARANTINE}{step_folder(step).rstrip('/')}.{identity}"


def backup_key(step: int, identity: str, name: str) -> str:
    """Return the key under which a file that is replaced is kept; `name` is its name without folders."""
    return f"{_stem(step, identity)}.{name}"


def manifest_identity(data: bytes) -> str:
    """Return what tells one manifest at a step from another, damaged ones too: 16 hex digits.

    It is the beginning of the digest that a whole one carries, and of the digest of all its bytes otherwise.
    """
    try:
        return unsealed(data, MANIFEST_FILE)[1][:16]
    except CheckpointError:
        return hex_digest_of(data)[:16]


def identity_at(store: Store, step: int) -> str:
    """Return the identity of the manifest at a step.

    Raises:
        MissingError: There is none.
    """
    return _stated_at(store, step)[0]


def _stated_at(store: Store, step: int) -> tuple[str, Mapping[str, object]]:
    """Return the identity of the manifest at a step, and what it says, which is nothing where it is damaged."""
    key = step_folder(step) + MANIFEST_FILE
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)
    except CorruptError:  # Too large to be one.
        return hex_digest_of(str(store.size(key)).encode())[:16], {}
    try:
        return manifest_identity(data), unsealed(data, MANIFEST_FILE)[0]
    except CheckpointError:
        return manifest_identity(data), {}


def quarantined(store: Store) -> Mapping[int, Mapping[str, QuarantineRecord]]:
    """Return what is noted under a root, by step and identity.

    The names decide; a record that cannot be read still counts.
    """
    found: dict[int, dict[str, QuarantineRecord]] = {}
    for step, identity in list_records(store):
        key = f"{_stem(step, identity)}.json"
        found.setdefault(step, {})[identity] = _read(store, key, step, identity)
    return found


def list_records(store: Store) -> list[tuple[int, str]]:
    """Return step and identity of what is noted under a root; no record is read."""
    matches = (_NAME.fullmatch(entry.key.removeprefix(QUARANTINE)) for entry in store.list(QUARANTINE))
    named = ((step_of_folder(match[1]), match[2]) for match in matches if match)
    return [(step, identity) for step, identity in named if step is not None]


def is_quarantined(store: Store, step: int) -> bool:
    """Return whether the manifest at a step is noted."""
    known = quarantined(store).get(step, {})
    return bool(known) and identity_at(store, step) in known


def quarantine(store: Store, step: int, identity: str, why: str, found: str) -> None:
    """Note that the manifest at a step is damaged; nothing of it is touched. Noting it twice changes nothing.

    Args:
        store: The root of the run.
        step: The step.
        identity: Which manifest was judged.
        why: What was found.
        found: When, for people.
    Raises:
        MissingError: There is no manifest at the step any more.
        ConflictError: Another lies there by now.
        CheckpointError: The root cannot be written to.
    """
    folder = step_folder(step)
    there, stated = _stated_at(store, step)
    if there != identity:
        raise ConflictError(
            f"{store.url}/{folder}{MANIFEST_FILE}: is {there}; expected {identity}, which was judged. It was saved anew"
        )
    named = stated.get("attempt")
    if isinstance(named, str) and is_attempt_folder(named):
        attempts = [named]
    else:
        attempts = [name for name in store.folders(folder) if is_attempt_folder(name)]
    record = QuarantineRecord(step, identity, why[:_WHY_MAX], found, tuple(attempts))
    document = {
        **header("quarantine"),
        "step": step,
        "why": record.why,
        "found": found,
        "attempts": attempts,
    }
    try:
        store.put_if_absent(record.key, sealed(document))
    except ConflictError:
        logger.debug("step %d is noted already", step)


def release(store: Store, step: int) -> None:
    """Forget that a step was found damaged; what was kept of it stays."""
    store.delete([record.key for record in quarantined(store).get(step, {}).values()])


def supersede(store: Store, step: int) -> bool:
    """Make room for a save at a step whose manifest is under quarantine; return whether there was one.

    The manifest is kept beside its record, and `quarantined_attempts` keeps what it names.
    """
    try:
        if not is_quarantined(store, step):
            return False
    except MissingError:
        return False
    key = step_folder(step) + MANIFEST_FILE
    backup(store, step, key, MANIFEST_BYTES_MAX)
    store.delete([key])
    return True


def quarantined_attempts(store: Store, step: int) -> set[str]:
    """Return the folders at a step that hold what was saved and found damaged: no sweep may remove them."""
    return {attempt for record in quarantined(store).get(step, {}).values() for attempt in record.attempts}


def superseded_packs(store: Store) -> frozenset[str]:
    """Return the packs of the run that manifests name which were set aside, by their path from the root."""
    manifests = []
    for entry in store.list(QUARANTINE):
        if _SET_ASIDE.fullmatch(entry.key.removeprefix(QUARANTINE)):
            try:
                manifests.append(decode_manifest(store.get(entry.key, MANIFEST_BYTES_MAX), f"{store.url}/{entry.key}"))
            except (CorruptError, InvalidError, MissingError):
                continue  # What it named cannot be told, nor anything be read by it.
    return packs_named_by(manifests)


def backup(store: Store, step: int, key: str, bytes_max: int) -> str:
    """Keep the bytes of a file that is about to be replaced, under the quarantine; return the key they have there.

    Raises:
        MissingError: It is not there.
        CorruptError: It is larger than any file of its kind.
    """
    data = store.get(key, bytes_max)
    kept = backup_key(step, hex_digest_of(data)[:16], key.rpartition("/")[2])
    try:
        store.put_if_absent(kept, data)
    except ConflictError:
        logger.debug("%s is kept already", key)  # Its name says what it holds.
    return kept


def _read(store: Store, key: str, step: int, identity: str) -> QuarantineRecord:
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
        tuple(each for each in attempts if isinstance(each, str)) if isinstance(attempts, list) else (),
    )
