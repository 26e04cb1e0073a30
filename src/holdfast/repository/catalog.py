"""What lies under a place: which steps are committed, what a checkpoint consists of."""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec

from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.format.digest import hex_digest_of
from holdfast.format.index.index import Index
from holdfast.format.index.index_checks import index_from, overview_from
from holdfast.format.index.index_file import INDEX_BYTES_MAX
from holdfast.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.format.names import (
    MANIFEST_FILE,
    RUN_FILE,
    is_file_url,
    is_pack_name,
    step_folder,
    step_of_folder,
    step_of_pack,
)
from holdfast.format.sealed_json import decode_sealed, header, sealed, stated_digest
from holdfast.ports.store import Packs, Readable, Store, Stored
from holdfast.repository.epochs import current_fence, is_valid
from holdfast.repository.publish import publish
from holdfast.types.manifest import FileRecord, Manifest

logger = logging.getLogger(__name__)

_RUN_BYTES_MAX = 1 << 16


def step_folders(store: Store) -> list[int]:
    """Return the steps that have a folder, committed or not, ascending."""
    steps = (step_of_folder(name) for name in store.folders(""))
    return sorted(step for step in steps if step is not None)


def committed_steps(store: Store) -> list[int]:
    """Return the steps that have a manifest that counts, ascending.

    Where a link or a pipe stands in its place there is none that a save could have published: such a step is passed
    over with a warning, for it must not keep a run from the steps that are whole.
    """
    steps = []
    found, fence = step_folders(store), current_fence(store)
    for step in found:
        try:
            if is_valid(store, fence, step):
                steps.append(step)
        except MissingError:
            continue
        except InvalidError as error:
            logger.warning("step %d is passed over: %s", step, error)
    return steps


def exists(store: Store, key: str) -> bool:
    """Return whether an object is stored at `key`."""
    try:
        store.size(key)
    except MissingError:
        return False
    return True


class _RunDocument(msgspec.Struct):
    run_id: Annotated[str, msgspec.Meta(min_length=1)]


def read_run_id(store: Store) -> str | None:
    """Return the id of the run a root belongs to, or None if it has none yet.

    Raises:
        CorruptError: `holdfast.json` is damaged.
        InvalidError: It is of another format version.
    """
    where = f"{store.url}/{RUN_FILE}"
    try:
        data = store.get(RUN_FILE, _RUN_BYTES_MAX)
    except MissingError:
        return None
    return decode_sealed(data, "run", _RunDocument, where)[0].run_id


def ensure_run(store: Store, run_id: str, created: str) -> str:
    """Make a root that of a run, unless it is one; return the id of the run it belongs to."""
    known = read_run_id(store)
    if known is not None:
        return known
    try:
        publish(store, RUN_FILE, sealed({**header("run", minor=0), "run_id": run_id, "created": created}))
    except ConflictError:
        # Founded by another in this moment: it is that run, and whose it is to write to the epochs decide.
        known = read_run_id(store)
        if known is None:
            raise
        return known
    return run_id


def read_manifest_bytes(store: Store, folder: str) -> bytes:
    """Return the manifest of the checkpoint in `folder`, as stored.

    Raises:
        MissingError: There is no checkpoint.
    """
    try:
        return store.get(folder + MANIFEST_FILE, MANIFEST_BYTES_MAX)
    except MissingError as missing:
        raise MissingError(
            f"{store.url}/{folder}: no {MANIFEST_FILE}, so no checkpoint; choose another step or path"
        ) from missing


def read_manifest(store: Store, folder: str) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        MissingError: There is no checkpoint.
        CorruptError: It is damaged, or that of another step.
    """
    return manifest_in(folder, read_manifest_bytes(store, folder), f"{store.url}/{folder}{MANIFEST_FILE}")


def manifest_in(folder: str, data: bytes, where: str) -> Manifest:
    """Return the manifest that was read in `folder`.

    Raises:
        CorruptError: It is damaged, or that of another step: training would resume at the wrong one.
    """
    manifest = decode_manifest(data, where)
    step = step_of_folder(folder.rstrip("/"))
    if step is not None and manifest.step != step:
        raise CorruptError(
            f"{where}: is of step {manifest.step}; expected step {step}, as its folder says. "
            "It was copied or renamed: choose another step"
        )
    return manifest


def manifest_digest(store: Store, step: int) -> str | None:
    """Return the digest that the manifest of a step states; None where there is none."""
    try:
        return stated_digest(store.get(step_folder(step) + MANIFEST_FILE, MANIFEST_BYTES_MAX))
    except (MissingError, CorruptError):
        return None


def confirmed_manifest(store: Store, folder: str) -> Manifest:
    """Return the manifest in `folder` once it is certain to be durable, whoever put it there.

    The one who published may have died between making it visible and making it durable; putting the same
    bytes again changes nothing and leaves them durable.

    Raises:
        MissingError: There is none.
    """
    data = read_manifest_bytes(store, folder)
    publish(store, folder + MANIFEST_FILE, data)
    return decode_manifest(data, f"{store.url}/{folder}{MANIFEST_FILE}")


def read_file(store: Store, folder: str, attempt: str, record: FileRecord) -> bytes:
    """Return a file that the manifest names by the digest of its content.

    Raises:
        CorruptError: It is missing, of another size or of another content.
    """
    key = f"{folder}{attempt}/{record.name}"
    check_size(store, key, record)
    data = store.get(key, min(record.bytes, INDEX_BYTES_MAX))
    found = hex_digest_of(data)
    if found != record.digest:
        raise CorruptError(
            f"{store.url}/{key}: bytes 0–{record.bytes} hash to {found}; expected {record.digest}. Read another copy"
        )
    return data


def stored_bytes(store: Readable, key: str) -> int:
    """Return the bytes that are stored at `key`; 0 if there is no such object."""
    try:
        return store.size(key)
    except MissingError:
        return 0


def check_size(store: Readable, key: str, record: FileRecord) -> None:
    """Refuse a file that is not there or not as long as the manifest says.

    Raises:
        CorruptError: It is missing or of another size.
    """
    try:
        found = store.size(key)
    except MissingError as missing:
        raise CorruptError(
            f"{store.url}/{key}: missing; the manifest names it with {record.bytes} bytes. Read another copy"
        ) from missing
    if found != record.bytes:
        raise CorruptError(f"{store.url}/{key}: {found} bytes; expected {record.bytes}. Read another copy")


def check_pack(stored: Stored, pack: FileRecord, step: int | None) -> None:
    """Refuse a pack that is not there or not as long as the manifest says.

    Args:
        stored: Where it lies.
        pack: What the manifest says of it.
        step: The step whose manifest that is.
    Raises:
        CorruptError: It is missing or of another size; of a pack of another step the message names both.
    """
    try:
        check_size(stored.files, stored.key, pack)
    except CorruptError as error:
        other = step_of_pack(pack.name)
        if other is None:
            raise
        raise CorruptError(
            f"{error}. It belongs to step {other}, and step {step} refers to it for what had not changed since: put it "
            "back, or choose another step"
        ) from error


def short_packs(store: Store, folder: str, manifest: Manifest, packs: Packs) -> dict[str, tuple[int, CheckpointError]]:
    """Return, by name, packs that are not there in full: the bytes there are, and what to say of it.

    One listing for each attempt that packs lie in, however many there are. What is there of a short one can still be
    read; of one elsewhere that is longer, and of a referenced file of another size, nothing can: it is another file.
    """
    own = f"{folder}{manifest.attempt}/"
    found: dict[str, dict[str, int]] = {}
    short: dict[str, tuple[int, CheckpointError]] = {}
    for pack in manifest.packs:
        there = 0
        try:
            stored = packs(pack.name)
            if not is_file_url(pack.name):
                prefix = own if is_pack_name(pack.name) else "/".join(pack.name.split("/")[:2]) + "/"
                if prefix not in found:
                    found[prefix] = {entry.key: entry.bytes for entry in stored.files.list(prefix)}
                there = found[prefix].get(stored.key, 0)
                if there == pack.bytes or (there > pack.bytes and prefix == own):
                    continue
                there = 0 if there > pack.bytes else there
            check_pack(stored, pack, manifest.step)
        except (CorruptError, InvalidError) as error:
            short[pack.name] = there, error
    return short


def read_index(store: Store, folder: str, manifest: Manifest) -> Index:
    """Return the whole index of a checkpoint."""
    where = f"{store.url}/{folder}"
    overview = None
    if manifest.overview is not None:
        overview = overview_from(manifest, read_file(store, folder, manifest.attempt, manifest.overview), where)
    files = [read_file(store, folder, manifest.attempt, record) for record in manifest.indexes]
    return index_from(manifest, files, where, overview)
