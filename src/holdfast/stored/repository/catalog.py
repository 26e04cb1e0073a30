"""The steps of a run and the files of a checkpoint: listing, reading, and checking sizes against the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated

import msgspec

from holdfast.base.ports.readable import Readable
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.values import Value
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.index_checks import index_from
from holdfast.core.format.index.index_file import INDEX_BYTES_MAX
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.names import (
    COPY_CLAIM_FILE,
    MANIFEST_FILE,
    RUN_FILE,
    manifest_key,
    part_name,
    step_of_folder,
)
from holdfast.core.format.part import decode_part, require_part_of
from holdfast.core.format.sealed_json import decode_sealed, header, sealed, stated_digest
from holdfast.core.format.values import values
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, first_three
from holdfast.stored.repository.publish import get_or_none, publish
from holdfast.stored.repository.run_readme import put_readme

_RUN_BYTES_MAX = 1 << 16
_FOLDERS_LOOKED_AT = 100
"""Folders in which a message looks for runs."""


def step_folders(store: Store) -> list[int]:
    """Return the steps that have a folder, committed or not, ascending."""
    return steps_among(store.folders(""))


def steps_among(folders: Iterable[str]) -> list[int]:
    """Return the steps that have a folder among the names of folders in a root, ascending."""
    steps = (step_of_folder(name) for name in folders)
    return sorted(step for step in steps if step is not None)


def require_run(store: Store) -> list[int]:
    """Return the steps that have a folder, as `step_folders`.

    Raises:
        MissingError: The path is not the root of a run.
    """
    steps = step_folders(store)
    if not steps and not exists(store, RUN_FILE):
        raise MissingError(
            f"{store.url}: no root of a run; expected a folder that holds step-* folders or {RUN_FILE}. "
            f"Look for another path{runs_below(store)}"
        )
    return steps


def runs_below(store: Store) -> str:
    """Return the end of a message that names the runs one level below a folder; empty if there are none."""
    with suppress(CheckpointError):
        names = store.folders("")[:_FOLDERS_LOOKED_AT]
        runs = [f"{store.url}/{name}" for name in names if exists(store, f"{name}/{RUN_FILE}")]
        return f". Runs are one level below: {first_three(runs)}" if runs else ""
    return ""


def exists(store: Store, key: str) -> bool:
    """Return whether an object is stored at `key`."""
    try:
        store.size(key)
    except MissingError:
        return False
    return True


class _RunDocument(msgspec.Struct):
    run_id: Annotated[str, msgspec.Meta(min_length=1)]
    root: str = ""


def read_run_id(store: Store) -> str | None:
    """Return the id of the run at a root, or None if no run began there.

    Raises:
        CorruptError: `holdfast.json` is damaged.
        InvalidError: It is of another format version.
    """
    document = _run_document(store)
    return None if document is None else document.run_id


def root_of_near(store: Store) -> str:
    """Return the root that a near tier names; empty for any other place. Errors as `read_run_id`."""
    document = _run_document(store)
    return "" if document is None else document.root


def require_root(store: Store) -> None:
    """Refuse a near tier where a root is expected: the root decides who writes to the run.

    Raises:
        InvalidError: It is a near tier.
    """
    if document := _run_document(store):
        _require_root(store, document)


def _run_document(store: Store) -> _RunDocument | None:
    data = get_or_none(store, RUN_FILE, _RUN_BYTES_MAX)
    return None if data is None else decode_sealed(data, "run", _RunDocument, f"{store.url}/{RUN_FILE}")[0]


def _require_root(store: Store, document: _RunDocument) -> None:
    if document.root:
        raise InvalidError(
            f"{store.url}: is the near tier of {document.root}, which decides who writes to the run; expected the "
            f"root. Nothing was touched. Name the root: {document.root}"
        )


def ensure_run(store: Store, run_id: str, created: str, *, may_be_copy: bool = True) -> str:
    """Begin a run at a root if there is none; return the id of the run at the root.

    Args:
        store: The root.
        run_id: The id of a new run.
        created: Wall-clock time, for people.
        may_be_copy: Whether to look for an unfinished copy there.

    Raises:
        ConflictError: The root is that of a copy which is not complete.
        InvalidError: It is a near tier.
    """
    if document := _run_document(store):
        _require_root(store, document)
    if (existing := None if document is None else document.run_id) is None:
        if may_be_copy and exists(store, COPY_CLAIM_FILE):
            raise ConflictError(
                f"{store.url}: holds an unfinished copy of a run, so its newest steps may be missing; expected a whole "
                f"run, or a new folder. Nothing was saved. Run the same holdfast cp again, which continues; or, to go "
                f"on from what is there, remove {COPY_CLAIM_FILE}"
            )
        try:
            publish(store, RUN_FILE, sealed({**header("run", minor=0), "run_id": run_id, "created": created}))
            put_readme(store)
            return run_id
        except ConflictError:
            # Another process began the run meanwhile. Join it: epochs decide which of the two may write.
            if (existing := read_run_id(store)) is None:
                raise
    return existing


def touch_root(store: Store) -> None:
    """Write into the root and change nothing, so that the next listing of its steps comes from the server.

    A network mount may answer from a listing that it remembers from seconds ago. It forgets the listing of a folder
    into which it writes. A step that is missing from the listing of a new writer would never count.
    """
    if (data := get_or_none(store, RUN_FILE, _RUN_BYTES_MAX)) is not None:
        # It was read just now. The put finds it, and has written into the folder all the same.
        with suppress(ConflictError):
            store.put_if_absent(RUN_FILE, data)


def read_manifest_bytes(store: Store, folder: str, key: str | None = None) -> bytes:
    """Return the manifest of the checkpoint in `folder`, as stored.

    Args:
        store: The store.
        folder: The folder.
        key: Key of the manifest; None if it is in the folder.
    Raises:
        MissingError: There is no manifest.
    """
    try:
        return store.get(key or folder + MANIFEST_FILE, MANIFEST_BYTES_MAX)
    except MissingError as missing:
        where = f"{store.url}/{folder}".rstrip("/")
        if _is_empty(store, folder):
            raise MissingError(f"no checkpoint at {where}: nothing is there. Correct the path") from missing
        hint = "" if folder else runs_below(store)
        raise MissingError(
            f"{where}: not a checkpoint: it has no {MANIFEST_FILE}. Choose another step or path{hint}"
        ) from missing


def _is_empty(store: Store, folder: str) -> bool:
    with suppress(CheckpointError):
        return not store.folders(folder) and next(iter(store.list(folder)), None) is None
    return False


def read_manifest(store: Store, folder: str) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        MissingError: The folder has no manifest.
        CorruptError: The manifest is damaged, or of another step.
    """
    return manifest_in(folder, read_manifest_bytes(store, folder), f"{store.url}/{folder}{MANIFEST_FILE}")


def manifest_in(folder: str, data: bytes, where: str) -> Manifest:
    """Return a manifest from its bytes, checked against the name of its folder.

    Raises:
        CorruptError: It is damaged, or of another step: training would resume at the wrong step.
    """
    manifest = decode_manifest(data, where)
    step = step_of_folder(folder.rstrip("/"))
    if step is not None and manifest.step != step:
        raise CorruptError(
            f"{where}: is of step {manifest.step}; expected step {step}, as its folder says. "
            "It was copied or renamed: choose another step"
        )
    return manifest


def manifest_digest(store: Store, step: int, key: str | None = None) -> str | None:
    """Return the digest at the end of a step's manifest, unverified; None if there is none.

    Args:
        store: The root of the run.
        step: The step.
        key: Key of the manifest; None if it is in the folder of the step.
    """
    try:
        return stated_digest(store.get(key or manifest_key(step), MANIFEST_BYTES_MAX))
    except (MissingError, CorruptError):
        return None


def confirmed_manifest(store: Store, folder: str) -> Manifest:
    """Return the manifest in `folder` after making it durable.

    Raises:
        MissingError: The folder has no manifest.
    """
    data = read_manifest_bytes(store, folder)
    # Its writer may have died after making it visible and before making it durable. Publishing the same bytes again
    # makes them durable and changes nothing else.
    publish(store, folder + MANIFEST_FILE, data)
    return decode_manifest(data, f"{store.url}/{folder}{MANIFEST_FILE}")


def read_file(store: Store, folder: str, attempt: str, record: FileRecord) -> bytes:
    """Return the content of an index file, overview or part, proven by the digest in the manifest.

    Raises:
        CorruptError: The file is missing, or has another size or content.
    """
    key = f"{folder}{attempt}/{record.name}"
    data = _whole_file(store, key, record)
    digest = hex_digest_of(data)
    if digest != record.digest:
        # A network may flip a bit on the way, and then the file is whole. What the second read finds decides.
        data = _whole_file(store, key, record)
        digest = hex_digest_of(data)
    if digest != record.digest:
        raise CorruptError(
            f"{store.url}/{key}: bytes 0–{record.bytes} hash to {digest}; expected {record.digest}. Read another copy"
        )
    return data


def _whole_file(store: Store, key: str, record: FileRecord) -> bytes:
    try:
        data = store.get(key, min(record.bytes, INDEX_BYTES_MAX))
    except MissingError as missing:
        raise _missing(store, key, record) from missing
    _require_size(store, key, record, len(data))
    return data


def read_per_rank(store: Store, folder: str, manifest: Manifest, rank: int) -> Mapping[str, Value]:
    """Return the per-rank values of one of the ranks that saved, by path.

    Raises:
        MissingError: Fewer ranks saved the checkpoint.
        CorruptError: The rank's part differs from what was saved.
    """
    record = next((part for part in manifest.parts if part.name == part_name(rank)), None)
    if record is None:
        raise MissingError(f"{store.url}/{folder}: no part of rank {rank}; {manifest.world_size} ranks saved it")
    part = decode_part(read_file(store, folder, manifest.attempt, record), record.name)
    require_part_of(part, rank, manifest.attempt, f"{store.url}/{folder}{record.name}")
    by_path = values.decode(values.loads(part.per_rank), "") if part.per_rank is not None else {}
    if not isinstance(by_path, dict):
        raise CorruptError(
            f"{store.url}/{folder}{record.name}: per-rank values are {type(by_path).__name__}; expected a dict"
        )
    return {str(path): value for path, value in by_path.items()}


def stored_bytes(store: Readable, key: str) -> int:
    """Return the size of the object at `key`; 0 if it does not exist."""
    try:
        return store.size(key)
    except MissingError:
        return 0


def check_size(store: Readable, key: str, record: FileRecord) -> None:
    """Refuse a file that is missing or has another size than the manifest says.

    Raises:
        CorruptError: It is missing or of another size.
    """
    try:
        size = store.size(key)
    except MissingError as missing:
        raise _missing(store, key, record) from missing
    _require_size(store, key, record, size)


def _missing(store: Readable, key: str, record: FileRecord) -> CorruptError:
    return CorruptError(
        f"{store.url}/{key}: missing; expected {record.bytes} bytes, as the manifest says. Read another copy"
    )


def _require_size(store: Readable, key: str, record: FileRecord, size: int) -> None:
    if size != record.bytes:
        raise CorruptError(f"{store.url}/{key}: {size} bytes; expected {record.bytes}. Read another copy")


def read_index(store: Store, folder: str, manifest: Manifest) -> Index:
    """Return the whole index of a checkpoint."""
    files = [read_file(store, folder, manifest.attempt, record) for record in manifest.index_files]
    return index_from(manifest, files, f"{store.url}/{folder}")
