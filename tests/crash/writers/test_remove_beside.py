"""Somebody reads, tags or writes at any operation of a removal by name: no step is lost, and no tag leads nowhere."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.base.clock import SystemClock
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.errors import CheckpointError, ConflictError, MissingError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.reader import ReaderLease
from holdfast.stored.repository.tags import read_tags
from holdfast.training.loading.named_step import finder_of
from holdfast.training.loading.resolve import location_named
from holdfast.training.runs.removal.named_steps import RemovedSteps, StepRemoval
from holdfast.training.runs.tags import tag_step
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.support.crashed_run import committed_at, local_store, require_whole, run_at, training_state

pytestmark = [
    pytest.mark.long,
    # The fork happens while threads of earlier tests may stand idle; the child uses none of their locks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(600),
]

STEPS, NAMED, KEPT, NEXT = (10, 20, 30, 40), (10, 30), {20, 40}, 50
LEASE_SECONDS = 60.0
STRIDE = int(os.environ.get("COLLECT_STRIDE", "6"))
"""Every so many-th operation of the store is met; `make campaign` meets all."""


def remove(root: Path, faults: Faults, lease_seconds: float = LEASE_SECONDS) -> RemovedSteps:
    """Remove the named steps with their tags."""
    store = FaultyStore(local_store(root), faults)
    return StepRemoval(NAMED, tagged=True, all_steps=False).execute(store, SystemClock(), 0.0, lease_seconds)


@pytest.fixture
def template(in_memory: Path) -> Path:
    """A run whose steps all refer to packs of the first, which has a tag."""
    root = in_memory / "template"
    committed_at(root, *STEPS)
    tag_step(local_store(root), SystemClock(), 10, "old")
    return root


def removals(
    template: Path, act: Callable[[Path], object], stride: int = STRIDE
) -> Iterator[tuple[Path, RemovedSteps | None, object]]:
    """Act once at each of some operations of a removal; yield the root, the report, and what the act returned.

    The report is None if the removal was refused: another writer came first.
    """
    root, recorded = template.with_name("root"), Faults()
    shutil.copytree(template, root)
    remove(root, recorded)
    shutil.rmtree(root)
    # Those around the removal of the tag are always among them.
    of_tag = [at for at, call in enumerate(recorded.seen, 1) if call.subject == "tags/old.json"][-3:]
    for at in sorted({*range(1, recorded.counted + 1, stride), *of_tag, *(at + 1 for at in of_tag)}):
        shutil.copytree(template, root)
        said: list[object] = []
        report, faults = None, Faults(lambda _, said=said: said.append(act(root)), at=at)  # type: ignore[misc]
        with suppress(ConflictError):
            report = remove(root, faults)
        if said:
            yield root, report, said[0]
        shutil.rmtree(root)


def stored(root: Path) -> set[int]:
    """Return the steps that are there; require that each is whole."""
    steps = set(run_at(local_store(root)).steps())
    require_whole(root, steps)
    return steps


def begin_to_read(root: Path) -> ReaderLease | None:
    """Hold the lease that a load of a named step holds; return None if the load would be refused."""
    store, lease = local_store(root), ReaderLease(SystemClock(), LEASE_SECONDS)
    try:
        location = location_named(CheckpointLocation(store, "", None, root=store), finder_of(30), SystemClock())
        manifest = decode_manifest(store.get(location.manifest_key, MANIFEST_BYTES_MAX), location.url)
        lease.begin(location, manifest)
    except MissingError:
        lease.close()
        return None
    return lease


def test_a_reader_has_its_step_or_is_refused(template: Path) -> None:
    outcomes = set()
    for root, report, lease in removals(template, begin_to_read):
        assert report is not None and (lease is None or isinstance(lease, ReaderLease))
        outcomes.add(lease is None)
        if lease is None:
            assert (report.steps, report.left) == (("10", "30"), {}) and stored(root) == KEPT
            continue
        assert report.steps == ("10",) and "read by" in report.left["30"][0]
        assert stored(root) == {*KEPT, 30}, "what is read stays whole"
        lease.close()
        again = remove(root, Faults())
        assert (again.steps, again.gone, again.left) == (("30",), ("10",), {}), "the same request again ends it"
        assert stored(root) == KEPT
    assert outcomes == {False, True}


def move_tag(root: Path) -> None:
    tag_step(local_store(root), SystemClock(), 40, "old", move=True)


def test_a_tag_that_moves_away_is_not_lost(template: Path) -> None:
    for root, report, _ in removals(template, move_tag):
        assert report is not None and report.left == {}
        assert {name: tag.step for name, tag in read_tags(local_store(root)).whole.items()} == {"old": 40}
        assert [path.name for path in (root / "tags").iterdir()] == ["old.json"]
        assert set(run_at(local_store(root)).steps()) == KEPT


def add_tag(root: Path) -> bool:
    try:
        tag_step(local_store(root), SystemClock(), 30, "late")
    except CheckpointError:
        return False
    return True


def test_a_step_that_gets_a_tag_stays_or_the_tag_is_refused(template: Path) -> None:
    outcomes = set()
    for root, report, is_tagged in removals(template, add_tag):
        assert report is not None
        has_tag = "late" in read_tags(local_store(root)).whole
        assert has_tag == (30 in run_at(local_store(root)).steps()) == ("tag late" in report.left.get("30", ()))
        # Before the removal looked, a tag is one of those that go with their steps.
        outcomes.add((is_tagged, has_tag))
    assert outcomes == {(True, False), (True, True), (False, False)}


def save_next(root: Path) -> bool:
    run = run_at(local_store(root))
    try:
        run.load(training_state(0))
        run.save(NEXT, training_state(NEXT)).wait()
    except ConflictError:
        return False
    finally:
        run.close()
    return True


def test_a_writer_is_refused_or_has_saved(template: Path) -> None:
    outcomes = set()
    for root, report, is_saved in removals(template, save_next, 3 * STRIDE if STRIDE > 1 else 1):
        outcomes.add((is_saved, report is None))
        if report is None:
            assert stored(root) == {*STEPS, NEXT}, "nothing was removed"
        else:
            assert report.left == {} and stored(root) == ({*KEPT, NEXT} if is_saved else KEPT)
    assert (False, False) in outcomes and outcomes <= {(True, False), (True, True), (False, False)}


@pytest.mark.parametrize(
    ("name", "subject"), [("move", "manifest.json"), ("delete", "r00000.safetensors"), ("move", "tags/")]
)
def test_a_removal_that_is_stopped_for_long_harms_no_newer_writer(template: Path, name: str, subject: str) -> None:
    """It is stopped, a training takes over and saves, and it goes on."""

    def stop(operation: FaultPoint) -> None:
        # Not by number: the heartbeat makes operations too, more of them on a slow machine.
        if operation.name == name and subject in operation.subject and not stopped:
            stopped.append(operation)
            os.kill(os.getpid(), signal.SIGSTOP)

    stopped: list[FaultPoint] = []
    child = os.fork()
    if child == 0:
        try:
            remove(template, Faults(stop, lasting=True), lease_seconds=0.5)
        finally:
            os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    assert save_next(template)
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
    left = stored(template)
    assert {*KEPT, NEXT} <= left <= {*STEPS, NEXT}
    if left & {*NAMED}:
        remove(template, Faults())
    assert stored(template) == {*KEPT, NEXT}
    assert not read_tags(local_store(template)).whole
