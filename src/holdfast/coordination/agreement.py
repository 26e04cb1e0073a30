"""The agreement that opens a save: every rank states what it is about to save, rank 0 decides, nothing is gathered.

Each rank sets one record of 40 bytes. Rank 0 reads all records in one call and sets one verdict; the other ranks wait
for it with a deadline. Ranks with equal layouts form a class. Only if layouts or plain tensors differ do the lowest
rank of each class and the ranks that differ publish details.

States of a numbered save (its `sequence`), and who moves it from one to the next:

    open      -> described  rank 0, with the verdict `describe`: some ranks must publish details
    open      -> agreed     rank 0, with a verdict that carries the context
    open      -> refused    rank 0, or any rank at its deadline: the first compare-and-set of the verdict counts
    described -> agreed     rank 0, with the final verdict
    described -> refused    rank 0, or any rank at its deadline
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.coordination.job import Job, error_from, error_text
from holdfast.coordination.rank_ranges import rank_ranges, ranks_in
from holdfast.coordination.save_context import SaveContext
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
    """What a rank states at the start of a save, in 40 bytes."""

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
    """A verdict to go ahead, as one rank uses it."""

    sequence: int
    """Number of the opening."""

    attempt: str
    """Id of the attempt."""

    class_ranks: tuple[int, ...]
    """Ranks with this rank's layout, ascending."""

    shared: Mapping[str, tuple[int, ...]]
    """Where ranks form several classes: for each plain tensor the ranks that hold it, ascending."""

    is_leader: bool
    """Whether this rank writes values and provenance for its class."""

    divergent: tuple[str, ...]
    """Buffers and values that differ between ranks."""

    context: SaveContext
    """What rank 0 decided for every rank."""

    def holders_of(self, fqn: str) -> tuple[int, ...]:
        """Return the ranks that hold a plain tensor of this rank."""
        return self.shared.get(fqn, self.class_ranks)

    def holders_of_each(self, fqns: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each of this rank's plain tensors."""
        found = dict.fromkeys(fqns, self.class_ranks)
        found.update((fqn, ranks) for fqn, ranks in self.shared.items() if fqn in found)
        return found


@dataclass(frozen=True, slots=True)
class SaveVerdict:
    """Rank 0's word on one numbered save; exactly one of `refused`, `describe` and `context` is set."""

    save_id: tuple[int, str]
    """Step and digest of the location: tells a retry of this save from another save under the same number."""

    refused: str | None = None
    """The error that every rank raises, as `error_text` wrote it."""

    describe: tuple[int, ...] | None = None
    """Ranks that must publish details before the final verdict."""

    classes: tuple[tuple[int, ...], ...] = ()
    """Ranks by layout, ascending; empty if all ranks have one layout."""

    divergent: tuple[str, ...] = ()
    """Buffers and values that differ between ranks."""

    context: SaveContext | None = None
    """What rank 0 decided."""

    def encode(self) -> bytes:
        """Return the verdict as ASCII: the compare-and-set of c10d's stores passes text only."""
        document = {
            "save_id": self.save_id,
            "refused": self.refused,
            "describe": None if self.describe is None else rank_ranges(self.describe),
            "classes": [rank_ranges(ranks) for ranks in self.classes],
            "divergent": self.divergent,
            "context": None if self.context is None else self.context.encode(),
        }
        return json.dumps(document).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> SaveVerdict:
        """Return the verdict that `encode` wrote."""
        document = json.loads(data)
        step, location = document["save_id"]
        describe, context = document["describe"], document["context"]
        return cls(
            save_id=(step, location),
            refused=document["refused"],
            describe=None if describe is None else ranks_in(describe),
            classes=tuple(ranks_in(ranges) for ranges in document["classes"]),
            divergent=tuple(document["divergent"]),
            context=None if context is None else SaveContext.decode(context),
        )


class SaveAgreement:
    """The agreement on one save, on one rank."""

    def __init__(self, job: Job, step: int, location: bytes) -> None:
        """Take the next number.

        Args:
            job: The ranks.
            step: The step being saved; -1 for a save by path.
            location: 8-byte digest of where it goes.
        """
        self._job, self._step = job, step
        self._save_id = step, location.hex()
        self._deadline = job.deadline()
        self._refused: str | None = None
        # Read before any verdict is looked for: one that lands in between must not move this rank past it.
        latest = self._latest()
        verdict = self._verdict_at(job.sequence)
        if verdict is None and latest > job.sequence:
            job.sequence = latest
            verdict = self._verdict_at(latest)
        while verdict is not None:
            is_own = verdict.refused is not None and verdict.save_id == self._save_id
            if is_own and not self._is_retried(job.sequence + 1):
                # This save was refused before this rank came. It is over, and so is its number. If this rank joined
                # the next number instead, the ranks would count apart for good. The exception: rank 0 has opened that
                # number already, because it tries the same save again.
                self._refused = verdict.refused
                break
            # The other ranks opened and closed this number without this rank: join them at the next.
            job.sequence = max(job.sequence + 1, latest)
            verdict = self._verdict_at(job.sequence)
        self._sequence = job.sequence
        job.sequence += 1

    def _latest(self) -> int:
        """Return the number that follows the last one rank 0 has closed."""
        job = self._job
        key = job.key("opening", "next")
        return (
            int(job.key_value_store.get_many([key], job.seconds_left(self._deadline))[0])
            if job.key_value_store.present(key)
            else 0
        )

    def _verdict_at(self, sequence: int) -> SaveVerdict | None:
        """Return the verdict of a numbered save if there is one, without waiting."""
        job = self._job
        key = self._key("verdict", sequence)
        if not job.key_value_store.present(key):
            return None
        return SaveVerdict.decode(job.key_value_store.get_many([key], job.seconds_left(self._deadline))[0])

    def _is_retried(self, sequence: int) -> bool:
        """Return whether rank 0 has opened this very save again, at a number."""
        job = self._job
        key = self._key("open", sequence, 0)
        if not job.key_value_store.present(key):
            return False
        (record,) = job.key_value_store.get_many([key], job.seconds_left(self._deadline))
        if len(record) != _RECORD.size:
            return False
        statement = Statement(*_RECORD.unpack(record))
        return (statement.step, statement.location.hex()) == self._save_id

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank cannot save, so that none of them waits for it. Never raises."""
        job = self._job
        if self._refused is not None:
            return
        try:
            key = self._key("open", self._sequence, job.comm.rank)
            job.key_value_store.set(key, _REFUSAL + error_text(error).encode(), job.seconds_left(self._deadline))
            job.record_keys(self._sequence, [key])
            if job.comm.rank == 0:
                text = error_text(error)
                self._settle("verdict", self._refusal(error_from(text, f"{self._name}: rank 0 refused: ")))
        except (CheckpointError, TimeoutError):
            return

    def agree(
        self,
        statement: Statement,
        details: Callable[[], Details],
        claim: Callable[[], SaveContext],
    ) -> Agreement:
        """State, wait for the verdict, and return what was agreed.

        Args:
            statement: What this rank is about to do.
            details: Called if this rank must publish more.
            claim: Called on rank 0 before it agrees: looks at the location and returns the context.
        Raises:
            InvalidError: Ranks disagree; the message names ranks and what they disagree on.
            CheckpointError: Rank 0's claim failed, or another rank refused.
            UnavailableError: Ranks did not open this save in time, or the key-value store is gone.
        """
        if self._refused is not None:
            raise error_from(self._refused)
        job = self._job
        rank = job.comm.rank
        key = self._key("open", self._sequence, rank)
        packed = _RECORD.pack(statement.step, statement.location, statement.layout, statement.agreeing, statement.other)
        job.key_value_store.set(key, packed, job.seconds_left(self._deadline))
        job.record_keys(self._sequence, [key, self._key("details", self._sequence, rank)])
        verdict = self._settle("verdict", self._judge(claim)) if rank == 0 else self._await("verdict")
        if verdict.describe is not None:
            if rank in verdict.describe:
                self._publish(details())
            if rank == 0:
                verdict = self._settle("final", self._judge_details(verdict, claim))
            else:
                verdict = self._await("final")
        if verdict.refused is not None:
            raise error_from(verdict.refused)
        return self._agreement(verdict)

    def _agreement(self, verdict: SaveVerdict) -> Agreement:
        rank, world_size = self._job.comm.rank, self._job.comm.world_size
        classes = verdict.classes or (tuple(range(world_size)),)
        class_ranks = next(ranks for ranks in classes if rank in ranks)
        assert verdict.context is not None, "a verdict to go ahead carries the context"
        return Agreement(
            sequence=self._sequence,
            attempt=self._job.attempt_id(self._sequence, self._step),
            class_ranks=class_ranks,
            shared=self._holders(classes) if len(classes) > 1 else {},
            is_leader=rank == class_ranks[0],
            divergent=verdict.divergent,
            context=verdict.context,
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

    def _judge(self, claim: Callable[[], SaveContext]) -> SaveVerdict:
        """Return rank 0's verdict."""
        job = self._job
        keys = [self._key("open", self._sequence, rank) for rank in range(job.comm.world_size)]
        try:
            records = job.key_value_store.get_many(keys, job.seconds_left(self._deadline))
        except TimeoutError:
            absent = [rank for rank, key in enumerate(keys) if not job.key_value_store.present(key)]
            if absent:
                return self._refusal(
                    UnavailableError(
                        f"{self._name}: ranks {_some(absent)} did not call save within "
                        f"{job.settings.commit_timeout_seconds} s; expected all {len(keys)} ranks. "
                        "Every rank must call save; look at those ranks"
                    )
                )
            # The last of them came while we counted.
            records = job.key_value_store.get_many(keys, job.seconds_left(job.deadline()))
        for rank, record in enumerate(records):
            if record.startswith(_REFUSAL) and len(record) != _RECORD.size:
                error = error_from(record[1:].decode())
                return self._refusal(type(error)(f"{self._name}: rank {rank} refused: {error}"))
        statements = [Statement(*_RECORD.unpack(record)) for record in records]
        skewed = self._skew(statements)
        if skewed is not None:
            return self._refusal(skewed)
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
            return self._claimed(claim, SaveVerdict(self._save_id))
        describe = sorted({members[0] for members in groups} | set(differing))
        stated = tuple(map(tuple, groups)) if len(groups) > 1 else ()
        return SaveVerdict(self._save_id, describe=tuple(describe), classes=stated)

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

    def _judge_details(self, verdict: SaveVerdict, claim: Callable[[], SaveContext]) -> SaveVerdict:
        asked = verdict.describe or ()
        try:
            spoken = dict(zip(asked, self._read_details(asked), strict=True))
        except TimeoutError:
            return self._refusal(UnavailableError(f"{self._name}: ranks {_some(asked)} did not say more in time"))
        disagreements = _disagreements(spoken)
        if disagreements:
            return self._refusal(
                InvalidError(
                    f"{self._name}: plain tensors differ between ranks that hold them under one name: "
                    f"{'; '.join(disagreements[:20])}. Expected equal copies. If they are parts of one tensor, "
                    "declare the layout (make it a DTensor); if each rank needs its own, leave it out with skip=; "
                    "if they are replicas, they have come apart"
                )
            )
        differing = {name for name, values in _by_name(spoken, "other").items() if len(values) > 1}
        return self._claimed(claim, replace(verdict, describe=None, divergent=tuple(sorted(differing))))

    def _claimed(self, claim: Callable[[], SaveContext], verdict: SaveVerdict) -> SaveVerdict:
        """Return the verdict with the context, or a refusal if the location cannot be claimed."""
        try:
            return replace(verdict, context=claim())
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a verdict, whatever the error is
            return self._refusal(error)

    def _refusal(self, error: Exception) -> SaveVerdict:
        return SaveVerdict(self._save_id, refused=error_text(error))

    def _publish(self, details: Details) -> None:
        plain = {fqn: [dtype, list(shape), role.value] for fqn, (dtype, shape, role) in details.plain.items()}
        document = [details.location, plain, dict(details.agreeing), dict(details.other)]
        key = self._key("details", self._sequence, self._job.comm.rank)
        self._job.key_value_store.set(key, json.dumps(document).encode(), self._job.seconds_left(self._deadline))

    def _read_details(self, ranks: Sequence[int]) -> list[Details]:
        keys = [self._key("details", self._sequence, rank) for rank in ranks]
        found = []
        for data in self._job.key_value_store.get_many(keys, self._job.seconds_left(self._deadline)):
            location, plain, agreeing, other = json.loads(data)
            table = {fqn: (dtype, tuple(shape), Role(role)) for fqn, (dtype, shape, role) in plain.items()}
            found.append(Details(location, table, agreeing, other))
        return found

    def _settle(self, name: str, verdict: SaveVerdict) -> SaveVerdict:
        """Set the verdict unless one is set; return the one that is set."""
        job = self._job
        key = self._key(name, self._sequence)
        standing = job.key_value_store.compare_set(key, b"", verdict.encode(), job.seconds_left(job.deadline()))
        if job.comm.rank == 0:
            # Older verdicts are removed. A rank that missed them finds the next number here instead.
            job.key_value_store.set(
                job.key("opening", "next"), str(self._sequence + 1).encode(), job.seconds_left(job.deadline())
            )
            job.record_keys(self._sequence, [key])
        return SaveVerdict.decode(standing)

    def _await(self, name: str) -> SaveVerdict:
        job = self._job
        key = self._key(name, self._sequence)
        try:
            (text,) = job.key_value_store.get_many([key], job.seconds_left(self._deadline) + _GRACE_SECONDS)
        except TimeoutError:
            return self._settle(name, self._refusal(self._silence()))
        return SaveVerdict.decode(text)

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
