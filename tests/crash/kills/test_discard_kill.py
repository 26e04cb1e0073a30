"""SIGKILL, errors and power cuts at every operation of a load that discards: all newer steps count, or none does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.api import list_steps
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.stored.repository.catalog import read_run_id
from holdfast.training.runs.removal.chosen_steps import ChosenNames
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from tests.crash.kills.sweeping import fates_of_kills, judge_after_errors
from tests.doubles.faults import Faults, FaultyStore
from tests.support.crashed_run import (
    committed_at,
    expected_fingerprint,
    fingerprint,
    local_store,
    paths_under,
    run_at,
    step_path,
    training_state,
)
from tests.support.mounted_file_systems import FILE_SYSTEMS, acted_until_power_cut, copy_image, mounted, new_image

pytestmark = [
    pytest.mark.long,
    # The fork happens while threads of earlier tests may stand idle; the child uses none of their locks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(600),
]

STEPS, BACK, ANEW = (10, 20, 30, 40), 20, 30
STRIDE = int(os.environ.get("COLLECT_STRIDE", "13"))
"""Every so many-th call to the operating system is met, and of a store's operations every third; `make campaign` meets
all."""
IMAGE_MIB = 16


class SkippingClock(SystemClock):
    """Nothing sleeps: the time after it comes at once."""

    skipped = 0.0

    def monotonic_seconds(self) -> float:
        return super().monotonic_seconds() + self.skipped

    def sleep(self, seconds: float) -> None:
        self.skipped += seconds


def collect(store: Store, run: CheckpointManager) -> None:
    """Do at once what the background does after the grace."""
    parts, run_id = run._parts, read_run_id(store)
    assert run_id is not None
    parts.writer_lease.hold(run_id)
    collector = CheckpointGC(store, SkippingClock(), None, parts.writer_lease, parts.pins, ChosenNames(is_all=True))
    # The power may have cut off the lease of a reader. What nobody can read protects every step for a while.
    collector.await_readers()
    collector.collect(0, lambda _: False)


def discard(store: Store, say: Callable[[str], object] = str, *, anew: bool = False) -> None:
    """Load a step, and discard and remove the newer ones.

    Args:
        store: The root of the run.
        say: Called with what has been acknowledged so far.
        anew: Whether training goes on, and saves the number of a discarded step, before they are removed.
    """
    run = run_at(store)
    run._parts.collecting = None
    try:
        assert run.load(training_state(0), BACK, discard_newer=True) == BACK
        assert run.load_report is not None and (run.load_report.discarded or run.load_report.left)
        say("back")
        if anew:
            run.save(ANEW, training_state(ANEW + 1)).wait()
            say("anew")
        collect(store, run)
    finally:
        run.close()


def over_syscalls(root: Path, faults: Faults) -> None:
    discard(local_store(root, faults))


def over_store(root: Path, faults: Faults) -> None:
    discard(FaultyStore(local_store(root), faults))


def require_goes_on(root: Path) -> str:
    """Require that a restart resumes a whole step, that every step is whole or gone, and that the next writer ends it.

    Returns:
        `old` if a restart resumes the newest step of before, `back` if it resumes the loaded one, `anew` if it resumes
        the one that was saved since.
    """
    run = run_at(local_store(root))
    run._parts.collecting = None
    loaded = training_state(0)
    resumed = run.load(loaded)
    assert resumed is not None
    fates = {(40, 40): "old", (BACK, BACK): "back", (ANEW, ANEW + 1): "anew"}
    (fate,) = (
        fate
        for (step, saved), fate in fates.items()
        if (step, expected_fingerprint(saved)) == (resumed, fingerprint(loaded))
    )
    assert run.steps() == [step for step in STEPS if step <= resumed]
    for record in list_steps(root).steps:
        if record.manifest is not None:
            is_anew = fate == "anew" and record.name == str(ANEW)
            assert run.load(loaded, f"{record.step}@{record.manifest.digest}") == record.step
            assert fingerprint(loaded) == expected_fingerprint(record.step + is_anew)
    if fate != "old":
        run.load(loaded)
        if fate == "back":
            run.save(ANEW, training_state(ANEW + 1)).wait()
        collect(local_store(root), run)
        left = [record.name for record in list_steps(root).steps if record.manifest is not None]
        assert left == ["10", "20", "30"], "what was discarded is gone, and nothing else"
        assert not step_path(root, STEPS[-1]).exists()
        assert not [path for path in paths_under(root) if path.startswith(("collecting/", "timelines/", "readers/"))]
        assert run.load(loaded) == ANEW and fingerprint(loaded) == expected_fingerprint(ANEW + 1)
    run.close()
    return fate


@pytest.fixture
def template(in_memory: Path) -> Path:
    committed_at(in_memory / "template", *STEPS)
    return in_memory / "template"


@pytest.mark.parametrize("way", [over_syscalls, over_store])
def test_killed_anywhere(in_memory: Path, template: Path, way: Callable[[Path, Faults], None]) -> None:
    points = range(1, 4000, 3 * STRIDE if way is over_syscalls else 1 + 2 * (STRIDE > 1))
    fates, judged = fates_of_kills(template, in_memory / "root", way, lambda root, _: require_goes_on(root), points)
    assert fates[-1] == "back"
    assert fates == sorted(fates, reverse=True), "what was discarded stays so"
    assert set(fates) == {"old", "back"}
    print(f"{way.__name__}: {judged.deaths} deaths left {judged.contents} contents: 0 steps wrong, 0 unreadable")


def test_an_error_at_any_operation_loses_nothing(in_memory: Path, template: Path) -> None:
    points = range(1, 2000, 1 + 3 * (STRIDE > 1))
    assert judge_after_errors(template, in_memory / "root", over_store, require_goes_on, points) > 20


def of_changes(root: Path, anew: bool) -> list[int]:
    """Return the calls at which the power goes: some that change files, the first ones of the record, and the end."""
    recorded = Faults()
    discard(local_store(root, recorded), anew=anew)
    names = {"link", "rename", "unlink", "rmdir", "mkdir", "pwrite", "fsync"}
    # Between two changes the power leaves the same.
    changes = [at for at, call in enumerate(recorded.seen, 1) if call.name in names]
    record = next(n for n, at in enumerate(changes) if "/timelines" in recorded.seen[at - 1].subject)
    of_record = changes[record + 1 : record + 9 : 1 if anew else 3]
    return sorted({*changes[::STRIDE], *of_record, recorded.counted + 50})


@pytest.mark.parametrize("anew", [False, True], ids=["removed", "saved-anew"])
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_power_cut(in_memory: Path, template: Path, kind: str, anew: bool) -> None:
    """The record is durable before the load returns. From then on no restart resumes from a discarded step."""
    image, blank, mount, said = (in_memory / name for name in ("image", "blank", "m", "said"))
    shutil.copytree(template, in_memory / "counted")
    points = of_changes(in_memory / "counted", anew)
    new_image(blank, IMAGE_MIB, kind)
    with mounted(blank, mount, options="loop", kind=kind):
        shutil.copytree(template, mount / "root")

    def act(faults: Faults) -> None:
        discard(local_store(mount / "root", faults), said.write_text, anew=anew)

    fates = []
    for at in points:
        copy_image(blank, image)
        said.write_text("")
        with mounted(image, mount, options="loop", kind=kind):
            acted_until_power_cut(mount, at, act)
        with mounted(image, mount, options="loop", kind=kind):
            try:
                fates.append(require_goes_on(mount / "root"))
                assert (
                    fates[-1]
                    in {"": ("old", "back", "anew"), "back": ("back", "anew"), "anew": ("anew",)}[said.read_text()]
                )
            except BaseException as error:
                error.add_note(f"power cut at call {at}; files: {sorted(paths_under(mount))}")
                raise
    assert {*fates} == {"old", "back", *(["anew"] if anew else [])}
    print(
        f"{kind}: {len(points)} power cuts: resumed {fates.count('old')} old, {fates.count('back')} back, 0 discarded"
    )
