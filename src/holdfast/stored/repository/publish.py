"""Publishing a file atomically, and the packs of a run that published manifests name."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from holdfast.base.ports.readable import Readable
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.names import is_pack_name, step_of_pack, step_pack_name
from holdfast.errors import ConflictError, CorruptError, MissingError

_TRIES = 16


def publish(store: Store, key: str, data: bytes) -> None:
    """Put `data` at `key` if nothing else is stored there.

    Raises:
        ConflictError: Another writer's content is there; it was not touched.
        UnavailableError: The store failed; whether `data` is visible now is unknown.
    """
    if not is_put_first(store, key, data):
        raise ConflictError(
            f"{store.url}/{key}: another writer published first; expected no file. Nothing of it was touched. "
            "Stop, or save elsewhere"
        )


def is_put_first(store: Store, key: str, data: bytes) -> bool:
    """Store an object unless another one is at the key; return whether it is stored.

    An object that refused the put and is gone by the next look refuses nothing any more: the put is tried again.
    """
    for _ in range(_TRIES):
        with suppress(ConflictError):
            store.put_if_absent(key, data)
            return True
        try:
            # If the reply to our own put was lost, its retry finds our bytes there: that is a success.
            return store.get(key, len(data)) == data
        except CorruptError:
            return False  # It is longer.
        except MissingError:
            continue
    return False


def get_or_none(store: Readable, key: str, bytes_max: int) -> bytes | None:
    """Return a small object whole; None if it does not exist."""
    try:
        return store.get(key, bytes_max)
    except MissingError:
        return None


def holds(store: Readable, key: str, data: bytes) -> bool:
    """Return whether exactly `data` is stored at `key`."""
    try:
        return store.get(key, len(data)) == data
    except (CorruptError, MissingError):
        return False  # It is longer, or there is none.


def packs_named_by(manifests: Iterable[Manifest]) -> frozenset[str]:
    """Return the packs of a run that some of its manifests name, by their path from the root.

    References are never chained, so no other manifest needs to be read.

    Args:
        manifests: Manifests of the steps that must stay readable.
    """
    return frozenset(path for manifest in manifests for path in pack_paths(manifest).values())


def pack_paths(manifest: Manifest) -> dict[str, str]:
    """Return the path from the root of the run to each pack that a manifest names, by its name in the manifest.

    Files that another system wrote are no packs of the run and are left out: their owner may delete them.
    """
    paths = {}
    for pack in manifest.packs:
        if step_of_pack(pack.name) is not None:
            paths[pack.name] = pack.name
        elif is_pack_name(pack.name) and manifest.step is not None:
            paths[pack.name] = step_pack_name(manifest.step, manifest.attempt, pack.name)
    return paths
