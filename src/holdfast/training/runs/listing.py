"""Lists the steps under the root of a run: committed, damaged and unfinished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.reports import Tier
from holdfast.core.format.names import (
    MANIFEST_FILE,
    is_attempt_folder,
    manifest_key,
    step_folder,
    step_of_pack,
)
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.peers.safety import step_safety
from holdfast.stored.peers.union import PeerStore
from holdfast.stored.repository.catalog import exists, read_manifest, read_run_id, require_run
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.logs import RunLog, newest_logs
from holdfast.stored.repository.quarantine import QuarantineRecord, identity_at, quarantined
from holdfast.stored.repository.tags import Tag, Tags, read_tags
from holdfast.stored.repository.timeline_records import timeline_records
from holdfast.stored.repository.timelines import (
    MovedManifests,
    StoredManifest,
    arranged,
    holds_manifest,
    moved_manifests,
    run_timelines,
)
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.runs.tiers.agent_files import AgentStatus, read_status


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step folder of a run."""

    step: int
    """The training iteration in the name of the folder."""

    manifest: Manifest | None
    """The manifest; None if the step has none, or if it cannot be read."""

    error: CheckpointError | None
    """Why the manifest cannot be read; None if it can be read, or if the step has none."""

    leftovers: tuple[str, ...]
    """Folders of attempts that did not commit: under way, or failed. All attempts if the manifest cannot be read."""

    tags: tuple[str, ...] = ()
    """Tags of the step."""

    quarantined: str | None = None
    """The damage, if the step is under quarantine: a resume skips it. None otherwise."""

    fenced: bool = False
    """Whether a writer published the manifest after another one had replaced it: no reader accepts it."""

    superseded: bool = False
    """Whether a newer timeline left the step behind: no resume takes it. It is loaded by number and digest."""

    stands_alone: bool | None = None
    """Whether the folder of the step holds every pack that it needs, written there or as a link; None if the manifest
    cannot be read."""

    places: tuple[Tier, ...] = ()
    """Where the step is, in a run with a near tier: near, in the root, or both; empty in any other run."""

    drained: float = 0.0
    """Share of the bytes that a drain has copied, of a step that is near alone."""

    safety: str = ""
    """How many nodes may go before the near tier loses the step, in words; empty unless the near tier is of peers."""

    discarded: bool = False
    """Whether training went back and discarded the step: a collection removes it."""

    holds_packs_of: tuple[int, ...] = ()
    """Steps that name packs in the folder, of an attempt that no manifest of this step names any more."""

    @property
    def committed(self) -> bool:
        """Whether the step has a manifest, readable or damaged, that is neither fenced nor superseded."""
        return (self.manifest is not None or self.error is not None) and not self.fenced and not self.superseded

    @property
    def status(self) -> str:
        """The state of the step in a word. A manifest of a newer format is as good as ever, and only unreadable."""
        if self.error:
            return "damaged" if isinstance(self.error, CorruptError) else "unreadable"
        if self.fenced:
            return "fenced"
        if self.superseded:
            return "superseded"
        if self.committed:
            return "committed"
        return "removed" if self.holds_packs_of else "unfinished"

    @property
    def created_unix_seconds(self) -> float | None:
        """The time of creation; None if unknown or malformed."""
        with suppress(ValueError, OverflowError):
            return None if self.manifest is None else datetime.fromisoformat(self.manifest.created).timestamp()
        return None

    @property
    def shares_packs(self) -> bool:
        """Whether the manifest names packs of other steps; False if it cannot be read."""
        return self.manifest is not None and any(step_of_pack(pack.name) is not None for pack in self.manifest.packs)

    @property
    def name(self) -> str:
        """The name by which the step is loaded: its number; for a superseded step also digits of its digest."""
        return f"{self.step}@{self.manifest.digest[:8]}" if self.superseded and self.manifest else str(self.step)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The root of a run."""

    url: str
    """URL of the root."""

    run_id: str | None
    """The run id in `holdfast.json`; None if the file is absent or damaged."""

    error: CheckpointError | None
    """Why `holdfast.json` cannot be read, or None."""

    steps: Sequence[StepRecord]
    """Every step folder, ascending. A step that was saved again on a newer timeline has a record for each manifest."""

    tags: Sequence[Tag] = ()
    """Every readable tag, by name; its step may be gone."""

    tag_errors: Mapping[str, CheckpointError] = field(default_factory=dict)
    """Why other tags cannot be read, by name."""

    logs: Sequence[RunLog] = ()
    """The redo logs after the two newest bases, the newest first; empty without a base."""

    agent: AgentStatus | None = None
    """The last status of the agent of the near tier; None without a near tier, and if there was no agent."""


def run_record(store: Store) -> RunRecord:
    """Return the steps and tags under a root; damage is reported, not raised.

    Raises:
        MissingError: The path holds no run.
        InvalidError: The path is one checkpoint, not the root of a run.
    """
    if exists(store, MANIFEST_FILE):
        raise InvalidError(
            f"{store.url}: is one checkpoint (it holds {MANIFEST_FILE}), not the root of a run; expected a folder "
            "that holds step-* folders. Open it with open_checkpoint, or look at it with: holdfast inspect"
        )
    steps = require_run(store)
    run_id, error = None, None
    fence = current_fence(store)
    try:
        run_id = read_run_id(store)
    except (CorruptError, InvalidError) as found:
        error = found
    tags, known = read_tags(store), quarantined(store)
    moved = moved_manifests(store)
    # Without a second timeline no step is superseded, and the manifests need not be read twice.
    timelines = run_timelines(store) if fence.has_timelines else None
    records = [_step_record(store, step, tags, known.get(step, {}), fence, moved) for step in steps]
    stored = {record.manifest.digest for record in records if record.manifest is not None}
    # Both copies of a manifest may exist: one record.
    elsewhere = {manifest.digest: manifest for manifest in moved.manifests if manifest.digest not in stored}
    records += [_moved_record(store, manifest, tags, known, fence) for manifest in elsewhere.values()]
    in_folders = {record.step for record in records if record.manifest is not None}
    records += [
        StepRecord(damaged.step, None, damaged.error, (), superseded=damaged.step in in_folders)
        for damaged in moved.damaged
    ]
    if timelines is None:
        timelines = arranged(_stored(record) for record in records if record.committed)
    records = _with_superseded(_with_holders(records), timelines.superseded)
    gone = {digest for each in timeline_records(store, fence) for _, digest in each.discarded}
    records = [replace(each, discarded=each.manifest is not None and each.manifest.digest in gone) for each in records]
    agent = None
    if isinstance(store, TwoRoots):
        records = [_placed(store, record) for record in records]
        agent = read_status(store.near.url)
    suspects = {each.manifest.digest for each in records if each.manifest and each.quarantined is not None}
    logs = newest_logs(store, timelines, suspects)
    return RunRecord(store.url, run_id, error, records, tuple(tags.whole.values()), tags.damaged, logs, agent)


def _placed(run: TwoRoots, record: StepRecord) -> StepRecord:
    """Return a record with the places of its step."""
    manifest = record.manifest
    if manifest is None:
        return record
    both: tuple[tuple[Tier, Store], ...] = (("near", run.near), ("root", run.root))
    places = tuple(tier for tier, place in both if holds_manifest(place, record.step, manifest.digest))
    drained = 0.0
    if places == ("near",):
        folder = f"{step_folder(record.step)}{manifest.attempt}/"
        total = sum(file.bytes for file in manifest.files if step_of_pack(file.name) is None)
        drained = sum(entry.bytes for entry in run.root.list(folder)) / max(total, 1)
    safety = ""
    if "near" in places and isinstance(run.near, PeerStore):
        safety = step_safety(run.near, manifest).text
    return replace(record, places=places, drained=drained, safety=safety)


def _stored(record: StepRecord) -> StoredManifest:
    """Return the manifest in the folder of a step, of a run with one timeline."""
    manifest, key = record.manifest, manifest_key(record.step)
    if manifest is None:
        return StoredManifest(record.step, key, None, None)
    return StoredManifest(record.step, key, manifest.digest, manifest.timeline, log=manifest.log)


def _with_holders(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the records; what holds packs of other steps is no leftover."""
    holders: dict[tuple[int | None, str], set[int]] = {}
    for record in records:
        for pack in () if record.manifest is None else record.manifest.packs:
            if (step := step_of_pack(pack.name)) is not None:
                holders.setdefault((step, pack.name.split("/")[1]), set()).add(record.step)
    return [
        replace(
            record,
            leftovers=tuple(each for each in record.leftovers if (record.step, each) not in holders),
            holds_packs_of=tuple(
                sorted({step for each in record.leftovers for step in holders.get((record.step, each), ())})
            ),
        )
        for record in records
    ]


def _with_superseded(records: Sequence[StepRecord], superseded: Iterable[StoredManifest]) -> list[StepRecord]:
    """Return the records by ascending step, those of superseded steps marked."""
    left_behind = {manifest.digest for manifest in superseded}
    marked = [
        record if record.manifest is None else replace(record, superseded=record.manifest.digest in left_behind)
        for record in records
    ]
    return sorted(marked, key=lambda record: (record.step, record.manifest.timeline.number if record.manifest else 0))


def _moved_record(
    store: Store, manifest: Manifest, tags: Tags, known: Mapping[int, Mapping[str, QuarantineRecord]], fence: Fence
) -> StepRecord:
    """Return the record of a manifest under `superseded/`."""
    assert manifest.step is not None, "a run holds steps"
    record = known.get(manifest.step, {}).get(manifest.digest[:16])
    return StepRecord(
        manifest.step,
        manifest,
        None,
        (),
        tags.of(manifest.step, manifest.digest),
        None if record is None else record.why,
        not fence.admits(manifest.step, manifest.epoch, manifest.digest),
        stands_alone=_location(store, manifest.step).stands_alone(manifest),
    )


def _location(store: Store, step: int) -> CheckpointLocation:
    return CheckpointLocation(store, step_folder(step), step, root=store)


def _step_record(
    store: Store,
    step: int,
    tags: Tags,
    known: Mapping[str, QuarantineRecord],
    fence: Fence,
    moved: MovedManifests,
) -> StepRecord:
    folder = step_folder(step)
    manifest: Manifest | None = None
    error: CheckpointError | None = None
    try:
        manifest = read_manifest(store, folder)
    except MissingError:
        pass  # Without a manifest the step is unfinished.
    except CheckpointError as found:
        error = found
    attempts = [name for name in store.folders(folder) if is_attempt_folder(name)]
    named = moved.attempts(step, attempts) | ({manifest.attempt} if manifest is not None else set())
    record = known.get(identity_at(store, manifest_key(step))) if known and (manifest or error) else None
    return StepRecord(
        step,
        manifest,
        error,
        tuple(name for name in attempts if name not in named),
        () if manifest is None else tags.of(step, manifest.digest),
        None if record is None else record.why,
        manifest is not None and not fence.admits(step, manifest.epoch, manifest.digest),
        stands_alone=None if manifest is None else _location(store, step).stands_alone(manifest),
    )
