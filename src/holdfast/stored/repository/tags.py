"""Tags: names that people give to steps. Each tag is one small file, put if absent, moved by one put."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FORMAT_MINOR_RUN, FORMAT_MINOR_TIMELINES
from holdfast.core.format.names import manifest_key, manifest_keys, step_folder, superseded_in
from holdfast.core.format.sealed_json import Digest, StepNumber, Text, decode_sealed, header, sealed, stated_digest
from holdfast.core.format.step_name import is_tag_name, require_tag_name
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, first_three
from holdfast.stored.repository.catalog import exists, manifest_in, read_manifest_bytes
from holdfast.stored.repository.epochs import current_fence, fenced_error
from holdfast.stored.repository.publish import get_or_none, holds, is_put_first
from holdfast.stored.repository.removal import mark_key
from holdfast.stored.repository.timelines import superseded_keys

TAGS_FOLDER = "tags/"

_SUFFIX = ".json"
_TAG_BYTES_MAX = 1 << 16
_NONCE_BYTES = 16
_TRIES = 16


@dataclass(frozen=True, slots=True)
class Tag:
    """A name for one step of a run."""

    name: str
    """The name."""

    step: int
    """The step that has the name."""

    digest: str
    """Digest of the step's manifest. A step that is removed and saved again has another digest."""

    created: str
    """Wall-clock time, ISO 8601 in UTC, for people."""


@dataclass(frozen=True, slots=True)
class Tags:
    """All tags of a run."""

    whole: Mapping[str, Tag] = field(default_factory=dict)
    """Readable tags, by name."""

    damaged: Mapping[str, CheckpointError] = field(default_factory=dict)
    """Errors of unreadable tags, by name."""

    def of(self, step: int, digest: str) -> tuple[str, ...]:
        """Return the tags of a step with this manifest. A step that was deleted and saved again has no old tags."""
        return tuple(tag.name for tag in self.whole.values() if (tag.step, tag.digest) == (step, digest))


def read_tags(store: Store) -> Tags:
    """Return all tags of a run. A damaged tag is listed with its error; it raises nothing."""
    whole: dict[str, Tag] = {}
    damaged: dict[str, CheckpointError] = {}
    for key in sorted(entry.key for entry in store.list(TAGS_FOLDER)):
        name = key.removeprefix(TAGS_FOLDER).removesuffix(_SUFFIX)
        if key != _key(name) or not is_tag_name(name):
            continue
        try:
            whole[name] = _read(store, name)
        except MissingError:
            continue  # Another process removed it after we listed it.
        except CheckpointError as error:
            damaged[name] = error
    return Tags(whole, damaged)


def whole_tags(store: Store) -> Tags:
    """Return the tags of a run; raise if one cannot be read, since it may name a step that must stay."""
    tags = read_tags(store)
    for error in tags.damaged.values():
        raise error
    return tags


def tag_named(store: Store, name: str) -> Tag:
    """Return a tag.

    Raises:
        MissingError: There is no such tag; the message names others.
        CorruptError: The tag is damaged.
    """
    try:
        return _read(store, name)
    except MissingError:
        raise _no_such_tag(store, name) from None


def put_tag(store: Store, step: int, name: str, created: str, digest: str | None = None, *, move: bool = False) -> Tag:
    """Give a committed step a tag. If the step has this tag already, nothing changes.

    A tag moves by one atomic put: it is at the former or at the new step at any time, also if two processes move it.

    Args:
        store: The root of the run.
        step: The step.
        name: The tag.
        created: Wall-clock time, for people.
        digest: Digest of its manifest, which may be superseded; None: the manifest in the folder of the step.
        move: Whether to move the tag if another step has it, or if it is damaged.
    Raises:
        MissingError: The step is not committed.
        ConflictError: The tag names another step, and is not to move; it was not touched.
        CorruptError: The step's manifest is damaged.
    """
    digest = _require_committed(store, step, digest)
    tag = Tag(name, step, digest, created)
    before = _put_or_find(store, tag, move=move)
    if isinstance(before, Tag):
        return before
    try:
        _require_committed(store, step, digest)
    except MissingError:
        # Something else than a collection removed the step meanwhile: a collection leaves a step that is being tagged.
        # A process that has moved the tag on since prevails.
        if before is None:
            _take_away(store, name, _encode(tag), mark_key(SystemClock().random_bytes(_NONCE_BYTES).hex()))
        else:
            with suppress(ConflictError):
                store.replace(_key(name), before, seen=_encode(tag, FORMAT_MINOR_TIMELINES))
        raise
    return tag


def _put_or_find(store: Store, tag: Tag, *, move: bool) -> bytes | Tag | None:
    """Store a tag; return what was stored there before, None if nothing was, or the tag if the step has it already.

    What refused the put and is gone by the next look, or was replaced since that, refuses nothing any more.

    Raises:
        ConflictError: The tag names another step, and is not to move; or it changes again and again.
        InvalidError: It is to move, and is of a newer format.
    """
    for _ in range(_TRIES):
        if is_put_first(store, _key(tag.name), _encode(tag)):
            return None
        before = get_or_none(store, _key(tag.name), _TAG_BYTES_MAX)
        if before is None:
            continue
        existing: Tag | None = None
        # A damaged tag may be replaced, one of a newer format may not.
        with suppress(CorruptError, *(() if move else (InvalidError,))):
            existing = _decoded(store, tag.name, before)
        if existing is not None and (existing.step, existing.digest) == (tag.step, tag.digest):
            return existing
        if not move:
            raise _conflict(store, tag.name, existing)
        with suppress(ConflictError):
            store.replace(_key(tag.name), _encode(tag, FORMAT_MINOR_TIMELINES), seen=before)
            return before
    raise ConflictError(
        f"{store.url}: tag {tag.name!r} changed {_TRIES} times while it was being put; expected one process that "
        "changes it. Nothing was changed. Try again"
    )


def _take_away(store: Store, name: str, data: bytes, aside: str) -> None:
    """Remove a tag if it is stored as these bytes. Another one that came meanwhile stays.

    Args:
        store: The root of the run.
        name: The tag.
        data: The tag as it is stored.
        aside: A key that no other call uses, and that the next collection removes.
    """
    key = _key(name)
    if not holds(store, key, data):
        return
    # A deletion by key alone would remove whatever is there by now.
    try:
        store.move(key, aside)
    except MissingError:
        return
    # A collector that was stopped for long, and does not know yet that its lease is over, removes it as an ended mark.
    moved = get_or_none(store, aside, _TAG_BYTES_MAX)
    if moved is not None and moved != data:
        with suppress(ConflictError):  # It was put anew since.
            store.put_if_absent(key, moved)
    store.delete([aside])


def tags_for_new_manifest(store: Store, step: int, digest: str) -> dict[str, bytes]:
    """Return tag files, by key, that point the tags of a step to its rewritten manifest.

    Args:
        store: The root of the run.
        step: The step.
        digest: Digest of its new manifest.
    """
    moved = {name[1] for _, key in superseded_keys(store) if (name := superseded_in(key)) is not None}
    tags = (
        tag
        for tag in read_tags(store).whole.values()
        # Another manifest of the step may be superseded: its tags stay with it.
        if tag.step == step and tag.digest != digest and tag.digest[:16] not in moved
    )
    return {_key(tag.name): _encode(replace(tag, digest=digest)) for tag in tags}


def remove_tag(store: Store, name: str) -> None:
    """Remove a tag, readable or damaged. The step is not touched.

    Raises:
        InvalidError: The text can be no tag.
        MissingError: The tag does not exist.
    """
    if not is_tag_name(name):
        require_tag_name(name)
    if not exists(store, _key(name)):
        raise _no_such_tag(store, name)
    store.delete([_key(name)])


def remove_tag_of_step(store: Store, tag: Tag, aside: str) -> None:
    """Remove a tag if it still names the step. A tag that moves to another step at this instant stays there.

    Args:
        store: The root of the run.
        tag: The tag, and the step that it named.
        aside: A key that no other call uses, and that the next collection removes.
    """
    data = get_or_none(store, _key(tag.name), _TAG_BYTES_MAX)
    if data is not None and _decoded(store, tag.name, data) == tag:
        _take_away(store, tag.name, data, aside)


def _require_committed(store: Store, step: int, digest: str | None) -> str:
    """Return the digest of a committed manifest of a step.

    Args:
        store: The root of the run.
        step: The step.
        digest: The digest that is wanted; None: the manifest in the folder of the step.
    """
    folder, fenced = step_folder(step), None
    for key in [manifest_key(step)] if digest is None else manifest_keys(step, digest):
        try:
            data = read_manifest_bytes(store, folder, key)
        except MissingError:
            continue
        if digest is not None and stated_digest(data) != digest:
            continue
        manifest = manifest_in(folder, data, f"{store.url}/{key}")
        if current_fence(store).admits(step, manifest.epoch, manifest.digest):
            return manifest.digest
        fenced = fenced_error(f"{store.url}/{key}")
    name = step if digest is None else f"{step}@{digest[:8]}"
    raise MissingError(
        f"{store.url}: no committed step {name} to tag; choose a committed step (holdfast ls {store.url})"
    ) from fenced


def _no_such_tag(store: Store, name: str) -> MissingError:
    known = first_three(read_tags(store).whole) or "none"
    return MissingError(f"{store.url}: no tag {name!r}; there are: {known}. Choose one of them")


def _conflict(store: Store, name: str, existing: Tag | None) -> ConflictError:
    state = f"names step {existing.step}" if existing is not None else "exists and is damaged"
    return ConflictError(
        f"{store.url}: tag {name!r} {state}; expected a free name. Nothing was changed. Move it with move=True "
        f"(holdfast tag ROOT STEP {name} --move), or choose another name"
    )


class _TagDocument(msgspec.Struct):
    name: str
    step: StepNumber
    manifest: Digest
    created: Text


def _encode(tag: Tag, minor: int = FORMAT_MINOR_RUN) -> bytes:
    fields = {"name": tag.name, "step": tag.step, "manifest": tag.digest, "created": tag.created}
    return sealed({**header("tag", minor), **fields})


def _read(store: Store, name: str) -> Tag:
    return _decoded(store, name, store.get(_key(name), _TAG_BYTES_MAX))


def _decoded(store: Store, name: str, data: bytes) -> Tag:
    where = f"{store.url}/{_key(name)}"
    document, _ = decode_sealed(data, "tag", _TagDocument, where)
    if document.name != name:
        raise CorruptError(f"{where}: is of tag {document.name[:80]!r}; expected {name!r}. It was copied or renamed")
    return Tag(name, document.step, document.manifest, document.created)


def _key(name: str) -> str:
    return f"{TAGS_FOLDER}{name}{_SUFFIX}"
