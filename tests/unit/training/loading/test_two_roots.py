"""A run in two roots: a load takes from the other root what the near one lacks or has damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from holdfast._face.wiring import codecs
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.framework import Selection
from holdfast.base.ports.store import Store
from holdfast.base.types.reports import LoadReport
from holdfast.core.format.names import link_name, step_folder
from holdfast.errors import CorruptError
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation, is_all_there
from holdfast.stored.checkpoint.pack_sizes import short_packs
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import load_checkpoint
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.step_choice import StepChoice
from tests.doubles.calls import RecordingStore
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, World, plain, saved

RANKS = 2
COUNT = 30_000
"""Elements of a tensor: some thirty chunks."""

COMPRESSED = replace(PATIENT, compression="on")


def state_of(step: int) -> dict[str, GlobalTensor]:
    """One tensor changes with each step, and one never does."""
    changing = np.random.default_rng(step).standard_normal(COUNT).astype(np.float32)
    return {"changing": GlobalTensor("float32", changing), "frozen": plain(0.5, count=COUNT)}


@dataclass
class TwoRoots:
    """A run of two steps in a near root and in another."""

    near: LocalStore
    far: LocalStore
    settings: Settings

    def home(self) -> CheckpointLocation:
        return CheckpointLocation(self.near, "", None, root=self.near, others=(self.far,))

    def step(self, step: int = 2) -> CheckpointLocation:
        return replace(self.home(), folder=step_folder(step), step=step)

    def packs(self, store: Store) -> list[Path]:
        """The packs of both steps, and the links to them."""
        return [path for path in sorted(Path(store.url).rglob("*")) if path.suffix in (".safetensors", ".link")]

    def load(self, expected: int = 2, **options: object) -> list[LoadReport]:
        """Load the newest step on every rank; require that it is this one, and every element."""

        def work(comm: ThreadComm) -> LoadReport:
            settings = replace(self.settings, **options)
            job = Job(comm, SystemClock(), settings, NumpyFramework(comm.rank), codecs=codecs(), saves=False)
            state = {name: plain(-1.0, count=COUNT) for name in state_of(2)}
            report = load_checkpoint(job, StepChoice(self.home()), LoadRequest(state, Selection(), strict=True))
            assert (report.step, len(report.passed_over)) == (expected, 2 - expected)
            for name, tensor in state_of(expected).items():
                assert np.array_equal(state[name].array, tensor.array), name
            return report

        reports = outcomes_of_ranks(RANKS, work)
        for report in reports:
            if isinstance(report, BaseException):
                raise report
        return reports  # type: ignore[return-value]


@pytest.fixture(params=["plain", "compressed"])
def roots(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TwoRoots]:
    chosen = tuned(COMPRESSED if request.param == "compressed" else PATIENT, unchanged_bytes_min=1024)
    far = LocalStore(tmp_path / "far", settings=chosen)
    world = World(RANKS, chosen, stores=dict.fromkeys(range(RANKS), far))
    world.play(lambda rank, run: [saved(run, step, state_of(step)) for step in (1, 2)])
    shutil.copytree(far.url, tmp_path / "near", symlinks=True)
    yield TwoRoots(LocalStore(tmp_path / "near", settings=chosen), far, chosen)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.unlink()  # It may have a second name.
    path.write_bytes(data)


@pytest.mark.parametrize("share_reads", ("never", "always"))
def test_a_load_takes_damaged_chunks_from_the_other_root(roots: TwoRoots, share_reads: str) -> None:
    assert {url for each in roots.load(share_reads=share_reads) for url in each.sources} == {roots.near.url}
    for pack in roots.packs(roots.near):
        flip(pack, pack.stat().st_size * 3 // 4)
    for pack in roots.packs(roots.far):
        flip(pack, pack.stat().st_size // 2)
    reports = roots.load(share_reads=share_reads)
    assert {url for each in reports for url in each.sources} == {roots.near.url, roots.far.url}
    assert all(sum(each.sources.values()) == each.bytes for each in reports)


@pytest.mark.parametrize("share_reads", ("never", "always"))
def test_a_load_takes_missing_packs_from_the_other_root(roots: TwoRoots, share_reads: str) -> None:
    for pack in roots.packs(roots.near):
        pack.unlink()
    assert is_all_there(roots.step())
    reports = roots.load(share_reads=share_reads)
    assert {url for each in reports for url in each.sources} == {roots.far.url}


def test_what_both_roots_have_damaged_is_damage(roots: TwoRoots) -> None:
    for store in (roots.near, roots.far):
        for pack in roots.packs(store):
            flip(pack, pack.stat().st_size // 2)
    with pytest.raises(CorruptError, match=r"near/.*; and .*far/"):
        roots.load()


def test_a_pack_that_is_missing_here_and_damaged_there_is_damage(roots: TwoRoots) -> None:
    """All files are there in their sizes, if both roots are looked at: an older step is loaded all the same."""
    for pack in roots.packs(roots.near):
        if step_folder(2).rstrip("/") in pack.parts:
            pack.unlink()
    for pack in roots.packs(roots.far):
        if step_folder(2).rstrip("/") in pack.parts and pack.suffix == ".safetensors":
            flip(pack, pack.stat().st_size // 2)
    roots.load(expected=1)


def test_packs_are_found_under_both_roots(roots: TwoRoots) -> None:
    """A pack of an earlier step, too: at its own place, or by its link."""
    manifest = World(1, store=roots.near).manifest(2)  # type: ignore[arg-type]
    packs = roots.step().packs_of(manifest)
    names = [pack.name for pack in manifest.packs]
    assert any(name.startswith("step-") for name in names) and not all(name.startswith("step-") for name in names)
    for pack in manifest.packs:
        stored = packs(pack.name)
        (other,) = stored.others
        assert (other.files.url, other.key) == (roots.far.url, stored.key) and not other.others
        assert other.files.size(other.key) == pack.bytes
        if pack.name.startswith("step-"):
            Path(roots.far.url, stored.key).unlink()
            assert Path(roots.far.url, step_folder(2), manifest.attempt, link_name(pack.name)).exists()
            assert other.files.size(other.key) == pack.bytes, "by the link"


@pytest.mark.parametrize("damage", ("missing", "short"))
def test_a_pack_is_short_if_no_root_has_it_whole(roots: TwoRoots, damage: str) -> None:
    manifest = World(1, store=roots.near).manifest(2)  # type: ignore[arg-type]
    location = roots.step()

    def short() -> set[str]:
        return set(short_packs(roots.near, location.folder, manifest, location.packs_of(manifest)))

    def cut(store: Store) -> None:
        for pack in roots.packs(store):
            if damage == "missing":
                pack.unlink()
            else:
                data = pack.read_bytes()
                pack.unlink()
                pack.write_bytes(data[:-1])

    cut(roots.near)
    assert not short() and is_all_there(location)
    cut(roots.far)
    assert short() == {pack.name for pack in manifest.packs} and not is_all_there(location)


def test_the_stores_of_an_operation_are_carried_along() -> None:
    class Named(RecordingStore):
        def for_operation(self, name: str, rank: int, world_size: int) -> Store:
            view = Named(self._inner)
            view.url = f"{self.url}?{name}"
            return view

    stores = [Named(World(1).store) for _ in range(3)]
    location = CheckpointLocation(stores[0], "", None, root=stores[0], others=tuple(stores[1:]))
    assert [each.url for each in location.for_operation("load", 0, 1).others] == [f"{s.url}?load" for s in stores[1:]]
