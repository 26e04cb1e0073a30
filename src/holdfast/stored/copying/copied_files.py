"""The files that manifests need, each with the places where its bytes are and the keys that it gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.base.ports.packs import Stored
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.core.format.names import is_file_url, link_name, step_folder, step_of_pack
from holdfast.errors import CheckpointError
from holdfast.stored.repository.publish import pack_paths
from holdfast.stored.repository.removal import link_keys


@dataclass(slots=True)
class CopiedFile:
    """One file."""

    key: str
    """Its key at the destination."""

    record: FileRecord
    """Its size and digest; the digest is empty if nobody knows it."""

    named_by: list[tuple[Manifest, FileRecord]]
    """The manifests that name it, each with its record of it. Their indexes have the chunks of a pack."""

    is_pack: bool
    """Whether it is a pack, which is proven by its chunks."""

    sources: list[Stored] = field(default_factory=list)
    """Where its bytes may be, the best place first."""

    links: list[str] = field(default_factory=list)
    """Further keys that it gets at a destination with links."""


@dataclass(frozen=True, slots=True)
class CopiedManifest:
    """A manifest, read once."""

    key: str
    """Where it is, and goes."""

    data: bytes
    """As stored."""

    manifest: Manifest | None
    """What it says; None if it cannot be read."""

    error: CheckpointError | None = None
    """Why not."""


def files_of_run(source: Store, manifests: list[CopiedManifest]) -> dict[str, CopiedFile]:
    """Return the files that the manifests of a run need, by key; those that steps share are one."""
    files: dict[str, CopiedFile] = {}
    for copied in manifests:
        if copied.manifest is not None:
            for key, record, is_pack in needed_files(copied.manifest):
                file = files.setdefault(key, CopiedFile(key, record, [], is_pack, [Stored(source, key)]))
                file.named_by.append((copied.manifest, record))
    # Of the links, those of newer steps first: they are the last to go.
    for copied in reversed(manifests):
        if copied.manifest is not None:
            for path, link in link_keys(copied.manifest).items():
                files[path].sources.append(Stored(source, link))
                files[path].links.append(link)
    return files


def needed_files(manifest: Manifest) -> Iterator[tuple[str, FileRecord, bool]]:
    """Yield key, record and whether it is a pack, of every file of a run that a step's manifest names.

    Files of another system stay where they are: the copy refers to them too.
    """
    assert manifest.step is not None, "a manifest of a run has a step"
    folder = f"{step_folder(manifest.step)}{manifest.attempt}/"
    paths = pack_paths(manifest)
    for pack in manifest.packs:
        if not is_file_url(pack.name):
            yield paths[pack.name], pack, True
    for record in (*manifest.parts, *manifest.index_files):
        yield folder + record.name, record, False


def key_alone(manifest: Manifest, name: str) -> str:
    """Return the key of a file in the folder of a checkpoint that is in no run: packs of other steps are there too."""
    return f"{manifest.attempt}/{name if step_of_pack(name) is None else link_name(name)}"
