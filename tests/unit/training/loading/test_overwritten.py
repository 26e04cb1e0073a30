"""A reader whose checkpoint is overwritten until its files are gone: it begins again, and never mixes two."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast._face import wiring
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import LoadReport
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.settings import PAGE_BYTES, Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import load_checkpoint
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.step_choice import StepChoice
from tests.doubles.calls import RecordingStore
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.overwritten_checkpoint import EVERYTHING, HASTY, location_of, number_in, save, state_of
from tests.support.tuning import tuned

SETTINGS = replace(HASTY, lease_seconds=5.0, reports=False)
MOMENTS = {
    "index": ("get", ".msgpack"),
    "sizes": ("list", "/"),
    "cached": ("get_cached", ".safetensors"),
    "packs": ("read_into", ".safetensors"),
}
"""Operations of a load, before which the checkpoint is overwritten and its files are removed."""


def overwrite_until_gone(path: Path, number: int) -> None:
    """Overwrite twice: the second one removes the files of what was there."""
    save(path, number - 1, SETTINGS)
    save(path, number, SETTINGS)


class Overwrites:
    """Overwrites a checkpoint in the midst of an operation of its reader, once or again and again."""

    def __init__(
        self, path: Path, moment: str, *, times: int = 1, act: Callable[[Path, int], None] | None = None
    ) -> None:
        self._path, (self._name, self._ending), self._left = path, MOMENTS[moment], times
        self._act, self._lock, self.number = act or overwrite_until_gone, threading.Lock(), 1

    def over(self, store: Store) -> FaultyStore:
        return FaultyStore(store, Faults(self, names={self._name}, lasting=True))

    def __call__(self, operation: FaultPoint) -> None:
        with self._lock:
            if not self._left or not operation.subject.endswith(self._ending):
                return
            self._left -= 1
            self.number += 2
            self._act(self._path, self.number)


def load(store: Store, state: dict[str, object], *, strict: bool = True, settings: Settings = SETTINGS) -> LoadReport:
    job = Job(AloneComm(), SystemClock(), settings, NumpyFramework(0), saves=False)
    return load_checkpoint(job, StepChoice(location_of(store), is_path=True), LoadRequest(state, EVERYTHING, strict))


@pytest.fixture
def best(tmp_path: Path) -> Path:
    save(tmp_path / "best", 1, SETTINGS)
    return tmp_path / "best"


class TestLoad:
    @pytest.mark.parametrize("moment", sorted(MOMENTS))
    def test_a_load_begins_again_with_the_new_one(self, best: Path, moment: str) -> None:
        overwrites, state = Overwrites(best, moment), state_of(0)
        # Chunks this small are read straight into the target only where a test asks for it.
        settings = tuned(SETTINGS, zero_copy_bytes_min=PAGE_BYTES) if moment == "cached" else SETTINGS
        load(overwrites.over(LocalStore(best, settings=SETTINGS)), state, settings=settings)
        assert number_in(state) == overwrites.number == 3

    def test_a_load_reads_the_manifest_once(self, best: Path) -> None:
        store = RecordingStore(LocalStore(best, settings=SETTINGS))
        load(store, state_of(0))
        assert [call.subject for call in store.take() if call.name == "get"].count("manifest.json") == 1

    def test_a_load_that_is_overwritten_twice(self, best: Path) -> None:
        overwrites, state = Overwrites(best, "packs", times=2), state_of(0)
        load(overwrites.over(LocalStore(best, settings=SETTINGS)), state)
        assert number_in(state) == 5

    def test_a_load_that_is_overwritten_always_ends(self, best: Path) -> None:
        overwrites = Overwrites(best, "index", times=100)
        with pytest.raises(UnavailableError, match="overwritten 10 times while the load read it"):
            load(overwrites.over(LocalStore(best, settings=SETTINGS)), state_of(0))

    def test_damage_is_damage(self, best: Path) -> None:
        next(best.glob("*/r00000.safetensors")).unlink()
        with pytest.raises(CorruptError, match="missing"):
            load(LocalStore(best, settings=SETTINGS), state_of(0))

    def test_damage_in_what_is_not_asked_for_is_none(self, best: Path) -> None:
        """As before: a checkpoint at a path whose pack is cut short still gives what is whole."""
        pack = next(best.glob("*/r00000.safetensors"))
        pack.write_bytes(pack.read_bytes()[:-PAGE_BYTES])
        state = {"first": state_of(0)["first"]}
        load(LocalStore(best, settings=SETTINGS), state, strict=False)
        tensor = state["first"]
        assert isinstance(tensor, GlobalTensor) and (tensor.array == 1).all()

    def test_a_name_that_the_new_one_lacks_is_not_left_half_filled(self, best: Path, tmp_path: Path) -> None:
        def drop_a_tensor(path: Path, number: int) -> None:
            state = {key: value for key, value in state_of(number).items() if key != "second"}
            for _ in range(2):
                save(path, number, SETTINGS, dict(state))

        overwrites = Overwrites(best, "packs", act=drop_a_tensor)
        with pytest.raises(InvalidError, match="second") as refused:
            load(overwrites.over(LocalStore(best, settings=SETTINGS)), state_of(0), strict=False)
        assert "a checkpoint that was overwritten" in "".join(refused.value.__notes__)

    @pytest.mark.parametrize("overwritten", [True, False])
    def test_every_rank_ends_alike(self, best: Path, overwritten: bool) -> None:
        """Rank 1 alone misses a pack: every rank loads the new checkpoint, or raises the damage that rank 1 found."""

        def miss_a_pack(path: Path, number: int) -> None:
            raise MissingError("this rank does not see it")

        overwrites = Overwrites(best, "packs", act=None if overwritten else miss_a_pack)
        states = [state_of(0) for _ in range(3)]

        def work(comm: ThreadComm) -> LoadReport:
            job = Job(
                comm, SystemClock(), replace(SETTINGS, share_reads="never"), NumpyFramework(comm.rank), saves=False
            )
            store: Store = LocalStore(best, settings=SETTINGS)
            if comm.rank == 1:
                store = overwrites.over(store)
            request = LoadRequest(states[comm.rank], EVERYTHING, True)
            return load_checkpoint(job, StepChoice(location_of(store), is_path=True), request)

        outcomes = outcomes_of_ranks(3, work)
        if overwritten:
            assert all(isinstance(outcome, LoadReport) for outcome in outcomes), outcomes
            assert [number_in(state) for state in states] == [3, 3, 3]
        else:
            assert all(isinstance(outcome, CorruptError) for outcome in outcomes), outcomes
            assert str(outcomes[0]).startswith("rank 1: ") and not str(outcomes[1]).startswith("rank")


class TestOpenCheckpoint:
    def opened(self, best: Path, overwrites: Overwrites) -> Checkpoint:
        store = overwrites.over(LocalStore(best, settings=SETTINGS))
        return Checkpoint(location_of(store), SETTINGS, lambda array, dtype: array)

    @pytest.mark.parametrize("moment", ["index", "packs"])
    def test_the_first_read_begins_again(self, best: Path, moment: str) -> None:
        checkpoint = self.opened(best, Overwrites(best, moment))
        first = checkpoint.read("first")
        assert isinstance(first, np.ndarray) and (first == 3).all() and checkpoint.objects["number"] == 3

    def test_a_later_read_is_refused(self, best: Path) -> None:
        """The caller has a part of the old checkpoint, so no part of the new one may come beside it."""
        checkpoint = holdfast.open_checkpoint(best)
        first = checkpoint.read("first")
        assert isinstance(first, np.ndarray) and (first == 1).all() and not checkpoint.is_overwritten
        overwrite_until_gone(best, 3)
        assert checkpoint.is_overwritten
        with pytest.raises(ConflictError, match=r"was overwritten after it was opened,.* Open it again"):
            checkpoint.read("second")

    def test_what_was_looked_at_counts_too(self, best: Path) -> None:
        checkpoint = holdfast.open_checkpoint(best)
        assert checkpoint.objects["number"] == 1
        overwrite_until_gone(best, 3)
        with pytest.raises(ConflictError, match="was overwritten"):
            checkpoint.read("first")

    def test_a_lost_pack_is_damage(self, best: Path) -> None:
        checkpoint = holdfast.open_checkpoint(best)
        next(best.glob("*/r00000.safetensors")).unlink()
        with pytest.raises(CorruptError, match="missing"):
            checkpoint.read("first")

    @pytest.mark.parametrize("moment", ["index", "packs"])
    def test_verify_begins_again(self, best: Path, moment: str) -> None:
        checkpoint = self.opened(best, Overwrites(best, moment))
        assert list(checkpoint.verify()) == []

    def test_verify_does_not_mix_the_damage_of_two(self, best: Path) -> None:
        pack = next(best.glob("*/r00000.safetensors"))
        data = bytearray(pack.read_bytes())
        data[PAGE_BYTES] ^= 1
        pack.write_bytes(bytes(data))
        damages = holdfast.open_checkpoint(best).verify()
        assert "chunk hashes to" in next(damages).message
        overwrite_until_gone(best, 3)
        # What is open stays readable. The next file that is opened is gone.
        with pytest.raises(ConflictError, match="was overwritten while it was verified"):
            list(damages)

    @pytest.mark.parametrize("moment", ["index", "packs"])
    def test_a_whole_state_is_read_anew(self, best: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        overwrites = Overwrites(best, moment, times=2)
        monkeypatch.setattr(wiring, "checkpoint_at", lambda *_: self.opened(best, overwrites))
        assert number_in(holdfast.read(best, framework="numpy")) == 5

    def test_a_whole_state_is_mapped_anew(self, best: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mapped = list[str]()

        class Overwritten(LocalStore):
            def mapped(self, key: str) -> mmap.mmap | None:
                mapped.append(key)
                if len(mapped) == 1:
                    overwrite_until_gone(best, 3)
                return super().mapped(key)

        def opened(*_: object) -> Checkpoint:
            location = location_of(Overwritten(best, settings=SETTINGS))
            return Checkpoint(location, SETTINGS, lambda array, dtype: array)

        monkeypatch.setattr(wiring, "checkpoint_at", opened)
        state = holdfast.read(best, framework="numpy", mmap=True)
        overwrite_until_gone(best, 5)
        assert number_in(dict(state)) == 3 and len(mapped) == 2, "what is mapped stays although its file is removed"
