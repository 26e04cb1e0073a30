"""The power goes at 50 points of a save, on a real file system: what was acknowledged loads, what is seen is whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from tests.crash.kills.judging import Judged
from tests.crash.kills.sweeping import swept_by
from tests.doubles.faults import Faults, FaultySyscalls
from tests.property.life import Switch
from tests.support.crashed_run import (
    NEW,
    NEXT,
    OLD,
    SETTINGS,
    committed_at,
    go_back,
    local_store,
    paths_under,
    require_clean,
    require_no_timeline_lost,
    require_whole,
    run_at,
    step_path,
    training_state,
)
from tests.support.mounted_file_systems import (
    FILE_SYSTEMS,
    acted_until_power_cut,
    copy_image,
    cut_power,
    mounted,
    new_image,
    workplace,
)
from tests.support.overwritten_checkpoint import number_at
from tests.support.overwritten_checkpoint import save as save_over

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(300),
]

COUNTED, STRIDE = swept_by("GO_BACK_STRIDE")
"""Where the power goes while a process goes back."""

OVERWRITE_STRIDE = int(os.environ.get("GO_BACK_STRIDE", "90"))
"""Distance of the system calls at which it goes while a process overwrites; `make campaign` tries every one."""

POINTS = 50
IMAGE_MIB = 16


@pytest.fixture
def location() -> Iterator[Path]:
    with workplace() as folder:
        yield folder


@pytest.fixture(params=FILE_SYSTEMS)
def kind(request: pytest.FixtureRequest) -> str:
    """The file system."""
    return str(request.param)


@pytest.fixture
def template(location: Path, kind: str) -> Path:
    """An image with one committed step, whose file system was unmounted in good order."""
    image = location / "template"
    new_image(image, IMAGE_MIB, kind)
    with mounted(image, location / "m", options="loop", kind=kind) as mount:
        committed_at(mount / "root", OLD)
    return image


class Buffered(Syscalls):
    """A file system that refuses direct writing, so that data waits in the page cache until it is synced."""

    def set_direct(self, fd: int, direct: bool) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def operations_of_a_save(location: Path, syscalls: Syscalls) -> int:
    committed_at(location / "counted", OLD)
    faults = Faults()
    save(location / "counted", syscalls, faults)
    shutil.rmtree(location / "counted")
    return faults.counted


def save(root: Path, syscalls: Syscalls, faults: Faults) -> None:
    store = LocalStore(root, settings=SETTINGS, syscalls=cast(Syscalls, FaultySyscalls(syscalls, faults)))
    run_at(store).save(NEW, training_state(NEW)).wait()


@pytest.mark.parametrize("syscalls", [Syscalls(), Buffered()], ids=["direct", "buffered"])
def test_returned_save_survives_power_cut(location: Path, template: Path, kind: str, syscalls: Syscalls) -> None:
    total = operations_of_a_save(location, syscalls)
    # The last ones lie behind the save: it returned, and at once the power went.
    points = sorted({1 + round(number * (total + 1) / (POINTS - 1)) for number in range(POINTS)})
    assert len(points) == POINTS
    judged, kept, acknowledged = Judged[bool](), 0, 0
    for at in points:
        image = location / "image"
        copy_image(template, image)
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            returned = acted_until_power_cut(mount, at, partial(save, mount / "root", syscalls))
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            root = mount / "root"
            try:
                kept += judged.fate(root, returned, partial(is_new_kept, root, returned=returned))
            except BaseException as error:
                error.add_note(f"power cut at operation {at} of {total}; found {sorted(paths_under(mount))}")
                raise
        acknowledged += returned
    print(
        f"{kind}: {len(points)} power cuts: {acknowledged} had returned, {kept} new checkpoints survived, 0 lost; "
        f"{judged.contents} contents"
    )
    assert acknowledged >= 1
    assert kept >= acknowledged
    assert kept < len(points)


def is_new_kept(root: Path, *, returned: bool) -> bool:
    """Return whether the new step survived. Require that what survived is whole, and that training goes on."""
    steps = set(run_at(local_store(root)).steps())
    assert steps in ({OLD}, {OLD, NEW})
    assert NEW in steps or not returned, "an acknowledged checkpoint was lost"
    require_whole(root, steps)
    step = NEXT if NEW in steps else NEW
    committed_at(root, step)
    require_whole(root, steps | {step})
    require_clean(root, step)
    return NEW in steps


def go_back_on(root: Path, faults: Faults) -> None:
    switch = Switch()
    go_back(local_store(root, switch), switch, faults)


@pytest.mark.timeout(1800)
def test_no_step_of_either_timeline_is_lost_to_a_power_cut(location: Path, template: Path, kind: str) -> None:
    """A process goes back and saves a number again, so a manifest moves."""
    with mounted(template, location / "m", options="loop", kind=kind) as mount:
        committed_at(mount / "root", NEW)
    committed_at(location / "counted", OLD, NEW)
    recorded = Faults(names=COUNTED)
    go_back_on(location / "counted", recorded)
    points = [*range(1, recorded.counted + 2, STRIDE), recorded.counted + 50]
    judged, fates, acknowledged = Judged[str](), list[str](), 0
    for at in points:
        image = location / "image"
        copy_image(template, image)
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            returned = acted_until_power_cut(mount, at, partial(go_back_on, mount / "root"), COUNTED)
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            root = mount / "root"
            try:
                judge = partial(require_no_timeline_lost, root, acknowledged=returned)
                fates.append(judged.fate(root, returned, judge))
            except BaseException as error:
                error.add_note(f"power cut at {at} of {recorded.counted}; found {sorted(paths_under(mount))}")
                raise
        acknowledged += returned
    print(f"{kind}: {len(points)} power cuts left {judged.contents} contents: {fates.count('new')} are on, 0 lost")
    assert fates.count("old") >= 5 and fates.count("new") >= acknowledged >= 1


def overwrite_on(best: Path, faults: Faults) -> None:
    save_over(local_store(best, faults), 3)


def test_an_overwritten_checkpoint_survives_a_power_cut(location: Path, template: Path, kind: str) -> None:
    """The power goes here and there in an overwrite, and at each call around the one that replaces the manifest."""
    with mounted(template, location / "m", options="loop", kind=kind) as mount:
        for number in (1, 2):
            save_over(mount / "best", number)
            save_over(location / "counted", number)
    recorded = Faults()
    overwrite_on(location / "counted", recorded)
    (moved,) = (at for at, call in enumerate(recorded.seen, 1) if call.name == "rename" and ".next." in call.subject)
    points = sorted(
        {*range(1, recorded.counted + 2, OVERWRITE_STRIDE), *range(moved - 2, moved + 4), recorded.counted + 50}
    )
    found = []
    for at in points:
        image = location / "image"
        copy_image(template, image)
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            returned = acted_until_power_cut(mount, at, partial(overwrite_on, mount / "best"))
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            found.append(number_at(mount / "best"))
            assert found[-1] in ((3,) if returned else (2, 3)), f"power cut at operation {at} of {recorded.counted}"
            save_over(mount / "best", 4)
            assert number_at(mount / "best") == 4
    print(f"{kind}: {len(points)} power cuts: {found.count(3)} new checkpoints survived, 0 lost")
    assert {*found} == {2, 3}


def save_what_is_partly_frozen(root: Path, faults: Faults) -> None:
    switch = Switch()
    run = run_at(local_store(root, switch))
    run.load(training_state(NEW), OLD)
    switch.now = faults
    run.save(NEW, training_state(NEW)).wait()


def test_a_step_that_survives_has_its_links(location: Path, template: Path, kind: str) -> None:
    """No call makes a link durable by itself: the commit does, with the folder that it syncs in any case."""
    committed_at(location / "counted", OLD)
    recorded = Faults()
    save_what_is_partly_frozen(location / "counted", recorded)
    (linked,) = (
        at for at, call in enumerate(recorded.seen, 1) if call.name == "link" and call.subject.endswith(".safetensors")
    )
    published = max(at for at, call in enumerate(recorded.seen, 1) if call.name == "link")
    survived = 0
    for at in (linked, linked + 1, published, published + 1, published + 2, recorded.counted + 1):
        image = location / "image"
        copy_image(template, image)
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            acted_until_power_cut(mount, at, partial(save_what_is_partly_frozen, mount / "root"))
        with mounted(image, location / "m", options="loop", kind=kind) as mount:
            root = mount / "root"
            steps = set(run_at(local_store(root)).steps())
            require_whole(root, steps)
            if NEW in steps:
                survived += 1
                shutil.rmtree(step_path(root, OLD))
                require_whole(root, {NEW})
    assert survived >= 1


def test_the_power_cut_is_a_real_one(location: Path, template: Path, kind: str) -> None:
    """A file that was written but not synced is gone afterwards, or the test above would test nothing."""
    with mounted(template, location / "m", options="loop", kind=kind) as mount:
        for name, synced in (("synced", True), ("not-synced", False)):
            with (mount / name).open("wb") as file:
                file.write(b"x" * 10_000)
                if synced:
                    file.flush()
                    os.fsync(file.fileno())
                    folder = os.open(mount, os.O_RDONLY)
                    os.fsync(folder)
                    os.close(folder)
        cut_power(mount)
    with mounted(template, location / "m", options="loop", kind=kind) as mount:
        assert (mount / "synced").read_bytes() == b"x" * 10_000
        assert not (mount / "not-synced").exists()


def test_a_plain_path_skips_no_power_cut(location: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0 or not any(Path(folder, f"mkfs.{kind}").exists() for folder in ("/sbin", "/usr/sbin")):
        pytest.skip(f"needs root and mkfs.{kind} in a folder of administration")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    try:
        new_image(location / "image", IMAGE_MIB, kind)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"a power cut is skipped: {skipped}")
