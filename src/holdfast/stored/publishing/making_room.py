"""Makes room for a manifest in the folder of a step: moves a damaged, fenced or superseded manifest away, no other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.base.types.timeline import Timeline
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, run_fields_of_manifest
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.publishing.manifest import clear_fenced
from holdfast.stored.repository.quarantine import supersede
from holdfast.stored.repository.timelines import displace, moved_at

logger = logging.getLogger(__name__)


def require_not_moved(location: CheckpointLocation, timeline: Timeline) -> None:
    """Refuse a step whose manifest is under `superseded/` and in the chain: the chain would hold it twice.

    Raises:
        ConflictError: Such a manifest is there.
    """
    assert location.step is not None, "a run saves steps"
    for manifest in moved_at(location.store, location.step):
        if manifest.timeline is not None and timeline.holds(manifest.timeline.id, location.step):
            raise ConflictError(
                f"{location.url}: a checkpoint of this timeline is already there; expected none. Its manifest is "
                f"{manifest.key}. Nothing was touched. Save another step, or save to another root"
            )


def has_made_room(
    location: CheckpointLocation, timeline: Timeline, epoch: int, records: Sequence[tuple[int, str]]
) -> bool:
    """Move a manifest away that does not count, is quarantined or of another timeline; return whether the step is free.

    Args:
        location: The step.
        timeline: The newest timeline, which is to have the step.
        epoch: Epoch of the caller, with a list with timelines if the run has several.
        records: Names of the records of quarantine.
    Raises:
        ConflictError: Another writer took over.
    """
    assert location.step is not None, "a run saves steps"
    if supersede(location.store, location.step, epoch, records=records):
        logger.warning(
            "step %d: its damaged manifest is moved to quarantine, and the step is saved anew", location.step
        )
    return clear_fenced(location, epoch) or _displaced(location, timeline, epoch)


def _displaced(location: CheckpointLocation, timeline: Timeline, epoch: int) -> bool:
    """Move a manifest of another timeline away from a step that is saved again; return whether the step is free."""
    assert location.step is not None, "a run saves steps"
    try:
        data = location.store.get(location.manifest_key, MANIFEST_BYTES_MAX)
        fields = run_fields_of_manifest(data, location.url)
    except MissingError:
        return True
    except (CorruptError, InvalidError):
        return False
    if timeline.holds(fields.timeline.id, location.step):
        return False
    logger.info("step %d: a newer timeline saves it again; its manifest is moved to superseded/", location.step)
    # The list of the epoch is one with timelines by now: after a crash, readers look for the moved manifest.
    displace(location.store, location.step, fields.digest, epoch)
    return True
