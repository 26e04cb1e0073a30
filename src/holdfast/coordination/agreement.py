"""The opening of a save: every rank states what it is about to do, rank 0 judges, nothing is gathered.

Each rank sets one small record. Rank 0 reads them all in one call and sets one verdict on which the others
wait with a deadline. Only when ranks hold different layouts, or plain tensors differ, do one rank per class and
the ranks that differ publish details.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.coordination.job import Job, error_from, error_text
from holdfast.coordination.rank_ranges import rank_ranges, ranks_in
from holdfast.errors import CheckpointError, InvalidError, UnavailableError
from holdfast.geometry.tensor import Role

Plain = Mapping[str, tuple[str, tuple[int, ...], Role]]
"""Plain tensors by FQN: dtype, global shape, role."""

_RECORD = struct.Struct("<q8s8s8s8s")
_REFUSAL = b"!"
_GRACE_SECONDS = 2.0
"""How much longer the others wait than rank 0, which must still set its verdict."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank says at the opening; 40 bytes on the board."""

    step: int
    """The step being saved; -1 for a save by path."""

    location: bytes
    """8-byte digest of where it goes."""

    layout: bytes
    """8-byte fingerprint of everything that plans depend on; equal ranks form a class."""

    agreeing: bytes
    """8-byte digest of samples of the plain tensors that must agree."""

    other: bytes
    """8-byte digest of the plain tensors and values that may differ."""


@dataclass(frozen=True, slots=True)
class Details:
    """What a rank publishes when it is asked to."""

    location: str
    """Where it is saving."""

    plain: Plain
    """Its plain tensors."""

    agreeing: Mapping[str, str]
    """Sample digest of each plain tensor that must agree, hex."""

    other: Mapping[str, str]
    """Digest of each buffer and value that may differ, hex."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """A verdict to go ahead."""

    sequence: int
    """Number of the opening."""

    attempt: str
    """Id of the attempt."""

    own_class: tuple[int, ...]
    """Ranks with this rank's layout, ascending."""

    shared: Mapping[str, tuple[int, ...]]
    """Where ranks form several classes: for each plain tensor the ranks that hold it, ascending."""

    is_leader: bool
    """Whether this rank writes values and provenance for its class."""

    divergent: tuple[str, ...]
    """Buffers and values that differ between ranks."""

    note: Mapping[str, object]
    """What rank 0 told every rank about the place."""

    def holders_of(self, fqn: str) -> tuple[int, ...]:
        """Return the ranks that hold a plain tensor of this rank."""
        return self.shared.get(fqn, self.own_class)

    def holders_of_each(self, fqns: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each of this rank's plain tensors."""
        found = dict.fromkeys(fqns, self.own_class)
        found.update((fqn, ranks) for fqn, ranks in self.shared.items() if fqn in found)
        return found


class SaveAgreement:
    """One opening, on one rank."""

    def __init__(self, job: Job, step: int, location: bytes) -> None:
        """Take the next number.

        Args:
            job: The ranks.
            step: The step being saved; -1 for a save by path.
            place: 8-byte digest of where it goes.
        """
        self._job, self._step = job, step
        self._of = [step, location.hex()]
        self._deadline = job.deadline()
        self._refused: str | None = None
        # Read before any verdict is looked for: one that lands in between must not move this rank past it.
        latest = self._latest()
        verdict = self._verdict_at(job.sequence)
        if verdict is None and latest > job.sequence:
            job.sequence = latest
            verdict = self._verdict_at(latest)
        while verdict is not None:
            if "refused" in verdict and verdict.get("of") == self._of and not self._is_retried(job.sequence + 1):
                # The same save, refused before this rank came: it is over, and this rank's number with it. Joining
                # the next number instead would leave ranks counting apart for good, unless rank 0 is there already:
                # then the same save is being tried again.
                self._refused = str(verdict["refused"])
                break
            # Others opened and closed this number without us: join them at the next.
            job.sequence = max(job.sequence + 1, latest)
            verdict = self._verdict_at(job.sequence)
        self._sequence = job.sequence
        job.sequence += 1

    def _latest(self) -> int:
        """Return the number that follows the last one rank 0 has closed."""
        job = self._job
        key = job.key("opening", "next")
        return (
            int(job.key_value_store.get_many([key], job.left(self._deadline))[0])
            if job.key_value_store.present(key)
            else 0
        )

    def _verdict_at(self, sequence: int) -> dict[str, object] | None:
        """Return the verdict that stands at a number, without waiting for it."""
        job = self._job
        key = self._key("verdict", sequence)
        if not job.key_value_store.present(key):
            return None
        verdict = json.loads(job.key_value_store.get_many([key], job.left(self._deadline))[0])
        assert isinstance(verdict, dict)
        return verdict

    def _is_retried(self, sequence: int) -> bool:
        """Return whether rank 0 has opened this very save again, at a number."""
        job = self._job
        key = self._key("open", sequence, 0)
        if not job.key_value_store.present(key):
            return False
        (record,) = job.key_value_store.get_many([key], job.left(self._deadline))
        if len(record) != _RECORD.size:
            return False
        statement = Statement(*_RECORD.unpack(record))
        return [statement.step, statement.location.hex()] == self._of

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank cannot save, so that none of them waits for it. Never raises."""
        job = self._job
        if self._refused is not None:
            return
        try:
            key = self._key("open", self._sequence, job.comm.rank)
            job.key_value_store.set(key, _REFUSAL + error_text(error).encode(), job.left(self._deadline))
            job.remember(self._sequence, [key])
            if job.comm.rank == 0:
                text = error_text(error)
                self._settle("verdict", _refusal(error_from(text, f"{self._name}: rank 0 refused: ")))
        except (CheckpointError, TimeoutError):
            return

    def agree(
        self,
        statement: Statement,
        details: Callable[[], Details],
        survey: Callable[[], Mapping[str, object]],
    ) -> Agreement:
        """State, wait for the verdict, and return what was agreed.

        Args:
            statement: What this rank is about to do.
            details: Called if this rank must publish more.
            survey: Called on rank 0 before it says yes: looks at the place, returns what to tell everybody.
        Raises:
            InvalidError: Ranks disagree; the message names ranks and what they disagree on.
            CheckpointError: Rank 0's survey, or another rank's own refusal.
            UnavailableError: Ranks did not open this save in time, or the key-value store is gone.
        """
        if self._refused is not None:
            raise error_from(self._refused)
        job = self._job
        rank = job.comm.rank
        key = self._key("open", self._sequence, rank)
        packed = _RECORD.pack(statement.step, statement.location, statement.layout, statement.agreeing, statement.other)
        job.key_value_store.set(key, packed, job.left(self._deadline))
        job.remember(self._sequence, [key, self._key("details", self._sequence, rank)])
        verdict = self._settle("verdict", self._judge(survey)) if rank == 0 else self._await("verdict")
        if "describe" in verdict:
            if rank in _ranks(verdict["describe"]):
                self._publish(details())
            if rank == 0:
                verdict = self._settle("final", self._judge_details(verdict, survey))
            else:
                verdict = self._await("final")
        if "refused" in verdict:
            raise error_from(str(verdict["refused"]))
        return self._agreement(verdict)

    def _agreement(self, verdict: Mapping[str, object]) -> Agreement:
        rank, world_size = self._job.comm.rank, self._job.comm.world_size
        stated = verdict.get("classes") or [rank_ranges(range(world_size))]
        classes = [ranks_in(_list(each)) for each in _list(stated)]  # type: ignore[arg-type]
        own = next(each for each in classes if rank in each)
        holders = self._holders(classes) if len(classes) > 1 else {}
        note = verdict.get("note")
        assert isinstance(note, dict)
        return Agreement(
            sequence=self._sequence,
            attempt=self._job.attempt_id(self._sequence, self._step),
            own_class=own,
            shared=holders,
            is_leader=rank == own[0],
            divergent=tuple(map(str, _list(verdict.get("divergent") or []))),
            note=note,
        )

    def _holders(self, classes: Sequence[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each plain tensor, as the lowest rank of each class tells."""
        found: dict[str, list[int]] = {}
        for number, spoken in enumerate(self._read_details([each[0] for each in classes])):
            for fqn in spoken.plain:
                found.setdefault(fqn, []).append(number)
        numbers = {fqn: tuple(each) for fqn, each in found.items()}
        # Thousands of ranks are put in order once for all tensors that the same classes hold.
        members = {
            each: tuple(sorted(rank for number in each for rank in classes[number])) for each in {*numbers.values()}
        }
        return {fqn: members[each] for fqn, each in numbers.items()}

    def _judge(self, survey: Callable[[], Mapping[str, object]]) -> dict[str, object]:
        """Return rank 0's verdict."""
        job = self._job
        keys = [self._key("open", self._sequence, rank) for rank in range(job.comm.world_size)]
        try:
            records = job.key_value_store.get_many(keys, job.left(self._deadline))
        except TimeoutError:
            absent = [rank for rank, key in enumerate(keys) if not job.key_value_store.present(key)]
            if absent:
                return _refusal(
                    UnavailableError(
                        f"{self._name}: ranks {_some(absent)} did not call save within "
                        f"{job.settings.commit_timeout_seconds} s; expected all {len(keys)} ranks. "
                        "Every rank must call save; look at those ranks"
                    )
                )
            # The last of them came while we counted.
            records = job.key_value_store.get_many(keys, job.left(job.deadline()))
        for rank, record in enumerate(records):
            if record.startswith(_REFUSAL) and len(record) != _RECORD.size:
                error = error_from(record[1:].decode())
                return _refusal(type(error)(f"{self._name}: rank {rank} refused: {error}"))
        statements = [Statement(*_RECORD.unpack(record)) for record in records]
        skewed = self._skew(statements)
        if skewed is not None:
            return _refusal(skewed)
        classes: dict[bytes, list[int]] = {}
        for rank, each in enumerate(statements):
            classes.setdefault(each.layout, []).append(rank)
        groups = list(classes.values())
        differing = [
            rank
            for members in groups
            for rank in members
            if (statements[rank].agreeing, statements[rank].other)
            != (statements[members[0]].agreeing, statements[members[0]].other)
        ]
        if len(groups) == 1 and not differing:
            return self._surveyed(survey, {})
        asked = sorted({members[0] for members in groups} | set(differing))
        return {"describe": asked, "classes": [*map(rank_ranges, groups)] if len(groups) > 1 else None}

    def _skew(self, statements: Sequence[Statement]) -> InvalidError | None:
        by_step: dict[int, list[int]] = {}
        for rank, each in enumerate(statements):
            by_step.setdefault(each.step, []).append(rank)
        if len(by_step) > 1:
            said = "; ".join(f"step {step} on ranks {_some(ranks)}" for step, ranks in sorted(by_step.items()))
            return InvalidError(f"save: ranks save different steps: {said}; expected one step. Nothing was saved")
        elsewhere = [rank for rank, each in enumerate(statements) if each.location != statements[0].location]
        if elsewhere:
            return InvalidError(
                f"{self._name}: ranks {_some(elsewhere)} save to another path than rank 0; expected one path. "
                "Make it the same on every rank (a time or rank in it differs)"
            )
        return None

    def _judge_details(
        self, verdict: Mapping[str, object], survey: Callable[[], Mapping[str, object]]
    ) -> dict[str, object]:
        asked = _ranks(verdict["describe"])
        try:
            spoken = dict(zip(asked, self._read_details(asked), strict=True))
        except TimeoutError:
            return _refusal(UnavailableError(f"{self._name}: ranks {_some(asked)} did not say more in time"))
        disagreements = _disagreements(spoken)
        if disagreements:
            return _refusal(
                InvalidError(
                    f"{self._name}: plain tensors differ between ranks that hold them under one name: "
                    f"{'; '.join(disagreements[:20])}. Expected equal copies. If they are parts of one tensor, "
                    "declare the layout (make it a DTensor); if each rank needs its own, leave it out with skip=; "
                    "if they are replicas, they have come apart"
                )
            )
        differing = {name for name, values in _by_name(spoken, "other").items() if len(values) > 1}
        return self._surveyed(survey, {"classes": verdict.get("classes"), "divergent": sorted(differing)})

    def _surveyed(self, survey: Callable[[], Mapping[str, object]], verdict: dict[str, object]) -> dict[str, object]:
        try:
            return {**verdict, "note": dict(survey())}
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for a verdict
            return _refusal(error)

    def _publish(self, details: Details) -> None:
        plain = {fqn: [dtype, list(shape), role.value] for fqn, (dtype, shape, role) in details.plain.items()}
        document = [details.location, plain, dict(details.agreeing), dict(details.other)]
        key = self._key("details", self._sequence, self._job.comm.rank)
        self._job.key_value_store.set(key, json.dumps(document).encode(), self._job.left(self._deadline))

    def _read_details(self, ranks: Sequence[int]) -> list[Details]:
        keys = [self._key("details", self._sequence, rank) for rank in ranks]
        found = []
        for data in self._job.key_value_store.get_many(keys, self._job.left(self._deadline)):
            location, plain, agreeing, other = json.loads(data)
            table = {fqn: (dtype, tuple(shape), Role(role)) for fqn, (dtype, shape, role) in plain.items()}
            found.append(Details(location, table, agreeing, other))
        return found

    def _settle(self, name: str, verdict: Mapping[str, object]) -> dict[str, object]:
        """Set the verdict unless one is set; return the one that stands."""
        job = self._job
        text = json.dumps({**verdict, "of": self._of}).encode()
        key = self._key(name, self._sequence)
        standing = job.key_value_store.compare_set(key, b"", text, job.left(job.deadline()))
        if job.comm.rank == 0:
            # Older verdicts are forgotten; who missed them finds its place by this number instead.
            job.key_value_store.set(
                job.key("opening", "next"), str(self._sequence + 1).encode(), job.left(job.deadline())
            )
            job.remember(self._sequence, [key])
        document = json.loads(standing)
        assert isinstance(document, dict)
        return document

    def _await(self, name: str) -> dict[str, object]:
        job = self._job
        key = self._key(name, self._sequence)
        try:
            (text,) = job.key_value_store.get_many([key], job.left(self._deadline) + _GRACE_SECONDS)
        except TimeoutError:
            silent = self._silence()
            return self._settle(name, _refusal(silent))
        document = json.loads(text)
        assert isinstance(document, dict)
        return document

    def _silence(self) -> UnavailableError:
        """Return why there is no verdict: rank 0 may still be waiting, for somebody else."""
        job = self._job
        keys = [self._key("open", self._sequence, rank) for rank in range(job.comm.world_size)]
        absent = [rank for rank, key in enumerate(keys) if not job.key_value_store.present(key)]
        patience = f"within {job.settings.commit_timeout_seconds} s of rank {job.comm.rank}"
        if absent:
            return UnavailableError(
                f"{self._name}: ranks {_some(absent)} did not call save {patience}; expected all {len(keys)} ranks. "
                "Every rank must call save; look at those ranks"
            )
        return UnavailableError(f"{self._name}: rank 0 called save and gave no verdict {patience}; look at rank 0")

    @property
    def _name(self) -> str:
        return f"save of step {self._step}" if self._step >= 0 else "save"

    def _key(self, name: str, *parts: object) -> str:
        return self._job.key("opening", *parts[:1], name, *parts[1:])


def _refusal(error: Exception) -> dict[str, object]:
    return {"refused": error_text(error)}


def _list(value: object) -> list[object]:
    assert isinstance(value, list), value
    return value


def _ranks(value: object) -> list[int]:
    return [each for each in _list(value) if isinstance(each, int)]


def _some(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"{list(ranks[:16])} and {len(ranks) - 16} more"


def _by_name(spoken: Mapping[int, Details], kind: str) -> dict[str, dict[str, list[int]]]:
    """Return, by name and digest, the ranks that stated it."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, details in spoken.items():
        for name, digest in getattr(details, kind).items():
            found.setdefault(name, {}).setdefault(digest, []).append(rank)
    return found


def _disagreements(spoken: Mapping[int, Details]) -> list[str]:
    """Return what ranks disagree on, in words; a class's lowest rank speaks for the members that did not."""
    said: list[str] = []
    for fqn, ranks_of in sorted(_by_name(spoken, "agreeing").items()):
        if len(ranks_of) > 1:
            groups = " ≠ ".join(f"ranks {_some(ranks)}" for ranks in ranks_of.values())
            said.append(f"{fqn} ({groups})")
    shapes: dict[str, tuple[int, tuple[str, tuple[int, ...], Role]]] = {}
    for rank, details in spoken.items():
        for fqn, table in details.plain.items():
            first_rank, first = shapes.setdefault(fqn, (rank, table))
            if first != table:
                said.append(f"{fqn} ({_described(first)} on rank {first_rank} ≠ {_described(table)} on rank {rank})")
    return said


def _described(plain: tuple[str, tuple[int, ...], Role]) -> str:
    dtype, shape, role = plain
    return f"{role.value} of {dtype} {list(shape)}"
