"""The file `latest` in the root of a run: the folder of the newest committed step, for other tools.

No reader of Holdfast uses it, and nothing waits for its durability: it may be old or absent after a crash. The next
commit puts it right. A file of that name with other content belongs to another tool, and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from holdfast.base.ports.store import Store
from holdfast.core.format.names import LATEST_FILE, step_folder, step_of_folder
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.timelines import run_timelines

logger = logging.getLogger(__name__)

_BYTES_MAX = 256


def name_latest(store: Store, step: int | None, is_first_occurrence: Callable[[str], bool] = lambda _: True) -> None:
    """Name a step in `latest`. A failure is a warning: the step is committed all the same.

    Args:
        store: The root of the run.
        step: The step that was committed; None for the newest one, after a step of any number was added.
        is_first_occurrence: Returns whether a text is new to the log.
    """
    try:
        while True:
            seen = _ours(store)
            named = _newest(store) if step is None else step
            try:
                _put(store, named, seen)
                return
            except ConflictError:
                # Another writer named a step meanwhile. It may be a newer one, so the newest of all is named.
                if _ours(store) == seen:
                    raise
                step = None
    except CheckpointError as error:
        if is_first_occurrence(f"latest {type(error).__name__}"):
            logger.warning("%s/%s does not name the newest step: %s", store.url, LATEST_FILE, error)


def leave_latest(store: Store, going: Collection[tuple[int, str]]) -> None:
    """Make `latest` name another step if it names one that is about to be removed. A failure is a warning.

    Args:
        store: The root of the run.
        going: Step and digest of the manifests that are to be removed.
    """
    try:
        seen, numbers = _content(store), {step for step, _ in going}
        named = None if seen is None else _step_in(seen)
        if named not in numbers:
            return
        # The digests of a run that never went back are not read: it has one manifest at each step.
        left = [
            each.step
            for each in run_timelines(store).chain
            if (each.step not in numbers if each.digest is None else (each.step, each.digest) not in going)
        ]
        # A newer timeline may have saved the step again: then the step is still there.
        if named not in left:
            _put(store, left[-1] if left else None, seen)
    except CheckpointError as error:
        logger.warning("%s/%s may name a step that is removed: %s", store.url, LATEST_FILE, error)


def _newest(store: Store) -> int | None:
    chain = run_timelines(store).chain
    return chain[-1].step if chain else None


def _put(store: Store, step: int | None, seen: bytes | None) -> None:
    """Name a step in place of what was seen.

    Raises:
        ConflictError: Another writer has changed the file meanwhile.
    """
    if step is None:
        store.delete([LATEST_FILE])
    else:
        store.replace(LATEST_FILE, step_folder(step).rstrip("/").encode(), seen, durable=False)


def _content(store: Store) -> bytes | None:
    """Return what the file holds; None if there is none, or if it is too large to be ours, or no regular file."""
    try:
        return get_or_none(store, LATEST_FILE, _BYTES_MAX)
    except (CorruptError, InvalidError):
        return None


def _step_in(data: bytes) -> int | None:
    """Return the step that the file names; None if the file is not ours."""
    return step_of_folder(data.decode(errors="replace").strip())


def _ours(store: Store) -> bytes | None:
    """Return what the file holds; None if there is none.

    Raises:
        ConflictError: It has other content than the folder of a step: another tool wrote it, and it stays.
    """
    try:
        data = get_or_none(store, LATEST_FILE, _BYTES_MAX)
        # A power cut may leave our own file empty, or with zeros in place of its bytes.
        text = (data or b"").strip().strip(b"\0")
    except CorruptError:
        text = b"of another tool"
    if text and step_of_folder(text.decode(errors="replace")) is None:
        raise ConflictError("the file is of another tool, and stays as it is. Move it away, or use a root of its own")
    return data
