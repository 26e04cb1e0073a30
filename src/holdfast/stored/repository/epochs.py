"""Epochs of a run: which process may write, and which checkpoints of former writers count.

Each epoch has up to three small objects:
- the record (`N.json`, put-if-absent): it begins epoch N and ends every older epoch;
- the list (`N.accepted.json`): the steps of former epochs that count from now on. Once the run has a second timeline,
  the list is of a kind that readers without timelines refuse: they would resume from a superseded step;
- the heartbeat (`N.beat`): rewritten by the holder while it lives.

The list is written after the record. So a writer that published a manifest and then saw no newer record knows that
the list of the next epoch will include its manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import msgspec

from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Epoch, Fence
from holdfast.base.types.manifest import FORMAT_MINOR_PARENTS, FORMAT_MINOR_TIMELINES
from holdfast.base.types.timeline import ANCESTORS_STATED, Fork, Timeline, parents_in
from holdfast.core.format.holders import HolderDocument, decode_holder, encode_holder
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, run_fields_of_manifest
from holdfast.core.format.names import (
    EPOCHS_FOLDER,
    accepted_key,
    beat_key,
    epoch_key,
    epoch_of_key,
    manifest_key,
)
from holdfast.core.format.sealed_json import Digest, EpochNumber, StepNumber, Text, decode_sealed, header, sealed
from holdfast.core.format.timeline import ParentDocument
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.settings import MIB
from holdfast.stored.repository.publish import get_or_none, publish

logger = logging.getLogger(__name__)

RELEASED = b"released\n"
"""Heartbeat of an epoch that its holder has released."""

_ACCEPTED = "accepted"
_ACCEPTED_WITH_TIMELINES = "accepted in a run with timelines"
_ACCEPTED_WITH_PARENTS = "accepted in a run with many timelines"
_ACCEPTED_KINDS = (_ACCEPTED, _ACCEPTED_WITH_TIMELINES, _ACCEPTED_WITH_PARENTS)

_RECORD_BYTES_MAX = 1 << 16
_ACCEPTED_BYTES_MAX = 256 * MIB
_BEAT_BYTES_MAX = 64
_RECORDS_KEPT = 8
"""Records that stay whatever they state. A process that releases its epoch at its exit may still publish for a moment:
it must find the record of the next one."""
_TRIES = 10


class _OfEpoch(msgspec.Struct):
    epoch: EpochNumber


class _EpochDocument(_OfEpoch):
    run_id: Text
    holder: HolderDocument
    former_ended: bool = False


class _AcceptedDocument(_OfEpoch):
    run_id: Text
    steps: list[tuple[StepNumber, str | None]]
    superseded: list[tuple[StepNumber, Digest]] = []
    parents: list[ParentDocument] = []
    holdfast: dict[str, object] = {}


_Document = TypeVar("_Document", bound=_OfEpoch)


def _decode(data: bytes, kind: str | tuple[str, ...], into: type[_Document], number: int, where: str) -> _Document:
    document, _ = decode_sealed(data, kind, into, where)
    if document.epoch != number:
        raise CorruptError(f"{where}: is of epoch {document.epoch}; expected {number}, as its name says")
    return document


def newest_epoch(store: Store) -> int:
    """Return the number of the newest epoch; 0 if no epoch exists."""
    return max(_numbers(store, epoch_key), default=0)


def read_epoch(store: Store, number: int) -> Epoch | None:
    """Return the record of an epoch, or None if it does not exist.

    Raises:
        CorruptError: The record is damaged.
        InvalidError: It is of another major version.
    """
    key = epoch_key(number)
    data = get_or_none(store, key, _RECORD_BYTES_MAX)
    if data is None:
        return None
    document = _decode(data, "epoch", _EpochDocument, number, f"{store.url}/{key}")
    return Epoch(number, document.run_id, decode_holder(document.holder), document.former_ended)


def put_epoch(store: Store, epoch: Epoch) -> None:
    """Begin an epoch.

    Raises:
        ConflictError: Another process began it.
        UnavailableError: The store failed; the epoch may have begun.
    """
    fields: dict[str, object] = {
        "epoch": epoch.number,
        "run_id": epoch.run_id,
        "holder": encode_holder(epoch.holder),
    }
    if epoch.former_ended:
        fields["former_ended"] = True
    publish(store, epoch_key(epoch.number), sealed(header("epoch") | fields))


def fill_records(root: Store, near: Store) -> None:
    """Give the near tier the records that the root alone has: a writer died between the two places.

    A writer of epoch N looks near for the record of N+1 alone, so no number may be missing.
    """
    there = {*_numbers(near, epoch_key)}
    for number in _numbers(root, epoch_key):
        data = None if number in there else get_or_none(root, epoch_key(number), _RECORD_BYTES_MAX)
        if data is not None:
            near.put_if_absent(epoch_key(number), data)


def put_accepted(
    store: Store,
    number: int,
    run_id: str,
    accepted: Mapping[int, str | None],
    superseded: Iterable[tuple[int, str]] | None = None,
    parents: Mapping[str, Fork] | None = None,
) -> None:
    """Write the list of former steps that count from now on. The holder of the epoch calls this once.

    Args:
        store: The root of the run.
        number: The epoch.
        run_id: The run.
        accepted: Digest of the manifest in the folder of each step; None if it cannot be read.
        superseded: Step and digest of the manifests outside step folders; None for a run with one timeline.
        parents: Where timelines leave their parents, by id, as the list of the epoch before states it.
    """
    publish(store, accepted_key(number), _encode_accepted(number, run_id, accepted, superseded, parents or {}))


def _encode_accepted(
    number: int,
    run_id: str,
    accepted: Mapping[int, str | None],
    superseded: Iterable[tuple[int, str]] | None,
    parents: Mapping[str, Fork],
) -> bytes:
    fields: dict[str, object] = {
        "epoch": number,
        "run_id": run_id,
        "steps": [[step, digest] for step, digest in sorted(accepted.items())],
    }
    if superseded is None:
        return sealed(header(_ACCEPTED) | fields)
    fields["superseded"] = [[step, digest] for step, digest in sorted(superseded)]
    if not parents:
        return sealed(header(_ACCEPTED_WITH_TIMELINES, FORMAT_MINOR_TIMELINES) | fields)
    fields["parents"] = [[id_, fork.timeline, fork.step, fork.digest] for id_, fork in sorted(parents.items())]
    return sealed(header(_ACCEPTED_WITH_PARENTS, FORMAT_MINOR_PARENTS) | fields)


def declare_timelines(store: Store, number: int, timeline: Timeline) -> None:
    """Have readers without timelines refuse the run. The epoch's holder calls it before a timeline begins.

    If the timeline has more ancestors than a manifest states, the list states them all from now on. Otherwise the list
    keeps its content, so nothing changes for other readers. A second call changes nothing.

    Args:
        store: The root of the run.
        number: The epoch.
        timeline: The timeline, with all its ancestors.
    Raises:
        ConflictError: Another process took over.
        CorruptError: The list of the epoch is damaged.
    """
    document = _list_of(store, number)
    known = _parents(document)
    parents = known | (parents_in([timeline]) if len(timeline.ancestors) > ANCESTORS_STATED else {})
    if document.holdfast.get("kind") != _ACCEPTED and parents == known:
        return
    require_newest(store, number)
    changed = _encode_accepted(number, document.run_id, dict(document.steps), document.superseded, parents)
    store.put(accepted_key(number), changed)


def forget_steps(store: Store, number: int, names: Collection[tuple[int, str]]) -> None:
    """Take removed steps out of the list of an epoch: a copy in a near tier that is away counts no more either.

    Args:
        store: The root of the run.
        number: The epoch; its holder calls.
        names: Step and digest of the manifests.
    Raises:
        ConflictError: Another process took over.
        CorruptError: The list of the epoch is damaged.
    """
    document = _list_of(store, number)
    steps = {step: digest for step, digest in document.steps if (step, digest) not in names}
    superseded = [name for name in document.superseded if name not in names]
    if len(steps) == len(document.steps) and len(superseded) == len(document.superseded):
        return
    require_newest(store, number)
    moved = None if document.holdfast.get("kind") == _ACCEPTED else superseded
    store.put(accepted_key(number), _encode_accepted(number, document.run_id, steps, moved, _parents(document)))


def _list_of(store: Store, number: int) -> _AcceptedDocument:
    key = accepted_key(number)
    data = store.get(key, _ACCEPTED_BYTES_MAX)
    return _decode(data, _ACCEPTED_KINDS, _AcceptedDocument, number, f"{store.url}/{key}")


def _parents(document: _AcceptedDocument) -> dict[str, Fork]:
    return {id_: Fork(parent, step, digest) for id_, parent, step, digest in document.parents}


def read_heartbeat(store: Store, number: int) -> bytes | None:
    """Return the last heartbeat of an epoch, or None before the first one."""
    return get_or_none(store, beat_key(number), _BEAT_BYTES_MAX)


def put_heartbeat(store: Store, number: int, beat: bytes) -> None:
    """Replace the heartbeat of an epoch; `RELEASED` ends it."""
    # Not durable: a heartbeat need not survive a power cut, because its holder does not.
    store.put(beat_key(number), beat, durable=False)


def current_fence(store: Store) -> Fence:
    """Return which manifests of a run count now.

    If the list of the newest epoch is damaged, the list before it is used, with a warning: damage to one small file
    must not make all steps of a run unreadable. If no list can be read, every manifest counts.

    Raises:
        UnavailableError: Storage failed.
    """
    for _ in range(_TRIES):
        try:
            return _current_fence(store)
        except MissingError:
            continue  # Its epoch is over: the list was removed after we listed it. List again.
    raise UnavailableError(f"{store.url}/{EPOCHS_FOLDER}: listed files do not exist, {_TRIES} times. Try again")


def _current_fence(store: Store) -> Fence:
    is_damaged = False
    for number in sorted(_numbers(store, accepted_key), reverse=True):
        key = accepted_key(number)
        where = f"{store.url}/{key}"
        try:
            data = store.get(key, _ACCEPTED_BYTES_MAX)
            document = _decode(data, _ACCEPTED_KINDS, _AcceptedDocument, number, where)
            # A damaged newer list may have been the first one with timelines.
            has_timelines = document.holdfast.get("kind") != _ACCEPTED or is_damaged
            superseded = frozenset(document.superseded)
            return Fence(number, dict(document.steps), superseded, has_timelines, _parents(document))
        except CorruptError as error:
            is_damaged = True
            logger.warning("the list of epoch %d cannot be read; the list before it is used: %s", number, error)
    # No list is left, so every manifest counts. A damaged list may have been one with timelines: so the timelines that
    # the manifests state decide, and the next list must be one with timelines again.
    return Fence(has_timelines=is_damaged)


def is_valid(store: Store, fence: Fence, step: int) -> bool:
    """Return whether the manifest at a step counts. A damaged or newer one does, so that readers report it.

    Raises:
        MissingError: The step has no manifest.
    """
    key = manifest_key(step)
    if not fence.epoch:
        store.size(key)
        return True
    return is_valid_manifest(store.get(key, MANIFEST_BYTES_MAX), fence, f"{store.url}/{key}")


def is_valid_manifest(data: bytes, fence: Fence, where: str) -> bool:
    """Return whether a manifest counts, given its bytes; as `is_valid`."""
    try:
        step, epoch, digest, _, _ = run_fields_of_manifest(data, where)
    except (CorruptError, InvalidError):
        return True
    return step is None or fence.admits(step, epoch, digest)


def accepted_steps(store: Store, fence: Fence, steps: Iterable[int]) -> dict[int, str | None]:
    """Return the digest of the manifest of every step that counts.

    For a damaged or newer manifest the digest is None, and any manifest at this step counts. A late writer cannot use
    this to publish: its put-if-absent finds the damaged manifest.

    Raises:
        InvalidError: A manifest is not a readable file, so whether it counts is unknown.
        UnavailableError: Storage failed.
    """
    accepted: dict[int, str | None] = {}
    for step in steps:
        key = manifest_key(step)
        try:
            data = store.get(key, MANIFEST_BYTES_MAX)
        except MissingError:
            continue
        except CorruptError:
            accepted[step] = None  # Too large for a manifest.
            continue
        except InvalidError as error:
            raise unreadable_error(step, error) from error
        try:
            manifest_step, epoch, digest, _, _ = run_fields_of_manifest(data, f"{store.url}/{key}")
        except (CorruptError, InvalidError):
            accepted[step] = None
            continue
        if manifest_step is None or fence.admits(manifest_step, epoch, digest):
            accepted[step] = digest
    return accepted


def unreadable_error(step: int, error: InvalidError) -> InvalidError:
    """Return the error of a new writer for a manifest that is not a readable file."""
    return InvalidError(
        f"{error}. Whether step {step} counts is unknown until its manifest can be read. A new writer would "
        "make the step invalid, so this one stops. Nothing was changed. Make the manifest readable"
    )


def fenced_error(where: str) -> MissingError:
    """Return the error for a manifest that does not count."""
    return MissingError(
        f"{where}: not a checkpoint: its epoch is over, and the list of the newer epoch does not have it. Either a "
        "replaced writer published it, or it was moved away and back. Choose another step, or accept this one if it "
        "is whole: holdfast repair ROOT --step N --unfinished"
    )


def require_newest(store: Store, number: int) -> None:
    """Refuse to write under an epoch that is over.

    Raises:
        ConflictError: A newer epoch exists; the message names its holder.
    """
    # One look is enough: a record goes only once no process writes under the epoch before it. Read the record instead
    # of asking for its size: a network mount answers a stat of an absent name from its cache for seconds, but asks the
    # server at an open.
    try:
        store.get(epoch_key(number + 1), _RECORD_BYTES_MAX)
    except MissingError:
        return
    except (CorruptError, InvalidError):
        pass  # It is there, and cannot be read.
    newest = max(newest_epoch(store), number + 1)
    raise ConflictError(
        f"{store.url}: epoch {number} is over: {format_holder(store, newest)} took over. Expected one "
        "writer of this run. Stop this job, or save elsewhere"
    )


def require_counted(store: Store, step: int, number: int, digest: str) -> None:
    """Refuse a manifest that was published after its epoch ended, unless the newer epoch accepted it.

    Args:
        store: The root of the run.
        step: The step of the manifest.
        number: Its epoch.
        digest: Its digest.
    Raises:
        ConflictError: The manifest never counts; the message names the new holder.
        UnavailableError: The newer epoch has no list yet, so the outcome is unknown.
    """
    try:
        require_newest(store, number)
    except ConflictError as over:
        fence = current_fence(store)
        if fence.epoch <= number:
            raise UnavailableError(f"{over}. Its list of accepted steps does not exist yet") from over
        if not fence.admits(step, number, digest):
            raise ConflictError(f"{over}. Step {step} was published too late and does not count") from over


def format_holder(store: Store, number: int) -> str:
    """Return the holder of an epoch, for messages."""
    try:
        epoch = read_epoch(store, number)
    except CheckpointError:
        epoch = None
    return f"epoch {number} ({'its record cannot be read' if epoch is None else epoch.holder})"


def remove_before(store: Store, number: int) -> None:
    """Remove the lists and heartbeats of older epochs, and the records that no process looks for any more.

    A record says to the writer of the epoch before it that this epoch is over. Once that writer has ended, only a
    process that was about to begin the same epoch looks for the record: it finds the list of a newer epoch instead.

    Args:
        store: The root of the run.
        number: The newest epoch with a list that stays whole. The caller's own list is stored.
    """
    if number <= 1:
        return  # The first epoch has the number 1.
    old = []
    # A record that has to stay is read at some restarts only: a run may have many of them.
    looked_at = range(number - 2 * _RECORDS_KEPT, number - _RECORDS_KEPT)
    for entry in store.list(EPOCHS_FOLDER):
        epoch = epoch_of_key(entry.key)
        if epoch is None or epoch >= number:
            continue
        if entry.key != epoch_key(epoch) or (epoch in looked_at and _former_ended(store, epoch)):
            old.append(entry.key)
    if old:
        store.delete(old)


def _former_ended(store: Store, number: int) -> bool:
    try:
        epoch = read_epoch(store, number)
    except (CorruptError, InvalidError):
        return False
    return epoch is not None and epoch.former_ended


def _numbers(store: Store, key_of: Callable[[int], str]) -> list[int]:
    """Return the epochs that have an object of one kind.

    Args:
        store: The root of the run.
        key_of: `epoch_key` or `accepted_key`.
    """
    keys = [entry.key for entry in store.list(EPOCHS_FOLDER)]
    numbers = ((epoch_of_key(key), key) for key in keys)
    return [number for number, key in numbers if number is not None and key == key_of(number)]
