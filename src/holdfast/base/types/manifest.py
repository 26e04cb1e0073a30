"""The commit record of one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.base.types.health import Health, findings_of, is_healthy
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
from holdfast.base.types.values import Group

FORMAT_MAJOR = 1
"""Version of the format on disk; another major version is refused."""

FORMAT_MINOR_IMPORTED = 1
"""Minor version that added `origin`, `masters` and referenced files. A manifest without them has minor version 0."""

FORMAT_MINOR_RUN = 2
"""Minor version that added the fields of steps of a run: packs of other steps, `epoch`, `metrics`, `health`. It also
added the records of quarantine and epochs."""

FORMAT_MINOR_TIMELINES = 3
"""Minor version that brought timelines, superseded manifests, moved tags, and the classes of optimizers."""

FORMAT_MINOR_CODED = 4
"""Minor version that brought packs of coded pieces."""

FORMAT_MINOR_PARENTS = 4
"""Minor version that brought lists of epochs with the parents of timelines."""

FORMAT_MINOR_TYPES = 5
"""Minor version that brought the element types of `NEWER_TYPES`."""

FORMAT_MINOR_MAX = FORMAT_MINOR_TYPES
"""Newest minor version that this Holdfast reads; a newer one is refused."""

METRIC_CHARACTERS_MAX = 200
"""Longest name of a metric."""


def is_metric_name(name: str) -> bool:
    """Return whether a text is a valid name of a metric."""
    return 0 < len(name) <= METRIC_CHARACTERS_MAX and not name.startswith("$") and name.isprintable()


class FileRecord(NamedTuple):
    """A file of the attempt, or a file elsewhere that the checkpoint references."""

    name: str
    """Path inside the attempt's folder; for a pack of another step, its path from the root; for a referenced file, its
    URL."""

    bytes: int
    """Its exact size."""

    digest: str
    """xxh3-128 of the content, in hex; for a pack, of its header and chunk digests; for a referenced file, of its chunk
    digests."""


class OptimizerRecord(NamedTuple):
    """The class and state keys of an optimizer, which distinguish its state from that of another class."""

    class_name: str
    """Its class with module; several, sorted and joined by `+`, if it holds optimizers of several classes."""

    state_keys: tuple[str, ...]
    """Sorted keys under which the checkpoint has state of its parameters."""


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
    """The content of a checkpoint: its facts and its files."""

    run_id: str
    """Run the checkpoint belongs to; for one saved by path, an id of its own."""

    step: int | None
    """Training iteration; None for a checkpoint saved by path."""

    attempt: str
    """Name of the folder with all other files, 16 hex digits."""

    created: str
    """Wall-clock time, ISO 8601 in UTC, for people."""

    parent: Parent | None
    """The checkpoint that it continues, if known."""

    world_size: int
    """Number of ranks that saved it."""

    layouts: tuple[dict[str, object], ...]
    """Meshes and placements at the save; provenance only."""

    software: dict[str, str]
    """Versions of the software that wrote it."""

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
    """The system that wrote it; None for Holdfast."""

    masters: dict[str, str] = field(default_factory=dict)
    """FQN to the FQN of its master copy, which has higher precision; only if its system stored both."""

    epoch: int = 0
    """Epoch under which it was published; 0 if under none."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the training loop passed, by name."""

    health: Health | None = None
    """The findings of the save; None if it checked nothing."""

    timeline: Timeline = FIRST_TIMELINE
    """Timeline of the run that the step belongs to."""

    optimizers: dict[str, OptimizerRecord] = field(default_factory=dict)
    """Class and state keys of each optimizer, by its path in the state; empty if none is known."""

    order: bytes = b""
    """Numbers of names in the order of the state (`core/format/state_order.py`); empty if the order is unknown."""

    newer_types: tuple[str, ...] = ()
    """Element types in the index that readers before format 1.5 do not know, sorted."""

    log: str = ""
    """Id of the redo log of which this step is a base; empty if there is none."""

    near_only: bool = False
    """Whether the step was saved for the near tier alone. Nothing drains such a step to the root by itself."""

    digest: str = field(default="", compare=False)
    """xxh3-128 of the manifest's own bytes up to this field, in hex."""

    @property
    def index_files(self) -> tuple[FileRecord, ...]:
        """The files of the merged index, and the overview if there is one."""
        return self.indexes if self.overview is None else (*self.indexes, self.overview)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All files that it names."""
        return (*self.packs, *self.parts, *self.index_files)

    @property
    def healthy(self) -> bool | None:
        """Whether its save found it healthy; None if the save checked nothing."""
        return is_healthy(self.health)

    @property
    def findings(self) -> tuple[str, ...]:
        """The findings of its save against the checkpoint: a line for each tensor, without control characters."""
        return findings_of(self.health)
