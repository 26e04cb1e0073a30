"""Where a checkpoint is stored: a store and a folder in it; checks if a path is one checkpoint or a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from holdfast.base.ports.foreign import WatchedFiles
from holdfast.base.ports.packs import Packs, Stored, packs_under
from holdfast.base.ports.readable import Readable
from holdfast.base.ports.store import Store
from holdfast.base.types.listing import ForeignListing
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.digest import short_digest_of
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.names import (
    MANIFEST_FILE,
    RUN_FILE,
    is_file_url,
    link_name,
    manifest_keys,
    step_folder,
    step_of_pack,
)
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.settings import MIB
from holdfast.stored.checkpoint.linked_packs import LinkedPack
from holdfast.stored.checkpoint.pack_sizes import require_sizes, short_packs
from holdfast.stored.repository.catalog import (
    exists,
    manifest_in,
    read_manifest_bytes,
    step_folders,
    stored_bytes,
)
from holdfast.stored.repository.epochs import current_fence, fenced_error, is_valid, is_valid_manifest
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.two_roots import TwoRoots, places_of

logger = logging.getLogger(__name__)


DOCUMENT_BYTES_MAX = MIB
"""Largest file in which sizes of a layout are found."""


def none_allowed(url: str) -> NoReturn:
    """Refuse every referenced file.

    Raises:
        InvalidError: Always.
    """
    raise InvalidError(f"{url}: the checkpoint references this file, and no references are allowed here")


@dataclass(frozen=True, slots=True)
class ForeignPath:
    """Files at the path of a checkpoint that another system may have written."""

    files: WatchedFiles
    """The folder that was named, or the folder of the file that was named."""

    name: str
    """Key of the file that was named; empty for a folder."""

    listed: Callable[[Readable, str], ForeignListing | None]
    """Returns what a format lists for files and a name; None if no format knows them."""

    is_file: bool = False
    """Whether the path is known to be a file, so that it has no manifest below it. Of a URL nobody knows before."""

    def listing(self) -> ForeignListing | None:
        """Return what the checkpoint holds; None if no format knows it.

        Raises:
            CheckpointError: It is unreadable.
        """
        return self.listed(self.files, self.name)

    def stamps(self, keys: Collection[str]) -> Mapping[str, str]:
        """As `WatchedFiles.stamps`."""
        return self.files.stamps(keys)

    def require_unchanged(self, keys: Collection[str]) -> None:
        """As `WatchedFiles.require_unchanged`."""
        self.files.require_unchanged(keys)

    def for_operation(self, name: str, rank: int, world_size: int) -> ForeignPath:
        """Return the files as one load sees them, as `WatchedFiles.for_operation`."""
        return replace(self, files=self.files.for_operation(name, rank, world_size))


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """Where one checkpoint is stored."""

    store: Store
    """The store."""

    folder: str
    """Prefix of its keys: empty, or ending in a slash."""

    step: int | None
    """Its step; None for a checkpoint saved by path."""

    foreign: ForeignPath | None = None
    """The files there, if another system may have written them."""

    references: Packs = none_allowed
    """Locates files that the checkpoint references by URL."""

    root: Store | None = None
    """The root of its run, with the packs of other steps; None if it belongs to no run."""

    others: tuple[Store, ...] = ()
    """Other roots of the same run that hold the step: their packs are read where one here is missing or damaged."""

    moved_manifest: str | None = None
    """Key of the manifest, if a newer timeline saved the step again; None if the manifest is in the folder."""

    digest: str | None = None
    """Digest of the manifest, if it was read when the step was chosen. Another manifest is another checkpoint."""

    chosen: bytes | None = None
    """The manifest, if it was read when the step was chosen, and counts: nobody needs to read it again."""

    def at(self, places: Sequence[int]) -> CheckpointLocation:
        """Return the location in the near tier (0), in the root (1), or in both, the first one first.

        Args:
            places: The numbers; empty if the run has one place.
        """
        if not isinstance(self.store, TwoRoots) or not places:
            return self
        first, *others = ((self.store.near, self.store.root)[number] for number in places)
        return replace(self, store=first, others=tuple(others))

    @property
    def url(self) -> str:
        """The location, for messages."""
        if self.foreign is not None and self.foreign.name:
            return f"{self.foreign.files.url}/{self.foreign.name}"
        return f"{self.store.url}/{self.folder}".rstrip("/")

    def document(self, name: str) -> bytes | None:
        """Return a small file that lies with the checkpoint, such as `config.json`; None if there is none."""
        files, folder = (self.store, self.folder) if self.foreign is None else (self.foreign.files, "")
        return get_or_none(files, folder + name, DOCUMENT_BYTES_MAX)

    @property
    def url_digest(self) -> bytes:
        """The digest of the location, by which ranks compare it."""
        # The name of a folder may be no UTF-8.
        return short_digest_of(self.url.encode(errors="surrogateescape"))

    @property
    def manifest_key(self) -> str:
        """Key of the manifest."""
        return self.moved_manifest or self.folder + MANIFEST_FILE

    @property
    def manifest_url(self) -> str:
        """Where the manifest lies, for messages: under `superseded/` if a newer timeline took its place."""
        return f"{self.store.url}/{self.manifest_key}"

    def for_operation(self, name: str, rank: int, world_size: int) -> CheckpointLocation:
        """Return the location as one save or load sees it: the retries of its stores share one deadline.

        Args:
            name: Name of the save or load, for messages.
            rank, world_size: This rank, and the number of ranks.
        """
        store = self.store.for_operation(name, rank, world_size)
        # The root is most often the same store: one deadline for both.
        root = store if self.root is self.store else None
        if self.root is not None and root is None:
            root = self.root.for_operation(name, rank, world_size)
        foreign = None if self.foreign is None else self.foreign.for_operation(name, rank, world_size)
        others = tuple(other.for_operation(name, rank, world_size) for other in self.others)
        return replace(self, store=store, root=root, foreign=foreign, others=others)

    def packs_of(self, manifest: Manifest) -> Packs:
        """Return a function that locates the packs of the checkpoint by name."""
        if not manifest.attempt and self.foreign is not None:
            return packs_under(self.foreign.files, "")
        return self.packs_in(manifest.attempt)

    def packs_in(self, attempt: str) -> Packs:
        """Return a function that locates the packs that an attempt wrote or references."""
        attempt_folder = f"{self.folder}{attempt}/"
        links = set[str]()
        rebuilt = [each for place in (self.store, *self.others) if (each := place.rebuilt) is not None]

        def packs(name: str) -> Stored:
            if is_file_url(name):
                return self.references(name)
            if step_of_pack(name) is None:
                key = attempt_folder + name
                return Stored(self.store, key, tuple(Stored(other, key) for other in (*rebuilt, *self.others)))
            link = attempt_folder + link_name(name)
            if self.root is not None:
                # A place that lacks the step may have the pack whole, where the first place found has it damaged.
                places = places_of(self.root) if isinstance(self.root, TwoRoots) else self.others
                others = (LinkedPack(place, place, link) for place in places)
                elsewhere = tuple(Stored(other, name) for other in (*rebuilt, *others))
                return Stored(LinkedPack(self.root, self.store, link), name, elsewhere)
            if link not in links and not exists(self.store, link):
                raise InvalidError(
                    f"{self.url}: references {name}, a pack of another step of its run, and there is no run around it "
                    "and no link to the pack in it; expected one of the two. Open it in the root in which it was "
                    "saved, or copy it from there with `holdfast export --to holdfast`"
                )
            links.add(link)
            return Stored(self.store, link)

        return packs

    def stands_alone(self, manifest: Manifest) -> bool:
        """Return whether the checkpoint has every pack in its own folder: written there, or as a link."""
        attempt_folder = f"{self.folder}{manifest.attempt}/"
        elsewhere = [pack for pack in manifest.packs if step_of_pack(pack.name) is not None]
        try:
            return all(
                stored_bytes(self.store, attempt_folder + link_name(pack.name)) == pack.bytes for pack in elsewhere
            )
        except InvalidError:
            return False  # Something else has the name of a link.

    def require_empty(self, way_out: str | None = None, *, why: str = "") -> None:
        """Refuse to save over a checkpoint.

        Args:
            way_out: What the caller can do about it; None for what every caller can.
            why: A sentence that comes before the way out.
        Raises:
            ConflictError: A checkpoint is there; it was not touched.
            InvalidError: The path is the root of a run.
        """
        if self.step is None:
            # First: once a store has listed, an absent manifest is no sign of an absent bucket, and it asks no more.
            require_no_run(self.store, "save one checkpoint here")
        if exists(self.store, self.manifest_key) and (
            self.step is None or is_valid(self.store, current_fence(self.store), self.step)
        ):
            default = (
                "Save elsewhere, or remove it first if it is not needed"
                if self.step is None
                else "Save the state as another step. To save this number again, go back to a step before it: "
                f"manager.load(state, step=…, discard_newer=True), or remove it: holdfast rm ROOT {self.step}"
            )
            raise ConflictError(
                f"{self.url}: a checkpoint is already there; expected none. Nothing was touched. "
                f"{why}{' ' if why else ''}{way_out or default}"
            )


def require_no_run(store: Store, purpose: str) -> None:
    """Refuse the root of a run where one checkpoint is expected.

    Raises:
        InvalidError: The path holds steps; the message names the last.
    """
    steps = step_folders(store)
    if steps or exists(store, RUN_FILE):
        example = step_folder(steps[-1]).rstrip("/") if steps else "step-…"
        raise InvalidError(
            f"{store.url}: is the root of a run (it holds step-* folders), not one checkpoint; cannot {purpose}. "
            f"Use CheckpointManager, or the path of one step, e.g. {store.url}/{example}; to read, step='latest' or "
            "the number or tag of a step will do"
        )


def require_no_checkpoint(store: Store) -> None:
    """Refuse one checkpoint where the root of a run is expected.

    Raises:
        InvalidError: The path holds a manifest.
    """
    if exists(store, MANIFEST_FILE):
        raise InvalidError(
            f"{store.url}: is one checkpoint (it holds {MANIFEST_FILE}), not the root of a run. Load it with "
            "holdfast.load, and use another place as the root"
        )


def manifest_if_any(location: CheckpointLocation) -> bytes | None:
    """Return the manifest of a checkpoint that another system may have written; None if it has none.

    Raises:
        MissingError: The run has fenced its writer.
    """
    data = get_or_none(location.store, location.manifest_key, MANIFEST_BYTES_MAX)
    if data is not None:
        _require_counted(location, data)
    return data


def manifest_bytes_at(location: CheckpointLocation) -> bytes:
    """Return the stored manifest.

    Raises:
        MissingError: There is no checkpoint, or the run has fenced its writer.
        InvalidError: The path is the root of a run.
    """
    if location.chosen is not None:
        return location.chosen
    try:
        data = _chosen_manifest(location)
    except MissingError:
        if location.step is None:
            require_no_run(location.store, "read one checkpoint here")
        raise
    _require_counted(location, data)
    return data


def _require_counted(location: CheckpointLocation, data: bytes) -> None:
    if location.root is not None and not _is_valid_in(location.root, location, data):
        raise fenced_error(location.manifest_url)


def manifest_in_place_of(manifest: Manifest, location: CheckpointLocation) -> Manifest | None:
    """Return the manifest that has replaced one, if the checkpoint was overwritten; None if it is still there.

    A reader that misses a file asks for it: the files of what was overwritten are removed later. A step of a run is
    never overwritten, nor is what another system wrote.
    """
    if location.root is not None or location.step is not None or not manifest.attempt:
        return None
    try:
        data = manifest_bytes_at(location)
        if stated_digest(data) == manifest.digest:
            return None
        return decode_manifest(data, f"{location.url}/{MANIFEST_FILE}")
    except CheckpointError:
        return None


def _chosen_manifest(location: CheckpointLocation) -> bytes:
    keys = [location.manifest_key]
    if location.step is not None and location.digest is not None:
        # A newer timeline may have moved it since the step was chosen, and may have saved the step again.
        keys += [key for key in manifest_keys(location.step, location.digest) if key not in keys]
    error: MissingError | None = None
    for key in keys:
        try:
            data = read_manifest_bytes(location.store, location.folder, key)
        except MissingError as missing:
            error = error or missing
            continue
        # A damaged text may state no digest: it is judged as the manifest that was chosen.
        if location.digest is None or stated_digest(data) in (None, location.digest):
            return data
        error = _replaced_error(location)
    assert error is not None, "one key at least was read"
    raise error


def _replaced_error(location: CheckpointLocation) -> MissingError:
    return MissingError(
        f"{location.url}: manifest {location.digest} was replaced or removed since the step was chosen; expected it in "
        "this folder or under superseded/. Choose the step again"
    )


def is_all_there(location: CheckpointLocation) -> bool:
    """Return whether every file that the manifest names exists now in its full size."""
    try:
        manifest = manifest_in(location.folder, manifest_bytes_at(location), f"{location.url}/{MANIFEST_FILE}")
        attempt_files = packs_under(location.store, f"{location.folder}{manifest.attempt}/")
        require_sizes((*manifest.parts, *manifest.index_files), attempt_files, manifest.step)
    except (CorruptError, MissingError):
        return False
    return not short_packs(location.store, location.folder, manifest, location.packs_of(manifest))


def _is_valid_in(root: Store, location: CheckpointLocation, data: bytes) -> bool:
    """Return whether a manifest is valid in the run around it.

    A checkpoint that is opened by path may be in a folder that this user cannot list, or that is no run. It is accepted
    if it needs no file outside its own.
    """
    try:
        fence = current_fence(root)
    except InvalidError as error:
        manifest = decode_manifest(data, f"{location.url}/{MANIFEST_FILE}")
        if location.step is not None or not location.stands_alone(manifest):
            raise
        logger.warning("%s: opened as a single checkpoint: the folder above cannot be read: %s", location.url, error)
        return True
    return is_valid_manifest(data, fence, location.url)
