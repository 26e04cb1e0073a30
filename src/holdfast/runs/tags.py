"""Giving steps names, by hand or with their save."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdfast.clock import Clock, utc_now_text
from holdfast.errors import CheckpointError, ConflictError, InvalidError
from holdfast.leases.reader import is_being_deleted
from holdfast.ports.store import Store
from holdfast.repository.tags import Tag, put_tag, read_tags, remove_tag, require_tag_free, require_tag_name

logger = logging.getLogger(__name__)


def tag_step(store: Store, clock: Clock, step: int, name: object) -> Tag:
    """Give a committed step a name; nothing changes if it has it already.

    Raises:
        InvalidError: It cannot be a name.
        MissingError: There is no such step.
        ConflictError: The tag names another step, or the step is being collected.
    """
    name = require_tag_name(name)
    known = name in read_tags(store).whole
    tag = put_tag(store, step, name, utc_now_text(clock))
    # Looked for after it was put: whoever removes the step sees the one, or we see the other.
    if not known and is_being_deleted(store, clock, step, tag.digest):
        remove_tag(store, name)
        raise ConflictError(
            f"{store.url}: step {step} is being collected, for no policy keeps it; expected one that stays. Nothing "
            "was tagged. Choose another step"
        )
    return tag


def untag(store: Store, name: object) -> None:
    """Take a name away from its step.

    Raises:
        InvalidError: It cannot be a name.
        MissingError: There is no such tag.
    """
    remove_tag(store, require_tag_name(name))


def checked_tags(tags: Iterable[str] | str) -> tuple[str, ...]:
    """Return the names that a step is to be given with its save.

    Raises:
        InvalidError: One cannot be a name.
    """
    if not isinstance(tags, Iterable):
        raise InvalidError(f"tags: {type(tags).__name__}; expected names such as ['release']")
    return tuple(map(require_tag_name, (tags,) if isinstance(tags, str) else tags))


def require_all_free(store: Store, tags: Iterable[str]) -> None:
    """Refuse a save whose tags name other steps, before anything is written.

    Raises:
        ConflictError: One does.
    """
    for tag in tags:
        require_tag_free(store, tag)


def tag_saved(store: Store, clock: Clock, step: int, tags: Iterable[str]) -> None:
    """Give a step that was just committed its names; what fails is logged, for the step is saved all the same."""
    for tag in tags:
        try:
            tag_step(store, clock, step, tag)
        except CheckpointError as error:
            logger.error("step %d is saved, but not tagged %s: %s", step, tag, error)
