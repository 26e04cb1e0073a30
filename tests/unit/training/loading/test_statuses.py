"""What ranks of a load tell each other: the same facts as ever, in bytes that hardly grow with the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.tensor import Role
from holdfast.base.types.reports import LoadReport
from holdfast.base.types.values import Group
from holdfast.errors import CorruptError, InvalidError
from holdfast.training.coordination.job import error_text
from holdfast.training.loading.exchange import Offer
from holdfast.training.loading.messages import RankStatus
from holdfast.training.loading.statuses import GatheredStatuses, gather_errors, gather_statuses, names_of
from tests.doubles.comm import ThreadComm, ThreadGroup, run_ranks
from tests.doubles.framework import GlobalTensor
from tests.unit.ranks import fresh_store, run_of

WORLD, NAMES = 32, 4096
STAGE = NAMES // WORLD


class CountingComm(ThreadComm):
    """Counts what collectives bring to this rank, broadcasts apart."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.received = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        found = super().all_gather(payload)
        # As process groups do: every length, and payloads padded to the longest.
        self.received += (8 + max(map(len, found))) * self.world_size
        return found

    def bitwise_or(self, payload: bytes) -> bytes:
        self.received += len(payload)
        return super().bitwise_or(payload)


def name(number: int) -> str:
    return f"model.layers.{number // 64}.mlp.experts.{number % 64}.gate_proj.weight"


def stage(rank: int, *, without: Sequence[str] = ()) -> dict[str, object]:
    """The part of a model that one rank of a pipeline holds."""
    names = [name(number) for number in range(rank * STAGE, (rank + 1) * STAGE)]
    return {
        each: GlobalTensor("float32", np.ones(1, dtype=np.float32), None, Role.PARAMETER)
        for each in names
        if each not in without
    }


def loads(
    state: Callable[[int], dict[str, object]], *, saved: Callable[[int], dict[str, object]] = stage, strict: bool = True
) -> list[tuple[LoadReport | InvalidError, int]]:
    """Save and load on `WORLD` ranks; return report or error, and the bytes that came to each rank during the load."""
    group, store = ThreadGroup(WORLD), fresh_store()

    def rank_of(comm: ThreadComm) -> tuple[LoadReport | InvalidError, int]:
        counting = CountingComm(group, comm.rank)
        run: CheckpointManager = run_of(counting, store)
        try:
            run.save(1, saved(comm.rank)).wait()
            counting.received = 0
            run.load(state(comm.rank), 1, strict=strict)
            assert run.load_report is not None
            return run.load_report, counting.received
        except InvalidError as error:
            return error, counting.received
        finally:
            run.close()

    return run_ranks(WORLD, rank_of, group=group)


def test_ranks_that_lack_most_names_receive_64_bytes_a_rank_and_a_bit_a_name() -> None:
    for report, received in loads(stage):
        assert isinstance(report, LoadReport)
        assert report.missing == report.unexpected == ()
        assert received <= 64 * WORLD + NAMES / 8


def test_a_name_that_every_rank_lacks_is_unexpected() -> None:
    lost = name(STAGE + 3)
    for error, received in loads(lambda rank: stage(rank, without=(lost,))):
        assert isinstance(error, InvalidError)
        assert f"1 unexpected in the checkpoint: {lost}. " in str(error)
        assert received <= 64 * WORLD + NAMES / 8
    for report, _ in loads(lambda rank: stage(rank, without=(lost,)), strict=False):
        assert isinstance(report, LoadReport)
        assert report.unexpected == (lost,)


def test_names_that_the_checkpoint_lacks_travel_once() -> None:
    lost = [name(number) for number in range(STAGE)]

    def saved(rank: int) -> dict[str, object]:
        return stage(rank) if rank else {"other": 1}

    def state(rank: int) -> dict[str, object]:
        return {**stage(0), **stage(rank)}

    for error, received in loads(state, saved=saved):
        assert isinstance(error, InvalidError)
        assert f"{STAGE} missing from the checkpoint: {', '.join(sorted(lost)[:3])} and {STAGE - 3} more" in str(error)
        assert received <= 64 * WORLD + NAMES / 8 + len("".join(lost))
    for report, _ in loads(state, saved=saved, strict=False):
        assert isinstance(report, LoadReport)
        assert report.missing == tuple(sorted(lost))


def gathered(
    statuses: Sequence[RankStatus], names: Sequence[str] = ("a", "b", "c")
) -> list[tuple[GatheredStatuses, int]]:
    """Gather one status a rank; return what each rank got, and the bytes that came to it."""
    group = ThreadGroup(len(statuses))

    def rank_of(comm: ThreadComm) -> tuple[GatheredStatuses, int]:
        counting = CountingComm(group, comm.rank)
        return gather_statuses(counting, statuses[comm.rank], lambda: names), counting.received

    return run_ranks(len(statuses), rank_of, group=group)


def test_every_rank_learns_what_each_rank_said() -> None:
    statuses = [
        RankStatus(
            missing=("x", "\ud800"), unexpected=("a", "c"), offer=Offer("always", 7, b"reads of 0", reads_enough=True)
        ),
        RankStatus(missing=("y",), unexpected=("a", "b", "elsewhere"), offer=Offer("auto", 7, b"reads of others")),
        RankStatus(unexpected=("c", "a"), offer=Offer("auto", 7, b"reads of others")),
    ]
    for found, _ in gathered(statuses):
        assert [status.missing for status in found.by_rank] == [("x", "\ud800"), ("y",), ()]
        assert [status.offer for status in found.by_rank] == [status.offer for status in statuses]
        assert found.missing == {"x", "y", "\ud800"}
        assert found.unexpected == {"a"}
        assert found.is_whole


def test_a_name_outside_the_catalogue_is_unexpected_if_every_rank_says_so() -> None:
    lacking = RankStatus(unexpected=("numbered.0", "b"))
    assert {found.unexpected for found, _ in gathered([lacking, lacking])} == {frozenset({"numbered.0", "b"})}
    assert {found.unexpected for found, _ in gathered([lacking, RankStatus()])} == {frozenset()}


def test_no_offer_arrives_unless_it_may_pay_every_rank_has_one_and_all_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little = [RankStatus(offer=Offer("auto", 7, b"reads")) for rank in range(3)]
    for found, received in gathered(little):
        assert not any(status.offer.description for status in found.by_rank)
        assert received <= 64 * 3
    long = [RankStatus(offer=Offer("auto", 7, bytes([rank]) * 5000, reads_enough=True)) for rank in range(3)]
    forced = [RankStatus(offer=Offer("always", 7, bytes([rank]) * 5000, reads_enough=True)) for rank in range(3)]
    for found, _ in gathered([*long, RankStatus()]):
        assert not any(status.offer.description for status in found.by_rank)
    monkeypatch.setattr("holdfast.training.loading.statuses._OFFERS_BYTES_MAX", 12_000)
    for found, received in gathered(long):
        assert not any(status.offer.description for status in found.by_rank)
        assert received <= 64 * 3
    for found, _ in gathered(forced):
        assert [len(status.offer.description) for status in found.by_rank] == [5000] * 3


def test_errors_of_many_ranks_keep_their_kinds_when_their_texts_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.training.loading.statuses._TEXTS_BYTES_MAX", 250)
    errors = [error_text(CorruptError(f"chunk {rank} is damaged")) for rank in range(8)]
    for found, received in gathered([RankStatus(error) for error in errors]):
        assert found.by_rank[0].error == errors[0]
        assert '"CorruptError"' in (found.by_rank[7].error or "")
        assert "too many ranks failed" in (found.by_rank[7].error or "")
        assert not found.is_whole
        assert received <= 64 * 8 + 250


def test_names_without_room_are_counted_as_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.training.loading.statuses._TEXTS_BYTES_MAX", 10)
    statuses = [RankStatus(missing=(f"{'x' * rank}",), unexpected=("a", "numbered.0")) for rank in range(1, 4)]
    for found, _ in gathered(statuses):
        assert found.missing == {"x"}
        assert found.unexpected == {"a", "numbered.0"}
        assert not found.is_whole
    error = next(error for error, _ in loads(lambda rank: {**stage(rank), f"new{rank}": 1}))
    assert "at least 1 missing from the checkpoint: new0. " in str(error)


def test_while_nobody_fails_errors_take_one_byte() -> None:
    group = ThreadGroup(3)

    def rank_of(comm: ThreadComm) -> tuple[list[str | None], int]:
        counting = CountingComm(group, comm.rank)
        return gather_errors(counting, None), counting.received

    assert run_ranks(3, rank_of, group=group) == [([None] * 3, 1)] * 3


def test_names_of_a_checkpoint_are_those_of_tensors_and_of_values_at_any_depth() -> None:
    tree = Group("dict", {"opt": Group("optimizer", {"param_groups": {"w": "g"}}), "list": [{"inner": 1}], "n": {1: 2}})
    assert names_of({"w"}, {"tied"}, tree) == [
        "list",
        "n",
        "opt",
        "opt.param_groups",
        "opt.param_groups.w",
        "tied",
        "w",
    ]
