"""The commit record of one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.types.health import Health, is_healthy
from holdfast.types.values import Group

FORMAT_MAJOR = 1
"""Version of the format on disk; another major version is refused."""

FORMAT_MINOR_IMPORTED = 1
"""Minor version that brought `origin`, `masters` and referenced files; what has none of them is of minor version 0."""

FORMAT_MINOR_RUN = 2
"""Minor version that brought what only a step of a run has: packs that lie in other steps, `epoch`, `metrics`,
`health`; and the records of a quarantine and of epochs."""

METRIC_CHARACTERS_MAX = 200
"""Longest name of a metric."""


def is_metric_name(name: str) -> bool:
    """Return whether a metric may be called so."""
    return 0 < len(name) <= METRIC_CHARACTERS_MAX and not name.startswith("$") and name.isprintable()


class FileRecord(NamedTuple):
    """One file of the attempt, or a referenced file elsewhere."""

    name: str
    """Path inside the attempt's folder; of a pack of another step that from the root; of a referenced file its URL."""

    bytes: int
    """Its exact size."""

    digest: str
    """xxh3-128 in hex: of the content; for a pack, of its header and chunk digests; for a referenced file, of those."""


class Parent(NamedTuple):
    """The checkpoint this one continues."""

    run_id: str
    """Run it belongs to."""

    step: int
    """Its step."""

    digest: str
    """Digest of its manifest."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is, and every file it is made of."""

    run_id: str
    """Run the checkpoint belongs to; for one saved by path, an id of its own."""

    step: int | None
    """Training iteration; None for a checkpoint saved by path."""

    attempt: str
    """Folder of everything else, 16 hex digits."""

    created: str
    """Wall-clock time, ISO 8601 in UTC, for people."""

    parent: Parent | None
    """What it continues, if known."""

    world_size: int
    """Ranks that saved it."""

    layouts: tuple[dict[str, object], ...]
    """Meshes and placements it was saved from, as provenance only."""

    software: dict[str, str]
    """Versions that wrote it."""

    tensors: int
    """Count of tensors in the index."""

    tensor_bytes: int
    """Bytes of all tensors."""

    aliases: dict[str, str]
    """Tied names: alias to stored FQN."""

    tree: Group
    """The non-tensor state."""

    packs: tuple[FileRecord, ...]
    """Packs, by name."""

    parts: tuple[FileRecord, ...]
    """Parts of the index, one per rank."""

    indexes: tuple[FileRecord, ...]
    """The merged index, in FQN order."""

    overview: FileRecord | None = None
    """The file that lists every tensor and its index file; None if there is a single index file."""

    origin: str | None = None
    """What wrote it, where that was not Holdfast."""

    masters: dict[str, str] = field(default_factory=dict)
    """FQN to that of its master copy, of higher precision, where what wrote it kept both."""

    epoch: int = 0
    """Epoch under which it was published; 0 if under none."""

    metrics: dict[str, float] = field(default_factory=dict)
    """What the training loop said of the step, number by name."""

    health: Health | None = None
    """What was found of its health; None where nothing was looked at."""

    digest: str = field(default="", compare=False)
    """xxh3-128 of the manifest's own bytes up to this field, in hex."""

    @property
    def index_files(self) -> tuple[FileRecord, ...]:
        """The files of the merged index, and the overview if there is one."""
        return self.indexes if self.overview is None else (*self.indexes, self.overview)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file that it names."""
        return (*self.packs, *self.parts, *self.index_files)

    @property
    def healthy(self) -> bool | None:
        """Whether nothing was found against it while it was saved; None where nothing was looked at."""
        return is_healthy(self.health)
