"""What the ranks of a load tell each other, in one process: every message is the real one, one rank counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from bench.opening_on_paper import Left, LoneComm
from bench.synthetic import SyntheticJob
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import LoadPlan
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.settings import Settings
from holdfast.training.loading.exchange import offer_of
from holdfast.training.loading.messages import ChosenStep, RankStatus
from holdfast.training.loading.statuses import _OFFERS_BYTES_MAX, gather_statuses, names_of
from tests.doubles.comm import ThreadGroup

_PARAM_GROUPS = "optimizer.param_groups."
_LENGTH_BYTES = 8
"""Bytes of a length, which `ProcessGroupComm.all_gather` gathers first."""


@dataclass(frozen=True)
class Given:
    """What rank 0 sent to every rank, and what one rank made of it."""

    frames: Sequence[bytes]
    manifest: Manifest
    index: Index | SplitIndex
    plan: LoadPlan


class PlayedComm(LoneComm):
    """A comm whose other ranks have said what they would say; without their words, this rank leaves with its own."""

    def __init__(self, world_size: int, records: Sequence[bytes] | None, parts: Sequence[bytes] | None) -> None:
        """Take what each rank puts into the gather, and what some ranks put into the bitwise OR, at least one of each
        kind.
        """
        super().__init__(ThreadGroup(world_size), 0)
        self._records, self._parts = records, parts
        self.own, self.received = b"", 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return what every rank says."""
        if self._records is None:
            self.own = payload
            raise Left
        self.received += (_LENGTH_BYTES + max(map(len, self._records))) * self.world_size
        return list(self._records)

    def bitwise_or(self, payload: bytes) -> bytes:
        """Return the bitwise OR of what the ranks say."""
        if self._parts is None:
            self.own = payload
            raise Left
        self.received += len(payload)
        return reduce(or_, map(int.from_bytes, self._parts)).to_bytes(len(payload))


def bytes_into_rank(job: SyntheticJob, given: Given, settings: Settings) -> int:
    """Return the bytes that other ranks send to one rank of a load: rank 0's choice, and statuses of all ranks.

    Index files, which each rank reads from storage, are not among them.
    """
    manifest, world_size = given.manifest, job.world_size
    names = names_of(given.index.tensors, manifest.aliases, manifest.tree)
    statuses = [_status_of(job, stage, names) for stage in range(job.stages)]

    def said_by(stage: int, records: Sequence[bytes] | None) -> bytes:
        comm = PlayedComm(world_size, records, None)
        try:
            gather_statuses(comm, statuses[stage], lambda: names)
        except Left:
            return comm.own
        return b""

    firsts = [said_by(stage, None) for stage in range(job.stages)]
    records = [firsts[job.stage_of(rank)] for rank in range(world_size)]
    comm = PlayedComm(world_size, records, [said_by(stage, records) for stage in range(job.stages)])
    found = gather_statuses(comm, statuses[0], lambda: names)
    assert not found.missing and not found.unexpected, "the job loads all that was saved"
    # Every rank reads something else, so no two offers are equal.
    offers = world_size * len(offer_of(given.plan, manifest, settings, world_size).encode())
    offers = offers if offers <= _OFFERS_BYTES_MAX else 0
    errors = 2
    return len(ChosenStep(folder="step", frames=given.frames).encode()) + comm.received + offers + errors


def _status_of(job: SyntheticJob, stage: int, names: Sequence[str]) -> RankStatus:
    """Return the status of the ranks of a stage, which lack all names of other stages."""
    held = {shard.tensor.fqn for shard in job.shards_of(stage * job.ranks_per_stage)}
    lacked = [name for name in names if name.startswith(("model.", "optimizer.state.")) and name not in held]
    parameters = [name for name in names if name.startswith(_PARAM_GROUPS)]
    lacked += [name for name in parameters if f"model.{name.removeprefix(_PARAM_GROUPS)}" not in held]
    return RankStatus(unexpected=tuple(lacked))
