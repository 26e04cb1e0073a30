"""SIGKILL and power cuts at every operation of a repair: nothing readable is lost, and running it again ends well."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.offline.repair.repair import Repair
from holdfast.stored.checkpoint.location import none_allowed
from tests.crash.damage.damages import DAMAGES, damage_a_chunk, index_of, manifest_of, truncate
from tests.crash.damage.test_repair import SPLIT
from tests.crash.damage.test_resume import resumed
from tests.crash.kills.judging import Judged
from tests.crash.kills.sweeping import CHANGES
from tests.doubles.faults import Faults, kill_process
from tests.support.crashed_run import (
    NEW,
    OLD,
    SETTINGS,
    Ending,
    committed_at,
    content_under,
    in_child,
    local_store,
    paths_under,
    require_whole,
    run_at,
    step_path,
    training_state,
)
from tests.support.mounted_file_systems import (
    FILE_SYSTEMS,
    acted_until_power_cut,
    copy_image,
    mounted,
    new_image,
    workplace,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(300),
]

IMAGE_MIB = 16


def repair(root: Path, faults: Faults | None = None) -> None:
    report = Repair(local_store(root, faults), none_allowed, SystemClock(), SETTINGS).run(None)
    assert [each.outcome for each in report.steps] == ["repaired"], report


def rebuilt_with_index(step: Path) -> None:
    """Neither manifest nor index is of any use."""
    truncate(manifest_of(step))
    index_of(step).unlink()


def split_otherwise(step: Path) -> None:
    """A file of a split index is gone, and the repair writes one file and a manifest that names it."""
    shutil.rmtree(step)
    run: CheckpointManager = run_at(local_store(step.parent), settings=SPLIT)
    run.save(NEW, training_state(NEW)).wait()
    run.close()
    sorted(step.glob("*/index-*.msgpack"))[1].unlink()


HARMS: dict[str, Callable[[Path], None]] = {
    "manifest-bit": DAMAGES["manifest-bit"],
    "manifest-cut": DAMAGES["manifest-cut"],
    "index-bit": DAMAGES["index-bit"],
    "both": rebuilt_with_index,
    "split": split_otherwise,
}


def quarantined_at(root: Path, harm: Callable[[Path], None]) -> None:
    """Make a run whose newest step is damaged, and was passed over."""
    committed_at(root, OLD, NEW)
    harm(step_path(root, NEW))
    run = run_at(local_store(root))
    assert resumed(run)[0] == OLD
    run.close()


def require_no_worse(root: Path, before: dict[str, bytes]) -> None:
    """Require that the old step is read, the damaged one is either damaged still or whole, and no bytes are gone."""
    assert resumed(run_at(local_store(root)))[0] in (OLD, NEW)
    assert list(holdfast.open_checkpoint(step_path(root, OLD)).verify()) == []
    kept = set(content_under(root).values())
    # A load replaces what the one before it told of itself.
    saved = {name: data for name, data in before.items() if name.startswith("step-") and "/reports/" not in name}
    assert [name for name, data in saved.items() if data not in kept] == []


@pytest.mark.parametrize("harm", list(HARMS))
def test_a_repair_killed_anywhere_leaves_what_was_and_ends_well_when_run_again(in_memory: Path, harm: str) -> None:
    template = in_memory / "template"
    quarantined_at(template, HARMS[harm])
    before = content_under(template)
    judged = Judged[None]()
    kills = 0
    # Of the thirty files that one takes away, not each tells something new.
    for at in range(1, 2000, 13 if harm == "split" else 1):
        root = in_memory / str(at)
        shutil.copytree(template, root)
        ending = in_child(partial(repair, root, Faults(kill_process(), at=at, names=CHANGES)))
        kills += ending.killed
        try:
            judged.fate(root, ending, partial(require_repaired, root, before, ending))
        except BaseException as error:
            error.add_note(f"killed at operation {at}; found {sorted(paths_under(root))}")
            raise
        shutil.rmtree(root)
        if not ending.killed:
            break
    print(f"{kills} kills left {judged.contents} contents")
    assert kills >= 12


def require_repaired(root: Path, before: dict[str, bytes], ending: Ending) -> None:
    """Require that nothing got worse, and that both steps are whole when the repair has run to its end."""
    require_no_worse(root, before)
    if ending.killed:
        finished(root)
    require_whole(root, {OLD, NEW})


def finished(root: Path) -> None:
    """Run the repair again; a kill may have come when all was done."""
    report = Repair(local_store(root), none_allowed, SystemClock(), SETTINGS).run(None)
    assert [each.outcome for each in report.steps] in ([], ["whole"], ["repaired"]), report


def test_what_a_repair_cannot_save_is_no_worse_for_being_killed(in_memory: Path) -> None:
    """The index comes back, a chunk does not: the other tensors are read before, during and after."""
    template = in_memory / "template"
    committed_at(template, OLD, NEW)
    damage_a_chunk(step_path(template, NEW))
    DAMAGES["index-missing"](step_path(template, NEW))
    before = content_under(template)
    judged = Judged[None]()
    for at in range(1, 2000):
        root = in_memory / str(at)
        shutil.copytree(template, root)

        def hurt(root: Path = root, at: int = at) -> None:
            store = local_store(root, Faults(kill_process(), at=at, names=CHANGES))
            Repair(store, none_allowed, SystemClock(), SETTINGS).run(None)

        ending = in_child(hurt)
        judged.fate(root, ending, partial(require_no_worse, root, before))
        shutil.rmtree(root)
        if not ending.killed:
            return
    raise AssertionError("it never lived")


# ------------------------------------------------------------------------------------------------- power cuts


@pytest.fixture
def location() -> Iterator[Path]:
    with workplace() as folder:
        yield folder


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize("harm", ["manifest-cut", "both"])
def test_a_power_cut_during_a_repair_loses_nothing(location: Path, harm: str, kind: str) -> None:
    quarantined_at(location / "counted", HARMS[harm])
    faults = Faults(names=CHANGES)
    repair(location / "counted", faults)
    template = location / "template"
    new_image(template, IMAGE_MIB, kind)
    with mounted(template, location / "m", options="loop", kind=kind) as mount:
        quarantined_at(mount / "root", HARMS[harm])
        before = content_under(mount / "root")
    points = range(1, faults.counted + 2)
    judged, acknowledged = Judged[None](), 0
    for at in points:
        image = location / "image"
        copy_image(template, image)
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            returned = acted_until_power_cut(mount, at, partial(repair, mount / "root"), CHANGES)
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            root = mount / "root"
            try:
                judged.fate(root, returned, partial(require_finished, root, before, returned=returned))
            except BaseException as error:
                error.add_note(f"power cut at operation {at} of {faults.counted}; found {sorted(paths_under(mount))}")
                raise
        acknowledged += returned
    print(
        f"{kind}: {len(points)} power cuts left {judged.contents} contents: {acknowledged} had returned, 0 steps lost"
    )
    assert 1 <= acknowledged < len(points)


def require_finished(root: Path, before: dict[str, bytes], *, returned: bool) -> None:
    """Require that nothing got worse, and that both steps are whole once a repair returned or was run again."""
    require_no_worse(root, before)
    if returned:
        require_whole(root, {OLD, NEW})
    finished(root)
    require_whole(root, {OLD, NEW})
