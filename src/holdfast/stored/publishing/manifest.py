"""Publishes a manifest, and reports the outcome: from this moment a checkpoint exists."""

from __future__ import annotations

import logging
from contextlib import suppress

from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, run_fields_of_manifest
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import CheckpointError, ConflictError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.publishing.outcome import Outcome, ask_storage, committed, unknown
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.epochs import current_fence, is_valid_manifest, require_newest
from holdfast.stored.repository.manifest_removal import remove_manifest
from holdfast.stored.repository.publish import get_or_none, publish

logger = logging.getLogger(__name__)


def publish_manifest(location: CheckpointLocation, data: bytes, epoch: int) -> Outcome:
    """Publish a manifest.

    Args:
        location: Where.
        data: The manifest.
        epoch: Epoch of the writer lease; 0 for a checkpoint saved by path.
    Returns:
        `committed`; `unknown` if the store failed during the publish; `ask_storage` if the lease may have ended
        meanwhile.
    Raises:
        ConflictError: Another attempt published first, or another writer took over; nothing was published.
        CheckpointError: It is certain that nothing was published.
    """
    if epoch:
        require_newest(location.store, epoch)
    try:
        _put(location, data, epoch)
    except ConflictError:
        raise
    except Exception as error:
        # The key may be visible although the call failed (the folder sync failed), or become visible later.
        if _is_certainly_absent(location):
            raise
        return unknown(str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
    digest = stated_digest(data)
    assert digest is not None, "a manifest is sealed"
    if epoch:
        try:
            # A new writer takes its epoch first and lists steps second. If no newer epoch exists yet, that
            # writer will list this step.
            require_newest(location.store, epoch)
        except Exception as doubt:  # noqa: BLE001 - the manifest is stored, whatever the error is
            return ask_storage(f"{type(doubt).__name__}: {doubt}")
    return committed(digest)


def _put(location: CheckpointLocation, data: bytes, epoch: int) -> None:
    try:
        publish(location.store, location.manifest_key, data)
    except ConflictError:
        if not epoch:
            raise
        if not clear_fenced(location, epoch):
            _require_not_own(location, epoch)
            raise
        publish(location.store, location.manifest_key, data)


def _require_not_own(location: CheckpointLocation, epoch: int) -> None:
    """Refuse with a message of its own if this job itself published the step since this save began.

    Raises:
        ConflictError: An earlier save of this job has saved the step.
    """
    is_own = False
    with suppress(CheckpointError):  # The conflict is certain, whichever writer was first.
        data = get_or_none(location.store, location.manifest_key, MANIFEST_BYTES_MAX)
        is_own = data is not None and run_fields_of_manifest(data, location.url).epoch == epoch
    if is_own:
        raise ConflictError(
            f"{location.url}: an earlier save of this job has saved step {location.step}; expected one save of a step. "
            "Nothing of it was touched. Leave out the second save, or save the state as another step"
        )


def clear_fenced(location: CheckpointLocation, epoch: int) -> bool:
    """Remove a fenced manifest from a step, so that the holder of the newest epoch can save the step.

    Args:
        location: The step.
        epoch: Epoch of the caller.
    Returns:
        Whether the step is free.
    Raises:
        ConflictError: Another writer took over.
    """
    assert location.step is not None, "only a run has epochs"
    store, key = location.store, location.manifest_key
    if not exists(store, key):
        return True
    fence = current_fence(store)
    if fence.epoch != epoch:
        return False
    data = get_or_none(store, key, MANIFEST_BYTES_MAX)
    if data is None:
        return True
    if is_valid_manifest(data, fence, f"{store.url}/{key}"):
        return False
    logger.warning("step %d: the manifest of a fenced writer does not count and is removed", location.step)
    remove_manifest(store, location.step, key, data, epoch)
    return True


def _is_certainly_absent(location: CheckpointLocation) -> bool:
    """Return whether a manifest whose put failed is absent and cannot appear later."""
    try:
        return location.store.traits.failed_calls_are_over and not exists(location.store, location.manifest_key)
    except Exception:  # noqa: BLE001 - not certain, whatever the error is
        return False
