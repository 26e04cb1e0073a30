"""Records of epochs under the root of a run: who may write, and which checkpoints of former writers count.

Three small objects per epoch. The record, put if absent, is the instant at which an epoch begins and every older one
ends. What it accepts is said after that, so that whoever saw no newer record once its manifest was there knows that
the manifest will be found. The beat is its holder's sign of life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.format.holders import HolderDocument, decode_holder, encode_holder
from holdfast.format.manifest import MANIFEST_BYTES_MAX, epoch_of_manifest
from holdfast.format.names import (
    EPOCHS_FOLDER,
    MANIFEST_FILE,
    accepted_key,
    beat_key,
    epoch_key,
    epoch_of_key,
    step_folder,
)
from holdfast.format.sealed_json import EpochNumber, StepNumber, Text, decode_sealed, header, sealed
from holdfast.ports.store import Store
from holdfast.repository.publish import publish
from holdfast.settings import MIB
from holdfast.types.epoch import Epoch, Fence

logger = logging.getLogger(__name__)

RELEASED = b"released\n"
"""The beat of an epoch whose holder is done."""

_RECORD_BYTES_MAX = 1 << 16
_ACCEPTED_BYTES_MAX = 256 * MIB
_BEAT_BYTES_MAX = 64
_TRIES = 10


class _OfEpoch(msgspec.Struct):
    epoch: EpochNumber


class _EpochDocument(_OfEpoch):
    run_id: Text
    holder: HolderDocument


class _AcceptedDocument(_OfEpoch):
    steps: list[tuple[StepNumber, str | None]]


_Document = TypeVar("_Document", bound=_OfEpoch)


def _decode(data: bytes, kind: str, into: type[_Document], number: int, where: str) -> _Document:
    document, _ = decode_sealed(data, kind, into, where)
    if document.epoch != number:
        raise CorruptError(f"{where}: is of epoch {document.epoch}; expected {number}, as its name says")
    return document


def newest_epoch(store: Store) -> int:
    """Return the number of the newest epoch; 0 if there is none."""
    return max(_numbers(store, epoch_key), default=0)


def read_epoch(store: Store, number: int) -> Epoch | None:
    """Return the record of an epoch, or None if there is none.

    Raises:
        CorruptError: It is damaged.
        InvalidError: It is of another major version.
    """
    key = epoch_key(number)
    where = f"{store.url}/{key}"
    try:
        data = store.get(key, _RECORD_BYTES_MAX)
    except MissingError:
        return None
    document = _decode(data, "epoch", _EpochDocument, number, where)
    return Epoch(number, document.run_id, decode_holder(document.holder))


def put_epoch(store: Store, epoch: Epoch) -> None:
    """Begin an epoch.

    Raises:
        ConflictError: Somebody else did.
        UnavailableError: The store failed; it may have begun.
    """
    fields = {"epoch": epoch.number, "run_id": epoch.run_id, "holder": encode_holder(epoch.holder)}
    publish(store, epoch_key(epoch.number), sealed(header("epoch") | fields))


def put_accepted(store: Store, number: int, run_id: str, accepted: Mapping[int, str | None]) -> None:
    """Say which steps of former epochs count from now on; for the holder of the epoch, once."""
    steps = [[step, digest] for step, digest in sorted(accepted.items())]
    fields = {"epoch": number, "run_id": run_id, "steps": steps}
    publish(store, accepted_key(number), sealed(header("accepted") | fields))


def read_heartbeat(store: Store, number: int) -> bytes | None:
    """Return an epoch's last sign of life, or None if there was none yet."""
    try:
        return store.get(beat_key(number), _BEAT_BYTES_MAX)
    except MissingError:
        return None


def put_heartbeat(store: Store, number: int, beat: bytes) -> None:
    """Give a sign of life of an epoch, or `RELEASED`; nothing of it need outlive a power cut, nor wait for a disk."""
    store.put(beat_key(number), beat, durable=False)


def current_fence(store: Store) -> Fence:
    """Return which manifests of a run count now.

    Where what the newest epoch accepted cannot be read, what the one before it accepted counts, with a warning: a small
    file must not take all steps of a run with it.

    Raises:
        UnavailableError: Storage failed.
    """
    for _ in range(_TRIES):
        try:
            return _current_fence(store)
        except MissingError:
            continue  # Removed after we listed it, for two newer ones are there.
    raise UnavailableError(f"{store.url}/{EPOCHS_FOLDER}: what is listed is not there, {_TRIES} times. Try again")


def _current_fence(store: Store) -> Fence:
    for number in sorted(_numbers(store, accepted_key), reverse=True):
        key = accepted_key(number)
        where = f"{store.url}/{key}"
        try:
            data = store.get(key, _ACCEPTED_BYTES_MAX)
            return Fence(number, dict(_decode(data, "accepted", _AcceptedDocument, number, where).steps))
        except CorruptError as error:
            logger.warning(
                "what epoch %d accepted cannot be read, what the one before it did counts: %s", number, error
            )
    return Fence()


def is_valid(store: Store, fence: Fence, step: int) -> bool:
    """Return whether the manifest at a step counts; one that is damaged or of a newer format does, to be met as such.

    Raises:
        MissingError: There is none.
    """
    folder = step_folder(step)
    if not fence.epoch:
        store.size(folder + MANIFEST_FILE)
        return True
    data = store.get(folder + MANIFEST_FILE, MANIFEST_BYTES_MAX)
    return is_valid_manifest(data, fence, f"{store.url}/{folder}{MANIFEST_FILE}")


def is_valid_manifest(data: bytes, fence: Fence, where: str) -> bool:
    """Return whether a manifest that was read counts; as `is_valid`."""
    try:
        step, epoch, digest = epoch_of_manifest(data, where)
    except (CorruptError, InvalidError):
        return True
    return step is None or fence.admits(step, epoch, digest)


def accepted_steps(store: Store, fence: Fence, steps: Iterable[int]) -> dict[int, str | None]:
    """Return the digest of the manifest of every step that counts.

    Of one that is damaged, or of a newer format, it is None: whatever is put in its place counts. No late writer can,
    for a manifest is put if absent.

    Raises:
        InvalidError: A manifest may not be read, or is no file: whether it counts cannot be told.
        UnavailableError: Storage failed.
    """
    found: dict[int, str | None] = {}
    for step in steps:
        key = step_folder(step) + MANIFEST_FILE
        try:
            data = store.get(key, MANIFEST_BYTES_MAX)
        except MissingError:
            continue
        except CorruptError:
            found[step] = None  # Too large for one.
            continue
        except InvalidError as error:
            raise InvalidError(
                f"{error}. Whether step {step} counts cannot be told until its manifest can be read, and a writer that "
                "went on without it would make it count no more. Nothing of it was touched"
            ) from error
        try:
            named, epoch, digest = epoch_of_manifest(data, f"{store.url}/{key}")
        except (CorruptError, InvalidError):
            found[step] = None
            continue
        if named is None or fence.admits(named, epoch, digest):
            found[step] = digest
    return found


def fenced_error(where: str) -> MissingError:
    """Return the error for a manifest that does not count."""
    return MissingError(
        f"{where}: its epoch is over, and the newer one did not find it: it was published by a writer that another one "
        "had replaced, or was away at that time (restored since, or moved and moved back). So it is no checkpoint. "
        "Choose another step, or take it in if it is whole: holdfast repair ROOT --step N --unfinished"
    )


def require_newest(store: Store, number: int) -> None:
    """Refuse to go on under an epoch that is over.

    Raises:
        ConflictError: There is a newer one; the message names its holder.
    """
    # Epochs have no gaps, and a record never goes.
    try:
        store.size(epoch_key(number + 1))
    except MissingError:
        return
    raise ConflictError(
        f"{store.url}: epoch {number} is over: {format_holder(store, newest_epoch(store))} took over. Expected to be "
        "the only writer of this run. Stop this job, or save elsewhere"
    )


def require_counted(store: Store, step: int, number: int, digest: str) -> None:
    """Refuse a manifest that was published when its epoch was over, unless it was accepted all the same.

    Args:
        store: The root of the run.
        step: Where the manifest lies.
        number: Its epoch.
        digest: Its digest.
    Raises:
        ConflictError: It does not count and never will; the message names who took over.
        UnavailableError: The newer epoch has not said yet what it accepts.
    """
    try:
        require_newest(store, number)
    except ConflictError as over:
        fence = current_fence(store)
        if fence.epoch <= number:
            raise UnavailableError(f"{over}. It has not said yet which steps it accepts") from over
        if not fence.admits(step, number, digest):
            raise ConflictError(f"{over}. Step {step} was published too late and does not count") from over


def format_holder(store: Store, number: int) -> str:
    """Return who holds an epoch, for messages."""
    try:
        epoch = read_epoch(store, number)
    except CheckpointError:
        epoch = None
    return f"epoch {number} ({'its record cannot be read' if epoch is None else epoch.holder})"


def remove_before(store: Store, number: int) -> None:
    """Remove what epochs before one accepted, and their beats; the records stay, for they say that an epoch is over."""
    keys = (entry.key for entry in store.list(EPOCHS_FOLDER))
    old = [key for key in keys if (epoch_of_key(key) or number) < number and key != epoch_key(epoch_of_key(key) or 0)]
    if old:
        store.delete(old)


def _numbers(store: Store, key_of: Callable[[int], str]) -> list[int]:
    """Return the epochs that have a record, or have said what they accept."""
    keys = [entry.key for entry in store.list(EPOCHS_FOLDER)]
    numbers = ((epoch_of_key(key), key) for key in keys)
    return [number for number, key in numbers if number is not None and key == key_of(number)]
