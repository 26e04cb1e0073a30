"""Tags: names for committed steps, given by hand or together with a save.

A step that is being tagged must not be deleted meanwhile, and a tag that moves must not be lost. So the tagger stores a
reader lease on the step first, then looks for the mark of a collection, and only then puts the tag. The collector puts
its mark, then looks for leases, and only then reads the tags. It therefore sees the lease or the tag, or the tagger
sees the mark and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.step_name import require_tag_name
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    UnavailableError,
)
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.reader import ReaderLease
from holdfast.stored.repository.tags import put_tag
from holdfast.training.loading.named_step import finder_of
from holdfast.training.loading.resolve import location_named

logger = logging.getLogger(__name__)


def tag_step(store: Store, clock: Clock, step: object, name: object, *, move: bool = False) -> None:
    """Tag a committed step; changes nothing if the step has the tag already.

    Args:
        store: The root of the run.
        clock: The time.
        step: Its number, number and digest (`300@1f2e`), another tag of it, or `latest`, the newest one that is not
            damaged.
        name: The tag.
        move: Whether the tag moves if another step has it.
    Raises:
        InvalidError: The text cannot be a tag, or the name cannot be that of a step.
        MissingError: There is no such step.
        ConflictError: The tag names another step and is not to move, or the step is being deleted.
        UnavailableError: Storage failed, or takes no lease, so that the step could be deleted meanwhile.
    """
    name = require_tag_name(name)
    home = CheckpointLocation(store, "", None, root=store)
    location = location_named(home, finder_of("" if step is None else step), clock)
    manifest = _manifest(location)
    assert manifest.step is not None, "it is that of a step"
    with closing(ReaderLease(clock, Settings().lease_seconds)) as lease:
        try:
            lease.begin(location, manifest)
        except MissingError as gone:
            raise ConflictError(
                f"{store.url}: step {step} is being deleted: no retention policy keeps it. Expected a step that stays. "
                "Nothing was tagged. Choose another step"
            ) from gone
        if not lease.is_stored:
            raise UnavailableError(
                f"{store.url}: step {step} is not tagged: no lease could be stored under readers/, and without one the "
                "step could be deleted meanwhile. Let this process write to that folder, and tag the step again"
            )
        # By its digest: a newer timeline may save the step again meanwhile.
        put_tag(store, manifest.step, name, utc_now_text(clock), manifest.digest, move=move)


def _manifest(location: CheckpointLocation) -> Manifest:
    """Return the manifest of a step; raises `CorruptError` if it is damaged or of another step."""
    data, where = location.store.get(location.manifest_key, MANIFEST_BYTES_MAX), location.manifest_url
    manifest = decode_manifest(data, where)
    if manifest.step != location.step:
        raise CorruptError(
            f"{where}: is of step {manifest.step}; expected step {location.step}. It was copied or renamed"
        )
    return manifest


def checked_tags(tags: Iterable[str] | str, move_tags: Iterable[str] | str = ()) -> dict[str, bool]:
    """Return the tags passed to `save()`, checked, each with whether it moves.

    Raises:
        InvalidError: A text among them cannot be a tag.
    """
    names: dict[str, bool] = {}
    for argument, given, moves in (("tags", tags, False), ("move_tags", move_tags, True)):
        if not isinstance(given, Iterable):
            raise InvalidError(f"{argument}: {type(given).__name__}; expected names such as ['best']")
        names |= {require_tag_name(name): moves for name in ((given,) if isinstance(given, str) else given)}
    return names


def tag_saved(store: Store, clock: Clock, step: int, digest: str, tags: Mapping[str, bool]) -> list[str]:
    """Tag a step that was just committed; return what kept it from some tags. The step is saved all the same.

    Args:
        store: The root of the run.
        clock: The time.
        step: The step.
        digest: Digest of its manifest.
        tags: Its tags, each with whether it moves.
    """
    untagged = []
    for tag, moves in tags.items():
        try:
            tag_step(store, clock, f"{step}@{digest}", tag, move=moves)
        except CheckpointError as error:
            logger.warning("step %d is saved, but not tagged %s: %s", step, tag, error)
            untagged.append(f"{tag}: {error}")
    return untagged
