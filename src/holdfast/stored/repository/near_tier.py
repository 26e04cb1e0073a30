"""The records that join a near tier and a root: both name the run, and each names the other place."""

from __future__ import annotations

import logging
import platform

import msgspec

from holdfast.base.ports.store import Store
from holdfast.core.format.names import LATEST_FILE, PARITY_FOLDER, RUN_FILE, step_of_folder
from holdfast.core.format.sealed_json import Text, decode_sealed, header, sealed
from holdfast.errors import InvalidError, UnavailableError
from holdfast.stored.repository.catalog import ensure_run, read_run_id, root_of_near
from holdfast.stored.repository.publish import get_or_none, holds, publish
from holdfast.stored.repository.run_readme import README_FILE, put_readme
from holdfast.stored.repository.tags import TAGS_FOLDER
from holdfast.stored.repository.two_roots import TwoRoots

logger = logging.getLogger(__name__)

NEAR_FOLDER = "near/"
"""Folder of the record in the root: the listing of the steps shows whether there is one."""

NEAR_FILE = f"{NEAR_FOLDER}tier.json"
"""Key of the record of the near tier, in the root."""

_KIND = "near tier"
_FOLDERS = {"tags", "timelines", "quarantine", "superseded", "readers", "collecting", PARITY_FOLDER[:-1]}
_OWN = {RUN_FILE, README_FILE, LATEST_FILE, *_FOLDERS, "job.json", "roster.json"}
"""First parts of the keys that a near tier has, without epochs, steps and the files of its agent. Of peers, an agent
ends once its node is in no roster any more."""
_BYTES_MAX = 1 << 16


class NearRecord(msgspec.Struct):
    """The near tier of a run, as the root names it."""

    url: Text
    """Where the near tier is."""

    host: Text
    """The host of rank 0, for people: the folder may be on that host alone."""


def read_near(root: Store) -> NearRecord | None:
    """Return the record of the near tier of a run; None if the run has none.

    Raises:
        CorruptError: The record is damaged.
    """
    data = get_or_none(root, NEAR_FILE, _BYTES_MAX)
    return None if data is None else decode_sealed(data, _KIND, NearRecord, f"{root.url}/{NEAR_FILE}")[0]


def require_same_run(run: TwoRoots) -> None:
    """Refuse a near tier of another run or root. Nothing is written.

    Raises:
        InvalidError: The near tier is of another run or of another root, or holds a run of which the root is empty.
    """
    near, root = run.near.url, run.root.url
    at_near, at_root = read_run_id(run.near), read_run_id(run.root)
    if at_near is None:
        return
    if at_root is None:
        raise InvalidError(
            f"{near}: holds run {at_near}, and the root {root} is empty; expected a root of this run. Nothing was "
            f"touched. To give the root back: holdfast drain {near} --to {root}. To begin a run: choose another near "
            "folder"
        )
    if at_near != at_root:
        raise InvalidError(
            f"{near}: is the near tier of run {at_near}, and {root} holds run {at_root}; expected one run. Nothing was "
            "touched. Choose another near folder"
        )
    stated = root_of_near(run.near)
    if stated != root:
        raise InvalidError(
            f"{near}: is the near tier of {stated or 'no root: it is one itself'}; expected that of {root}. Nothing "
            "was touched. Choose another near folder; if the root has moved, drain it first: "
            f"holdfast drain {near} --to {root} --remove"
        )


def ensure_near(run: TwoRoots, new_id: str, created: str) -> str:
    """Begin the run at both places where there is none, and name the root near; return the id of the run.

    Args:
        run: Both places.
        new_id: The id of a new run.
        created: Wall-clock time, for people.
    Raises:
        InvalidError: As `require_same_run`.
        ConflictError: The root is that of a copy which is not complete.
    """
    require_same_run(run)
    run_id = ensure_run(run.root, new_id, created)
    if read_run_id(run.near) is None:
        document = {**header("run", minor=0), "run_id": run_id, "created": created, "root": run.root.url}
        publish(run.near, RUN_FILE, sealed(document))
        put_readme(run.near)
    renew_tags(run)
    return run_id


def record_near(run: TwoRoots) -> None:
    """Name the near tier in the root. Only the holder of the writer lease calls it: another job may have another one.

    Raises:
        UnavailableError: Storage failed.
    """
    record = sealed({**header(_KIND, minor=0), "url": run.near.url, "host": platform.node()})
    if get_or_none(run.root, NEAR_FILE, _BYTES_MAX) != record:
        run.root.put(NEAR_FILE, record)


def empty_near(run: TwoRoots) -> None:
    """Remove the near tier of a run whose root has each step that counts, under the writer lease; then its record.

    The records of epochs stay: a stopped writer of an older epoch finds there that its epoch is over.
    """
    near = run.near
    # Parity of packs that are lost has no pack with which it would go.
    keys = [entry.key for prefix in ("", PARITY_FOLDER) for entry in near.list(prefix)]
    firsts, own = {key: key.partition("/")[0] for key in keys}, _OWN - {RUN_FILE}
    gone = [key for key, first in firsts.items() if first in own or step_of_folder(first) is not None]
    for batch in (gone, [RUN_FILE]):  # The file of the run last: without it no command knows the folder.
        try:
            near.delete(batch)
        except UnavailableError as error:
            if {*batch} & {entry.key for entry in near.list("")}:
                raise
            # A node of peers is lost. Should it come back: its steps are in the root, or do not count.
            logger.warning("%s: emptied as far as its nodes answer: %s", near.url, error)
    record = read_near(run.root)
    if record is not None and record.url == near.url:
        run.root.delete([NEAR_FILE])


def renew_tags(run: TwoRoots) -> None:
    """Give the near tier the tags of the root: those that were removed or moved while it was away keep its steps."""
    for entry in list(run.near.list(TAGS_FOLDER)):
        data = get_or_none(run.root, entry.key, _BYTES_MAX)
        if data is None:
            run.near.delete([entry.key])
        elif not holds(run.near, entry.key, data):
            run.near.put(entry.key, data)
