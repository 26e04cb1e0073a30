"""Tags: names for committed steps, given by hand or together with a save."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdfast.clock import Clock, utc_now_text
from holdfast.errors import CheckpointError, ConflictError, InvalidError
from holdfast.format.names import step_and_digest
from holdfast.leases.reader import is_being_deleted
from holdfast.loading.step_choice import find_step
from holdfast.ports.store import Store
from holdfast.repository.catalog import manifest_digest
from holdfast.repository.tags import put_tag, read_tags, remove_tag, require_tag_name

logger = logging.getLogger(__name__)


def tag_step(store: Store, clock: Clock, step: object, name: object) -> None:
    """Tag a committed step; changes nothing if the step has the tag already.

    Args:
        store: The root of the run.
        clock: The time.
        step: Its number; for a superseded step number and digest, as `300@1f2e`.
        name: The tag.
    Raises:
        InvalidError: The text cannot be a tag, or the number cannot be a step.
        MissingError: There is no such step.
        ConflictError: The tag names another step, or the step is being deleted.
    """
    number, digest = step_and_digest(step)
    name = require_tag_name(name)
    existed = name in read_tags(store).whole
    _, manifest = find_step(store, number, digest)
    # By its digest: a newer timeline may save the step again meanwhile.
    known = manifest.digest or manifest_digest(store, number, manifest.key)
    tag = put_tag(store, number, name, utc_now_text(clock), known)
    # Only after the tag is stored: a collection that missed the tag has stored its mark by now.
    if not existed and is_being_deleted(store, clock, number, tag.digest):
        remove_tag(store, name)
        raise ConflictError(
            f"{store.url}: step {step} is being deleted: no retention policy keeps it. Expected a step that stays. "
            "Nothing was tagged. Choose another step"
        )


def checked_tags(tags: Iterable[str] | str) -> tuple[str, ...]:
    """Return the tags passed to `save()`, checked.

    Raises:
        InvalidError: A text among them cannot be a tag.
    """
    if not isinstance(tags, Iterable):
        raise InvalidError(f"tags: {type(tags).__name__}; expected names such as ['release']")
    return tuple(map(require_tag_name, (tags,) if isinstance(tags, str) else tags))


def tag_saved(store: Store, clock: Clock, step: int, digest: str, tags: Iterable[str]) -> None:
    """Tag a step that was just committed. A failure is logged only: the step is saved all the same."""
    for tag in tags:
        try:
            tag_step(store, clock, f"{step}@{digest}", tag)
        except CheckpointError as error:
            logger.error("step %d is saved, but not tagged %s: %s", step, tag, error)
