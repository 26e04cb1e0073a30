"""Watches a run without writing to it: the listing, the saves, the writer and the work under way, read by news."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.base.types.events import RankReport
from holdfast.core.format import names
from holdfast.core.format.log import LOG_FOLDER
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.stored.leases.seen import LeaseWriter, WriterWatch
from holdfast.stored.repository import quarantine, tags, timeline_records
from holdfast.stored.repository.catalog import exists, steps_among
from holdfast.stored.repository.near_tier import NEAR_FOLDER, read_near
from holdfast.stored.repository.reports import REPORTS_FOLDER, reports_in
from holdfast.stored.repository.two_roots import TwoRoots, places_of
from holdfast.training.runs.listing import RunRecord, StepRecord, run_record
from holdfast.training.runs.remembered_reads import RememberedReads
from holdfast.training.runs.tiers.agent_files import AgentStatus, read_status
from holdfast.training.telemetry.alerts import WINDOW_MAX, Alert, AlertRules, Situation, StepFact, alerts_of
from holdfast.training.telemetry.event_lines import EventLines
from holdfast.training.telemetry.work import Work, works_of

_MOVING = (names.SUPERSEDED_FOLDER, timeline_records.TIMELINES_FOLDER, names.EPOCHS_FOLDER)
"""Folders that change when manifests move, or when another process begins to write."""

_STEPS_LOOKED_AT, _UNFINISHED_LOOKED_AT, _RECENT = 3, 64, 64
_REPORTS_AWAITED_SECONDS = 600.0
_RANKS_KEPT = 1024
"""Of a save on more ranks, the extremes alone are kept once five newer saves are there."""

_ASKED_IN_TURN = 16
"""Steps whose manifests are looked for at each refresh, in turn: a step may go while its folder stays."""

_COMMITS_OF_THE_DEAD = 2
"""An unfinished attempt is dead once so many saves have been committed since it was first seen."""

_SMALL_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A save, load or drain that has begun and not ended."""

    verb: str
    """Whether it saves, loads or drains."""

    step: int | None
    """The step."""

    phase: str
    """`write` while parts of a save are missing, `commit` once every rank has voted; empty if unknown."""

    since_unix_seconds: float | None
    """When the first rank began; None if no event says so."""

    world_size: int
    """Ranks that work together."""

    ranks: tuple[int, ...]
    """Ranks that the others wait for."""

    hosts: tuple[str, ...]
    """Machines of these ranks, as far as known."""

    told_by: str
    """The source of these facts."""


class RunWatch:
    """A run that is looked at again and again. Nothing is written, leases included. One thread calls at a time."""

    def __init__(self, store: Store, clock: Clock, events: EventLines) -> None:
        """Read nothing yet."""
        self._places = [RememberedReads(each) for each in places_of(store)]
        root, *near = (place.as_store for place in self._places)
        self._store = TwoRoots(near[0], root) if near else root
        self._clock, self.events = clock, events
        self._record: RunRecord | None = None
        self._newest: list[StepRecord] = []
        """The steps whose manifests can be read, the newest save first."""
        self._unfinished: list[StepRecord] = []
        """The steps without a manifest that can be read, with leftovers, or near alone: all of these may change."""
        self._news = self._turn = 0
        self.has_other_places = False
        """Whether the root names another near tier since the first look: make a new watch."""
        self._first_seen: dict[tuple[int, str], int] = {}
        """Of each unfinished attempt, the commits that had been seen before it."""
        self._commits = 0
        self._last: tuple[int, str] | None = None
        self._facts: list[StepFact] = []
        self._seen: tuple[Sequence[int], Mapping[str, object], object] = (), {}, None
        self._writers = WriterWatch(self._store, clock, 0.0)
        self._reads = 0
        self._failed: set[tuple[int, str]] = set()
        """The saves for whose reports the store did not answer."""
        self._awaited: dict[tuple[int, str], float] = {}
        """Until when a report of a save may still come: monotonic time, 0 for a save before the first look."""
        self._reports: dict[tuple[int, str], list[str]] = {}
        """The keys of the reports, as last read, of a save with absent ranks."""
        self.works: dict[tuple[int, str], Work | None] = {}
        """The saves by step and attempt, as far as `read_saves` has come; None without a report."""
        self.unreadable: dict[str, CheckpointError] = {}
        """Reports that cannot be read, each with its error. A report of a newer format is not damaged."""
        self.writer: LeaseWriter | None = None
        """The writer, as of the last `refresh`."""

    def refresh(self) -> RunRecord:
        """Return the listing of the run; the same object as before without news. Reads what is new.

        Raises:
            MissingError: The path holds no run.
            InvalidError: The path is one checkpoint.
            UnavailableError: Storage failed.
        """
        self.events.refresh()
        folders = self._store.folders("")
        steps, before = steps_among(folders), self._seen
        small = {
            each: self._listed(each)
            for each in (*_MOVING, tags.TAGS_FOLDER, quarantine.QUARANTINE, LOG_FOLDER, NEAR_FOLDER)
            if each[:-1] in folders
        }
        self.has_other_places |= bool(self._news) and small.get(NEAR_FOLDER) != before[1].get(NEAR_FOLDER)
        small[names.RUN_FILE] = self._bytes_of(names.RUN_FILE)
        self.writer = None
        with suppress(CheckpointError):
            self.writer = self._writers.look()
        has_moved = any(small.get(folder) != before[1].get(folder) for folder in _MOVING)
        for place in self._places:
            place.forget(None if has_moved else {*before[0]} - {*steps} | {*self._watched(steps)})
        if self._record is None or (steps, small, self._in_steps(self._watched(steps))) != before or self._lacks_one():
            for place in self._places:
                place.forget_absent()
            self._record, self._facts = run_record(self._store), []
            records = (each for each in self._record.steps if each.manifest and not each.fenced)
            self._newest = sorted(records, key=_order, reverse=True)
            until = self._clock.monotonic_seconds() + _REPORTS_AWAITED_SECONDS if self._news else 0.0
            self._awaited = {_key(each): self._awaited.get(_key(each), until) for each in self._newest}
            self.works = {key: work for key, work in self.works.items() if key in self._awaited}
            self._reports = {key: keys for key, keys in self._reports.items() if key in self._awaited}
            listed = {names.step_folder(step) for step in steps}
            self.unreadable = {key: each for key, each in self.unreadable.items() if f"{key.split('/')[0]}/" in listed}
            newest = next((_key(each) for each in self._newest), None)
            self._commits, self._last = self._commits + (newest != self._last), newest
            attempts = ((each.step, attempt) for each in self._record.steps for attempt in each.leftovers)
            self._first_seen = {each: self._first_seen.get(each, self._commits) for each in attempts}
            self._unfinished = [
                each for each in self._record.steps if not each.manifest or each.leftovers or each.places == ("near",)
            ]
            for place in self._places:
                # A repair replaces the manifest.
                place.forget(each.step for each in self._unfinished if each.error)
            self._news += 1
            self._seen = steps, small, self._in_steps(self._watched(steps))
        return self._record

    def place_of(self, name: str) -> str:
        """Return the URL at which a step can be opened: of the near tier if the root lacks the step."""
        steps = () if self._record is None else self._record.steps
        is_near = any(each.name == name and each.places == ("near",) for each in steps)
        return self._store.near.url if is_near and isinstance(self._store, TwoRoots) else self._store.url

    @property
    def version(self) -> str:
        """A text that changes with the news: of the listing, the writer and the saves that were read."""
        state = None if self.writer is None else self.writer.state
        return f"{self._news} {state} {self._reads} {len(self.events.failed)}"

    def read_saves(self, limit: int, seconds: float = float("inf")) -> int:
        """Read the reports of the newest saves that were not read before; return how many saves are left.

        A rank writes its report after the commit, so the newest saves with absent ranks are read again.

        Args:
            limit: Most saves to read now.
            seconds: No save is begun after this time, but the first one.
        """
        now = self._clock.monotonic_seconds()
        unread = [record for record in self._newest if _key(record) not in self.works]
        new = [record for record in unread if _key(record) not in self._failed]
        recent = [each for each in self._newest[:WINDOW_MAX] if self._awaited[_key(each)] > now]
        again = {
            _key(each): each for each in (*self._newest[:_STEPS_LOOKED_AT], *recent) if _key(each) in self._reports
        }
        failed = (record for record in unread if _key(record) in self._failed)
        for number, record in enumerate([*new, *again.values(), *failed][:limit]):
            if number and self._clock.monotonic_seconds() - now > seconds:
                return max(len(new) - number, 0)
            self._read_save(record)
            self._trim()
        return max(len(new) - limit, 0)

    def _trim(self) -> None:
        """Keep the extremes alone of older saves: sixteen thousand ranks fill much memory."""
        place = {_key(record): number for number, record in enumerate(self._newest[:WINDOW_MAX])}
        for key, work in self.works.items():
            ranks_max = 3 if key not in place else _RANKS_KEPT if place[key] >= AlertRules().window else 1 << 30
            if work is not None and len(work.ranks) > ranks_max:
                extremes = {rank.rank: rank for rank in work.extremes.values()}
                self.works[key] = replace(work, ranks=tuple(extremes[rank] for rank in sorted(extremes)))

    def under_way(self) -> list[UnderWay]:
        """Return the work under way: from the events, and from attempts in the folders while a writer may write."""
        may_save = self.writer is not None and self.writer.state == "holds"
        last = next((each for each in self._newest if not each.superseded), None)
        work = None if last is None else self.works.get(_key(last))
        hosts = {} if work is None else {rank.rank: rank.host for rank in work.ranks}
        hosts |= self.events.hosts
        usual = last.manifest.world_size if last is not None and last.manifest is not None else 1
        begun = [each for each in self._unfinished if each.leftovers and not each.manifest and may_save]
        begun = [each for each in begun if not all(self._is_dead(each.step, attempt) for attempt in each.leftovers)]
        of_step = {each.step: each for each in begun if last is None or each.step > last.step}
        found = []
        tries = [key for key in self.events.open if may_save or key[0] == "load"]
        for verb, step in dict.fromkeys([*tries, *(("save", step) for step in of_step)]):
            told = self.events.open.get((verb, step), {})
            record = of_step.get(-1 if step is None else step) if verb == "save" else None
            voted = set() if record is None else self._voted(record)
            sizes = [line.world_size for line in told.values()] or [usual, *(each + 1 for each in voted)]
            everyone = {*range(max(sizes))}
            # A rank that no line names has no file of events here.
            waited = told.keys() | (everyone - self.events.named) if told else everyone
            ranks = tuple(sorted(waited - voted))
            phase = "" if record is None else "write" if ranks else "commit"
            since = min((line.time.timestamp() for line in told.values()), default=None)
            machines = tuple(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
            source = "lease and folders" if not told else "events" if record is None else "events and folders"
            found.append(UnderWay(verb, step, phase, since, max(sizes), ranks, machines, source))
        return found

    def agent(self) -> AgentStatus | None:
        """Return the last status of the agent of the near tier; None without one."""
        return read_status(self._places[1].as_store.url) if len(self._places) > 1 else None

    def free_bytes(self) -> int | None:
        """Return the free room of the root; None if unknown."""
        return self._places[0].as_store.free_bytes()

    def facts(self) -> list[StepFact]:
        """Return the facts about each step, ascending, as of the last `refresh`, with the saves that were read."""
        if self._record is not None and not self._facts:
            self._facts = [self._fact(record) for record in self._record.steps]
        return self._facts

    def alerts(self, rules: AlertRules) -> list[Alert]:
        """Return the alerts of the run as of the last `refresh`, by the saves that were read."""
        of_run = () if self._record is None else (*self._record.tag_errors.values(), self._record.error)
        damage = (each for each in (*of_run, *self.unreadable.values()) if isinstance(each, CorruptError))
        writer = self.writer.holder if self.writer is not None and self.writer.state == "holds" else None
        under_way = frozenset(each.step for each in self.under_way() if each.verb == "save" and each.step is not None)
        highest = sorted(self._newest, key=lambda each: each.step)[-1:]
        recent = {(each.step, each.name) for each in (*self._newest[:_RECENT], *highest)}
        facts = [each for each in self.facts() if each.damage or each.bytes is None or (each.step, each.name) in recent]
        situation = Situation(
            self._clock.unix_seconds(), facts, writer, under_way, self.events.failed, self.free_bytes(),
            [*map(str, damage), *self.events.damaged], self._is_near_hidden(),
        )  # fmt: skip
        return alerts_of(situation, rules)

    # ------------------------------------------------------------------------------------------------ inside

    def _is_dead(self, step: int, attempt: str) -> bool:
        return self._commits - self._first_seen.get((step, attempt), self._commits) >= _COMMITS_OF_THE_DEAD

    def _is_near_hidden(self) -> bool:
        with suppress(CheckpointError):
            return len(self._places) == 1 and read_near(self._store) is not None
        return False

    def _listed(self, folder: str) -> object:
        # A heartbeat is replaced all the time, and is no news of the listing. A file has no tag, and a moved tag of the
        # run has the same size.
        entries = [each for each in self._store.list(folder) if not each.key.endswith(".beat")]
        is_replaced = folder in (tags.TAGS_FOLDER, NEAR_FOLDER)
        return [(each, each.tag or (self._bytes_of(each.key) if is_replaced else b"")) for each in entries]

    def _bytes_of(self, key: str) -> bytes | None:
        with suppress(MissingError, CorruptError):
            return self._store.get(key, _SMALL_BYTES_MAX)
        return None

    def _lacks_one(self) -> bool:
        """Return whether the manifest of a step is gone, of the few whose turn it is."""
        last = [each.step for each in self._newest if not each.superseded]
        turn = [last[(self._turn + at) % len(last)] for at in range(min(_ASKED_IN_TURN, len(last)))]
        self._turn += len(turn)
        return not all(any(exists(each.as_store, names.manifest_key(step)) for each in self._places) for step in turn)

    def _watched(self, steps: Sequence[int]) -> list[int]:
        """Return the steps in whose folders news may be: the newest ones, and the unfinished ones."""
        last = next((each.step for each in self._newest), 0)
        behind = [step for step in steps if step >= last][:_STEPS_LOOKED_AT]
        watched = {*steps[-_STEPS_LOOKED_AT:], *behind}
        watched |= {each.step for each in self._unfinished[-_UNFINISHED_LOOKED_AT:]}
        return sorted(watched & {*steps})

    def _in_steps(self, steps: Sequence[int]) -> object:
        found, root = list[tuple[object, ...]](), self._places[0].as_store
        damaged = {each.step for each in self._unfinished if each.error}
        drains = {each.step for each in self._unfinished if each.places == ("near",)}
        for step in steps:
            folder = names.step_folder(step)
            try:
                attempts = [each for each in self._store.folders(folder) if names.is_attempt_folder(each)]
                parts = [
                    entry.key for each in attempts for entry in self._store.list(f"{folder}{each}/{names.PARTS_FOLDER}")
                ]
                manifests = [_manifest_at(place.as_store, step, is_read=step in damaged) for place in self._places]
                drained = [entry.bytes for entry in root.list(folder)] if step in drains else []
                found.append((folder, attempts, parts, manifests, drained))
            except (CorruptError, InvalidError) as error:  # This user may not look into the folder.
                found.append((folder, str(error)))
        return found

    def _read_save(self, record: StepRecord) -> None:
        """Read the reports of a save, unless none came since the last read. Without the store nothing is remembered."""
        key, folder, reports, listed = _key(record), names.step_folder(record.step), list[RankReport](), list[str]()
        begins, errors = f"save-{key[1]}-", dict[str, CheckpointError]()
        prefix = f"{folder}{REPORTS_FOLDER}{begins}"
        try:
            listed = [each.key for each in self._store.list(folder + REPORTS_FOLDER) if each.key.startswith(prefix)]
            if listed == self._reports.get(key):
                return
            for report_key, report in reports_in(self._store, folder, begins):
                if isinstance(report, RankReport):
                    reports.append(report)
                else:
                    errors[report_key] = report
        except CheckpointError as error:
            errors[folder] = error
        others = {at: each for at, each in self.unreadable.items() if at != folder and not at.startswith(prefix)}
        self.unreadable = others | errors
        if any(isinstance(each, UnavailableError) for each in errors.values()):
            self._failed.add(key)
            return
        self._failed.discard(key)
        self._reads, self._facts = self._reads + 1, []
        work = self.works[key] = next(iter(works_of(reports)), None)
        self._reports.pop(key, None)
        if work is None or len(work.ranks) < work.world_size:
            self._reports[key] = listed

    def _fact(self, record: StepRecord) -> StepFact:
        damage = f"under quarantine: {record.quarantined}" if record.quarantined else ""
        fact = StepFact(record.step, record.name, record.status, tags=record.tags, damage=damage)
        if (manifest := record.manifest) is None:
            return replace(fact, damage=str(record.error) if record.status == "damaged" else damage)
        return replace(
            fact, created_unix_seconds=record.created_unix_seconds, bytes=manifest.tensor_bytes,
            findings=manifest.findings, metrics=manifest.metrics, timeline=manifest.timeline, parent=manifest.parent,
            is_discarded=record.discarded, work=self.works.get(_key(record)),
        )  # fmt: skip

    def _voted(self, record: StepRecord) -> set[int]:
        """Return the ranks whose parts are stored, in the attempt with most of them."""
        found: list[set[int]] = [set()]
        for attempt in record.leftovers:
            prefix = f"{names.step_folder(record.step)}{attempt}/"
            keys = [entry.key.removeprefix(prefix) for entry in self._store.list(prefix + names.PARTS_FOLDER)]
            found.append({names.rank_of_part(key) for key in keys})
        return max(found, key=len)


def _manifest_at(place: Store, step: int, *, is_read: bool) -> object:
    """Return whether a place has the manifest of a step; its bytes or the error if it is read."""
    key = names.manifest_key(step)
    if not is_read:
        return exists(place, key)
    try:
        return place.get(key, MANIFEST_BYTES_MAX)
    except CheckpointError as error:
        return str(error)


def _key(record: StepRecord) -> tuple[int, str]:
    assert record.manifest is not None, "a step without a manifest has no save"
    return record.step, record.manifest.attempt


def _order(record: StepRecord) -> tuple[int, int]:
    assert record.manifest is not None, "a step without a manifest has no save"
    return record.manifest.timeline.number, record.step
