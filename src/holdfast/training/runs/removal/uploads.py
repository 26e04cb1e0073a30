"""Removes uploads in parts that a killed process left in a run. No listing of objects shows them."""

from __future__ import annotations

import logging

from holdfast.base.ports.store import Store
from holdfast.core.format.names import is_attempt_file, is_attempt_folder, step_of_folder
from holdfast.errors import InvalidError

logger = logging.getLogger(__name__)


def uploads_removed(store: Store, *, dry_run: bool = False) -> int:
    """Remove the uploads of files of attempts; return how many there were.

    The caller holds the writer lease. A user who may not list uploads, or a server that cannot, is no error.

    Args:
        store: The root of the run.
        dry_run: Only count.
    Raises:
        UnavailableError: Storage failed; the next call continues.
    """
    try:
        return store.abort_uploads("", _is_of_attempt, dry_run=dry_run)
    except InvalidError as error:
        logger.warning("uploads that were never ended were not looked for: %s", error)
        return 0


def _is_of_attempt(key: str) -> bool:
    step, _, rest = key.partition("/")
    attempt, _, name = rest.partition("/")
    return step_of_folder(step) is not None and is_attempt_folder(attempt) and is_attempt_file(name)
