"""Compares the sizes of packs with their records: of thousands by listing ranges of keys, side by side.

A store that answers in pages is asked for as many packs as a page holds with one request. A listing proves only that a
pack has its size. A pack that no listing shows with its size is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from holdfast.base.ports.packs import Packs, Stored
from holdfast.base.ports.readable import Readable
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.core.engine.parallel_map import CALLS_AT_ONCE, ordered_parallel_map
from holdfast.core.format.names import is_file_url, is_pack_name, step_of_pack
from holdfast.errors import CheckpointError, CorruptError, InvalidError, UnavailableError
from holdfast.stored.repository.catalog import check_size, stored_bytes

_PAGES_PER_RANGE = 2
"""Pages of one range at most. Other objects may lie between its packs: then the rest are looked at one by one."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Packs of one folder whose keys follow each other."""

    files: Readable
    prefix: str
    """What comes before each name in its key."""

    names: Sequence[str]
    """Names of the packs, ascending."""

    entries_max: int
    """Entries of the listing at most."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the packs that a listing shows, by name; none if it is refused."""
        first, last = (self.prefix + name for name in (self.names[0], self.names[-1]))
        start, wanted, found = len(self.prefix), frozenset(self.names), {}
        try:
            # From the key before the first one: one character shorter, and no pack has a name between.
            listing = self.files.list(first.rpartition("/")[0] + "/", after=first[:-1], up_to=last)
            for entry in islice(listing, self.entries_max):
                if (name := entry.key[start:]) in wanted:
                    found[name] = entry.bytes
        except InvalidError:
            return {}
        return found


def sizes_of(names: Collection[str], packs: Packs) -> dict[str, int]:
    """Return the bytes of packs by name; 0 for one that does not exist.

    Args:
        names: The packs, each once.
        packs: Locates a pack by its name.
    """

    def size_of(name: str) -> int:
        stored = packs(name)
        return stored_bytes(stored.files, stored.key)

    sizes = listed_sizes(names, packs)
    others = sorted(name for name in names if name not in sizes)
    return sizes | dict(zip(others, ordered_parallel_map(size_of, others), strict=True))


def listed_sizes(names: Iterable[str], packs: Packs) -> dict[str, int]:
    """Return the bytes of packs by name, as far as listings of stores that answer in pages show them.

    A few packs of a folder are left out: a request for each takes one round trip too, and costs less than a page.

    Args:
        names: The packs, each once.
        packs: Locates a pack by its name.
    """
    folders: dict[str, list[str]] = {}
    for name in names:
        if not is_file_url(name):
            folders.setdefault(name.rpartition("/")[0], []).append(name)
    sizes: dict[str, int] = {}
    for found in ordered_parallel_map(_Range.sizes, _ranges(folders.values(), packs)):
        sizes |= found
    return sizes


def _ranges(folders: Iterable[list[str]], packs: Packs) -> Iterator[_Range]:
    """Yield the packs of each folder, in ranges of a page; none of a store that does not answer in pages."""
    for inside in folders:
        if len(inside) <= CALLS_AT_ONCE:
            continue
        inside.sort()
        try:
            stored = packs(inside[0])
        except InvalidError:
            continue  # It may not be read: whoever looks at it by itself says so.
        page = stored.files.traits.page_entries
        if page is None or not stored.key.endswith(inside[0]):
            continue  # A link has another name than its pack.
        prefix = stored.key.removesuffix(inside[0])
        for first in range(0, len(inside), page):
            yield _Range(stored.files, prefix, inside[first : first + page], _PAGES_PER_RANGE * page)


def require_sizes(records: Sequence[FileRecord], packs: Packs, step: int | None, *, are_voted: bool = False) -> None:
    """Refuse files of a checkpoint of which one is missing or has another size than its record says.

    Args:
        records: The files, packs most often, each once.
        packs: Locates one by its name.
        step: The step that names them.
        are_voted: Whether the ranks have just stored the files of this step. Then a store with parity need not answer
            for them: an agent that is gone for a second would fail the save, and if its node is lost, an older step
            counts.
    Raises:
        CorruptError: As `check_pack`.
    """

    def check(record: FileRecord) -> None:
        stored = packs(record.name)
        try:
            check_pack(stored, record, step)
        except UnavailableError:
            if not are_voted or step_of_pack(record.name) is not None or not stored.files.traits.has_parity:
                raise

    sizes = listed_sizes([record.name for record in records], packs)
    others = (record for record in records if sizes.get(record.name) != record.bytes)
    for _ in ordered_parallel_map(check, others):
        pass  # One that is absent or has another size raises.


def check_pack(stored: Stored, pack: FileRecord, step: int | None) -> None:
    """Refuse a pack that is missing or has another size than the manifest says.

    Args:
        stored: Its store and key.
        pack: Its record in the manifest.
        step: The step of the manifest.
    Raises:
        CorruptError: It is missing or of another size. For a pack of another step, the message names both steps.
    """
    try:
        check_size(stored.files, stored.key, pack)
    except CorruptError as error:
        pack_step = step_of_pack(pack.name)
        if pack_step is None:
            raise
        raise CorruptError(
            f"{error}. It belongs to step {pack_step}, and step {step} refers to it for unchanged tensors. Put it "
            "back, or choose another step"
        ) from error


def short_packs(store: Store, folder: str, manifest: Manifest, packs: Packs) -> dict[str, tuple[int, CheckpointError]]:
    """Return packs that are missing or of another size, by name: the readable bytes, and the error.

    A pack that another place has whole is not short. The first bytes of a truncated pack are readable. A longer pack of
    another step, or a referenced file of another size, is a different file: none of its bytes count.
    """
    names = [pack.name for pack in manifest.packs]
    sizes = _sizes_in_folders(names, packs, f"{folder}{manifest.attempt}/")
    sizes |= listed_sizes([name for name in names if name not in sizes], packs)

    def is_whole(pack: FileRecord, size: int) -> bool:
        return size == pack.bytes or (size > pack.bytes and is_pack_name(pack.name))

    def judged(pack: FileRecord) -> tuple[int, CheckpointError] | None:
        try:
            stored = packs(pack.name)
            check_pack(stored, pack, manifest.step)
        except InvalidError as refused:
            return 0, refused
        except CorruptError as error:
            if any(is_whole(pack, stored_bytes(place.files, place.key)) for place in stored.others):
                return None
            size = 0 if is_file_url(pack.name) else sizes.get(pack.name) or stored_bytes(stored.files, stored.key)
            return None if is_whole(pack, size) else (0 if size > pack.bytes else size, error)
        return None

    others = [pack for pack in manifest.packs if not is_whole(pack, sizes.get(pack.name, -1))]
    found = zip(others, ordered_parallel_map(judged, others), strict=True)
    return {pack.name: short for pack, short in found if short is not None}


def _sizes_in_folders(names: Iterable[str], packs: Packs, attempt_folder: str) -> dict[str, int]:
    """Return the bytes of packs by name, from whole listings of the folders of their attempts.

    A store that answers in pages is asked so for few packs of this attempt only.
    """
    folders: dict[str, set[str]] = {}
    for name in names:
        if not is_file_url(name):
            inside = "" if is_pack_name(name) else "/".join(name.split("/")[:2]) + "/"
            folders.setdefault(inside, set()).add(name)
    sizes = {}
    for inside, wanted in folders.items():
        with suppress(InvalidError):  # It may not be listed: each pack is looked at by itself.
            files = packs(min(wanted)).files
            if files.traits.page_entries is None or (not inside and len(wanted) <= 2 * CALLS_AT_ONCE):
                start = 0 if inside else len(attempt_folder)
                for entry in files.list(inside or attempt_folder):
                    if (name := entry.key[start:]) in wanted:
                        sizes[name] = entry.bytes
    return sizes
