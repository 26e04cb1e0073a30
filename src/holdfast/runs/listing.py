"""What lies under the root of a run, for people to look at: committed, damaged and unfinished steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from holdfast.format.names import MANIFEST_FILE, RUN_FILE, is_attempt_folder, step_folder
from holdfast.ports.store import Store
from holdfast.repository.catalog import exists, read_manifest, read_run_id, step_folders
from holdfast.repository.epochs import current_fence
from holdfast.repository.quarantine import QuarantineRecord, identity_at, quarantined
from holdfast.repository.tags import Tag, Tags, read_tags
from holdfast.types.epoch import Fence
from holdfast.types.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step folder of a run."""

    step: int
    """The training iteration it is named after."""

    manifest: Manifest | None
    """The commit record; None if there is none, or if it cannot be read."""

    error: CheckpointError | None
    """Why a manifest that is there cannot be read; None if it can, or if there is none."""

    leftovers: tuple[str, ...]
    """Folders of attempts that did not commit: under way, or failed. Where the manifest cannot be read, of all."""

    tags: tuple[str, ...] = ()
    """Names it was given."""

    quarantined: str | None = None
    """What was found damaged, if the step is under quarantine: no run resumes from it by itself."""

    fenced: bool = False
    """Whether the manifest was published by a writer that another one had replaced: no reader takes it."""

    @property
    def committed(self) -> bool:
        """Whether there is a manifest that counts, whole or not."""
        return (self.manifest is not None or self.error is not None) and not self.fenced


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The root of a run."""

    url: str
    """Where it lies."""

    run_id: str | None
    """The run it belongs to; None if it says none, or its `holdfast.json` is damaged."""

    error: CheckpointError | None
    """Why `holdfast.json` cannot be read, or None."""

    steps: Sequence[StepRecord]
    """Every step folder, ascending."""

    tags: Sequence[Tag] = ()
    """Every tag that can be read, by name; its step may be gone."""

    tag_errors: Mapping[str, CheckpointError] = field(default_factory=dict)
    """Why other tags cannot be read, by name."""


def run_record(store: Store) -> RunRecord:
    """Return what lies under a root; damage is reported, not raised.

    Raises:
        MissingError: Nothing of a run lies there.
        InvalidError: It is one checkpoint, not the root of a run.
    """
    if exists(store, MANIFEST_FILE):
        raise InvalidError(
            f"{store.url}: is one checkpoint (it holds {MANIFEST_FILE}), not the root of a run; expected a folder "
            "that holds step-* folders. Open it with open_checkpoint, or look at it with: holdfast inspect"
        )
    steps = step_folders(store)
    if not steps and not exists(store, RUN_FILE):
        raise MissingError(
            f"{store.url}: no root of a run; expected a folder that holds step-* folders or {RUN_FILE}. "
            "Look for another path"
        )
    run_id, error = None, None
    fence = current_fence(store)
    try:
        run_id = read_run_id(store)
    except (CorruptError, InvalidError) as found:
        error = found
    tags, known = read_tags(store), quarantined(store)
    records = [_step_record(store, step, tags, known.get(step, {}), fence) for step in steps]
    return RunRecord(store.url, run_id, error, records, tuple(tags.whole.values()), tags.damaged)


def _step_record(
    store: Store, step: int, tags: Tags, known: Mapping[str, QuarantineRecord], fence: Fence
) -> StepRecord:
    folder = step_folder(step)
    manifest: Manifest | None = None
    error: CheckpointError | None = None
    try:
        manifest = read_manifest(store, folder)
    except MissingError:
        pass  # No manifest, no checkpoint: what lies there is unfinished.
    except CheckpointError as found:
        error = found
    committed_attempt = None if manifest is None else manifest.attempt
    record = known.get(identity_at(store, step)) if known and (manifest or error) else None
    return StepRecord(
        step,
        manifest,
        error,
        tuple(name for name in store.folders(folder) if is_attempt_folder(name) and name != committed_attempt),
        () if manifest is None else tags.of(step, manifest.digest),
        None if record is None else record.why,
        manifest is not None and not fence.admits(step, manifest.epoch, manifest.digest),
    )
