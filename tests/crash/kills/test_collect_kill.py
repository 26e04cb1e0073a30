"""SIGKILL, errors and power cuts at every operation of a collection: what is kept stays whole, and it ends."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError
from holdfast.policies import LatestN
from holdfast.stored.leases.writer import hold_writer_lease
from holdfast.stored.repository.catalog import read_run_id
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from tests.crash.kills.judging import Judged
from tests.crash.kills.sweeping import fates_of_kills, judge_after_errors
from tests.doubles.faults import Faults, FaultyStore, fail_with
from tests.support.crashed_run import committed_at, copy_with_links, local_store, paths_under, require_whole, run_at
from tests.support.mounted_file_systems import FILE_SYSTEMS, acted_until_power_cut, copy_image, mounted, new_image

pytestmark = [
    pytest.mark.long,
    # The fork happens while threads of earlier tests may stand idle; the child uses none of their locks.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(600),
]

STEPS = (10, 20, 30, 40)
KEPT = {30, 40}
LEASE_SECONDS = 60.0
CUTS = 25
IMAGE_MIB = 16
STRIDE = int(os.environ.get("COLLECT_STRIDE", "13"))
"""Every so many-th call to the operating system is met; `make campaign` meets all."""


def collect(store: Store) -> None:
    """Keep the newest two. A pack of the first step holds what never changed; the kept steps have links to it."""
    run_id = read_run_id(store)
    assert run_id is not None
    with hold_writer_lease(store, SystemClock(), LEASE_SECONDS, run_id) as tenure:
        CheckpointGC(store, SystemClock(), LatestN(len(KEPT)), tenure).collect(0, lambda _: False)


def over_syscalls(root: Path, faults: Faults) -> None:
    collect(local_store(root, faults))


def over_store(root: Path, faults: Faults) -> None:
    collect(FaultyStore(local_store(root), faults))


def require_goes_on(root: Path) -> int:
    """Require that what is left is whole, and that another collection ends as one that nothing disturbed.

    Returns:
        How many steps were gone.
    """
    left = set(run_at(local_store(root)).steps())
    assert left >= KEPT, "a kept step was lost"
    require_whole(root, left)
    collect(local_store(root))
    require_collected(root)
    return len(STEPS) - len(left)


def require_collected(root: Path) -> None:
    require_whole(root, KEPT)
    assert {int(path.name.removeprefix("step-")) for path in root.glob("step-*")} == KEPT
    assert not [path for path in paths_under(root) if path.startswith(("collecting/", "readers/"))]


@pytest.fixture
def template(in_memory: Path) -> Path:
    committed_at(in_memory / "template", *STEPS)
    return in_memory / "template"


@pytest.mark.parametrize("way", [over_syscalls, over_store])
def test_killed_anywhere(in_memory: Path, template: Path, way: Callable[[Path, Faults], None]) -> None:
    points = range(1, 4000, STRIDE if way is over_syscalls else 1)
    gone, judged = fates_of_kills(template, in_memory / "root", way, lambda root, _: require_goes_on(root), points)
    assert {0, 1, 2} >= set(gone) >= {0, 2}, "it was killed before the first manifest went and after the last"
    assert gone == sorted(gone), "what went stays gone"
    print(f"{way.__name__}: {judged.deaths} deaths left {judged.contents} contents: 0 kept steps lost, 0 unreadable")


def test_an_error_at_any_operation_loses_nothing(in_memory: Path, template: Path) -> None:
    points = range(1, 2000)
    assert judge_after_errors(template, in_memory / "root", over_store, require_goes_on, points) > 20


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_system_loses_nothing(in_memory: Path, template: Path, code: int) -> None:
    root = in_memory / "root"
    total = Faults()
    copy_with_links(template, root)
    over_syscalls(root, total)
    shutil.rmtree(root)
    judged = Judged[int]()
    for at in range(1 + code % 7, total.counted + 1, 7):
        copy_with_links(template, root)
        try:
            over_syscalls(root, Faults(fail_with(code), at=at))
        except CheckpointError:
            pass
        judged.fate(root, "ended", partial(require_goes_on, root))
        shutil.rmtree(root)


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_power_cut(in_memory: Path, template: Path, kind: str) -> None:
    image, blank, mount = in_memory / "image", in_memory / "blank", in_memory / "m"
    total = Faults()
    copy_with_links(template, in_memory / "counted")
    over_syscalls(in_memory / "counted", total)
    new_image(blank, IMAGE_MIB, kind)
    with mounted(blank, mount, options="loop", kind=kind):
        copy_with_links(template, mount / "root")
    points = sorted({1 + round(number * total.counted / (CUTS - 1)) for number in range(CUTS)})
    gone = set()
    for at in points:
        copy_image(blank, image)
        with mounted(image, mount, options="loop", kind=kind):
            returned = acted_until_power_cut(mount, at, partial(over_syscalls, mount / "root"))
        with mounted(image, mount, options="loop", kind=kind):
            left = set(run_at(local_store(mount / "root")).steps())
            assert not returned or left == KEPT, "what was collected came back"
            gone.add(len(STEPS) - len(left))
            require_goes_on(mount / "root")
    assert {0, 2} <= gone
    print(f"{kind}: {len(points)} power cuts, 0 kept steps lost, 0 unreadable")
